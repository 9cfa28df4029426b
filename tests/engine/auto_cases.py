"""One program whose transports are chosen by forced costs, run on real workers."""

import hashlib
import logging

import keras
import numpy as np
import tensorflow as tf

from tests.cluster import strategy_and_rank
from tests.methods import ROWS
from tfgradcomp.transports import Costs, LinearCost

NEVER = LinearCost(1e9, 0.0)
FREE = LinearCost(0.0, 0.0)
# A sharded exchange gathers its replies, 1/N of the words.
COSTS = {
    "all_gather": Costs(gather=FREE, all_to_all=NEVER, sum=NEVER),
    "all_reduce": Costs(gather=NEVER, all_to_all=NEVER, sum=FREE),
    "sharded": Costs(gather=LinearCost(0.0, 1e3), all_to_all=FREE, sum=NEVER),
    # The bucket of the small layer is gathered, that of the large one sharded.
    "mixed": Costs(
        gather=LinearCost(0.0, 1e3), all_to_all=LinearCost(3e5, 0.0), sum=NEVER
    ),
    "measured": "auto",
}


def train(name, choice):
    """Trains by a row; returns the transports, and a digest of the weights."""
    strategy, rank = strategy_and_rank()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((60,)),
                keras.layers.Dense(2000, "relu"),
                keras.layers.Dense(2),
            ]
        )
        optimizer = ROWS[name].make_to_train(
            transport=COSTS[choice], bucket_bytes=8_000, min_size=1_000
        )
        model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(rank)
    x, y = rng.normal(size=(32, 60)), rng.normal(size=(32, 2))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(options)
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    weights = b"".join(np.asarray(w).tobytes() for w in model.get_weights())
    transports = [
        type(bucket.route).__name__
        for bucket in optimizer.stepper.buckets
        if bucket.is_compressed
    ]
    return transports, hashlib.sha256(weights).hexdigest()


def said(name):
    """Returns the lines that the choice by measurement logs."""
    lines = []

    class Handler(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Handler()
    logger = logging.getLogger("tfgradcomp")
    logger.addHandler(handler)
    try:
        train(name, "measured")
    finally:
        logger.removeHandler(handler)
    return lines
