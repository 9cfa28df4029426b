"""Cases of a late worker, for the workers of a pool."""

import os
import signal
import time

import keras
import tensorflow as tf

from tests.cluster import strategy_and_rank
from tests.fit.fit_models import METHODS, X, Y, digest, make
from tfgradcomp.collectives import across_hosts
from tfgradcomp.collectives.stalls import Limits

SECONDS = 3


def train(where, limits):
    """Trains and evaluates; worker 1 is late once, or forever if a limit ends the wait.

    Args:
        where: "data": in a dataset; "callback": in a callback; "evaluate": in one of an
            evaluation; "stopped": its process is stopped by a signal.
        limits: Seconds until a line is said, and until the process ends.
    """
    strategy, rank = strategy_and_rank()
    hosts = across_hosts(strategy)
    hosts.watch()
    hosts._watchdog.limits = Limits(*limits)
    seconds = SECONDS if limits[1] == float("inf") else 600

    passes = []

    def rows():
        passes.append(1)
        for index, row in enumerate(zip(X.copy(), Y.copy(), strict=True)):
            if (where, rank, len(passes), index) == ("data", 1, 1, 20):
                time.sleep(seconds)
            yield row

    def late_callback(batch, logs=None):
        if (rank, batch) != (1, 2):
            return
        if where == "stopped":
            # The test continues the process.
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(seconds)

    callback = keras.callbacks.Callback()
    if where in ("callback", "stopped"):
        callback.on_train_batch_end = late_callback
    if where == "evaluate":
        callback.on_test_batch_end = late_callback
    spec = (tf.TensorSpec((64,)), tf.TensorSpec((3,)))
    data = tf.data.Dataset.from_generator(rows, output_signature=spec).batch(12)
    model = make(METHODS["terngrad"])
    model.fit(data, epochs=1, verbose=0, shuffle=False, callbacks=[callback])
    model.evaluate(data, verbose=0, callbacks=[callback])
    hosts._watchdog.limits = Limits.of_environment()
    return digest(model)
