"""A training of the tests of backups, which may be interrupted.

A pool runs `train`; as a script this is one worker of a cluster that the launcher has
started.
"""

import errno
import hashlib
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import tfgradcomp
from tests.cluster import report, strategy_and_rank
from tfgradcomp.checkpoint import backups

random = np.random.default_rng(7)
X = random.normal(size=(48, 64)).astype("float32")
Y = random.normal(size=(48, 3)).astype("float32")
STEPS, EPOCHS = 4, 5


class At(keras.callbacks.Callback):
    """Calls a function on one worker, once.

    Args:
        method: Name of the callback's method.
        index: Number of the method's call, counted through the training from 1.
        rank: The worker; None: all.
        action: The function.
    """

    def __init__(self, method, index, rank, action):
        super().__init__()
        self.calls = 0
        _, this_rank = strategy_and_rank()
        if rank in (None, this_rank):
            setattr(self, method, lambda *_, **__: self._count(index, action))

    def _count(self, index, action):
        self.calls += 1
        if self.calls == index:
            action()


def interrupt():
    raise KeyboardInterrupt


def preempt():
    os.kill(os.getpid(), signal.SIGTERM)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class Noise(keras.layers.Layer):
    """Adds random numbers of Keras' global generator."""

    def call(self, x, training=False):
        return x + 0.1 * keras.random.normal((64,)) if training else x


def compiled(strategy, every=None, delay=0):
    """Returns a model with random numbers, statistics and two states of a method.

    Args:
        strategy: The strategy.
        every: Number of local steps between exchanges; None: no local steps.
        delay: Of local steps.
    """
    keras.utils.set_random_seed(3)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), Noise()])
        model.add(layers.Dense(40, activation="relu"))
        model.add(layers.BatchNormalization(momentum=0.8))
        model.add(layers.Dropout(0.2))
        model.add(layers.Dense(3))
        schedule = keras.optimizers.schedules.CosineDecay(0.02, 30)
        optimizer = tfgradcomp.DistEFBlockSGDM(
            keras.optimizers.SGD(0.7 if every else schedule), transport="sharded"
        )
        if every:
            adam = keras.optimizers.Adam(schedule)
            optimizer = tfgradcomp.LocalSteps(adam, optimizer, every, delay=delay)
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


# Arguments of `At`, for callbacks before the backup and for callbacks after it.
MODES = {
    "resume": ([], []),
    "interrupt": ([], [("on_epoch_end", 3, None, interrupt)]),
    "interrupt in an epoch": ([], [("on_train_batch_end", 11, None, interrupt)]),
    "SIGTERM in a step": ([("on_train_batch_begin", 10, 1, preempt)], []),
    "SIGTERM in validation": ([("on_test_batch_begin", 6, 0, preempt)], []),
    "killed in a step": ([("on_train_batch_begin", 9, 1, kill)], []),
    "SIGTERM at an end": ([("on_train_batch_end", 8, 1, preempt)], []),
}


def train(
    folder, mode, save_freq="epoch", validate=False, fault=None, every=None, delay=0
):
    """Trains for five epochs, or until the interruption.

    Args:
        folder: Parent of the backup's folder.
        mode: `"uninterrupted"`, without a backup, or one of `MODES`.
        save_freq: `save_freq` of the backup.
        validate: True: epochs end with a validation.
        fault: Fault on worker 1, in a write: `"full"`, `"bug"`; or as training begins:
            `"metadata"`, `"weights"`, `"all weights"`.
        every: Number of local steps between exchanges; None: no local steps.
        delay: Of local steps.
    """
    strategy, rank = strategy_and_rank()
    directory = Path(folder, "backup")
    model = compiled(strategy, every, delay)
    callbacks = []
    if mode != "uninterrupted":
        backup = tfgradcomp.callbacks.BackupAndRestore(
            str(directory), mode == "resume" and fault != "full", save_freq
        )
        before, after = ([At(*args) for args in side] for side in MODES[mode])
        callbacks = [*before, backup, *after]
    if fault and rank == 1:
        break_(model, fault)
    answer = {}
    try:
        history = model.fit(
            *(X, Y),
            batch_size=48 // STEPS,
            epochs=EPOCHS,
            verbose=0,
            shuffle=False,
            callbacks=callbacks,
            validation_data=(X, Y) if validate else None,
            validation_batch_size=12,
        )
        answer["epochs"] = history.epoch
        answer |= {name: history.history[name] for name in ("loss", "mae")}
    except KeyboardInterrupt:
        answer["epochs"] = "interrupted"
    except SystemExit as end:
        answer["epochs"] = f"exit code {end.code}"
        if __name__ == "__main__":
            raise
    except (ValueError, RuntimeError) as error:
        answer["error"] = str(error)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        vars(backups).update(KEPT_FUNCTIONS)
    data = b"".join(w.tobytes() for w in model.get_weights())
    answer["digest"] = hashlib.sha256(data).hexdigest()
    answer["residual"] = [
        v.numpy().tolist()
        for v in model.optimizer.variables
        if v.name == "compressed.worker.residual"
    ]
    answer["left"] = sorted(p.name for p in directory.glob(f"worker-{rank}/*"))
    return answer


KEPT_FUNCTIONS = {name: vars(backups)[name] for name in ("write", "read_origin")}


def break_(model, fault):
    """Makes a part of a backup fail on this worker."""
    calls = []
    load_weights = model.load_weights

    def write(*args):
        calls.append(args)
        if len(calls) == 3 and fault == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if fault == "bug":
            raise TypeError("no such layer")
        KEPT_FUNCTIONS["write"](*args)

    def read_origin(*_):
        raise KeyError("rank")

    def load(path):
        calls.append(path)
        if len(calls) == 1 or fault == "all weights":
            raise OSError(errno.EIO, "Input/output error")
        load_weights(path)

    if fault in ("full", "bug"):
        backups.write = write
    elif fault == "metadata":
        backups.read_origin = read_origin
    else:
        vars(model)["load_weights"] = load


if __name__ == "__main__":
    folder, mode, *rest = sys.argv[1:]
    # A user's script: it resumes if the launcher has restarted it.
    if os.environ["TFGRADCOMP_RESTART_COUNT"] != "0":
        mode = "resume"
    save_freq = int(rest[0]) if rest else "epoch"
    report(folder, strategy_and_rank()[1], train(folder, mode, save_freq))
