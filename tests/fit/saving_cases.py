"""Cases of `model.fit` on several workers: saving, resuming, workers that differ."""

import functools
from pathlib import Path

import keras
import tensorflow as tf

from tests.fit.fit_models import (
    METHODS,
    digest,
    error_of_fit,
    fit,
    make,
    own_rank,
    residuals,
    scope,
)


def case_file_of_worker_0(folder):
    """Saves the state of worker 0, and loads it on all workers."""
    path, model = Path(folder, "of_worker_0.keras"), make(METHODS["dist_ef_block_sgdm"])
    fit(model)
    if own_rank() == 0:
        model.save(path)
    # Worker 0 comes here only then.
    answer = {"at_save": (digest(model), residuals(model))}
    fit(model, epochs=1)
    with scope():
        same = keras.saving.load_model(path)
    return answer | {"loaded": (digest(same), residuals(same))}


def case_state(folder):
    """Saves and restores a run in every way, then continues it."""
    folder, rank = Path(folder), own_rank()
    make_one = functools.partial(make, METHODS["dist_ef_block_sgdm"])

    def built():
        new = make_one()
        with scope():
            new.optimizer.build(new.trainable_variables)
        return new

    def checkpoint_of(model):
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    def digest_after_fit(model):
        fit(model)
        return digest(model)

    answer = {}
    model = make_one()
    fit(model)
    model.save(folder / f"own-{rank}.keras")
    model.save_weights(folder / f"own-{rank}.weights.h5")
    checkpoint_of(model).write(str(folder / f"checkpoint-{rank}"))
    answer["uninterrupted"] = digest_after_fit(model)
    with scope():
        loaded = keras.saving.load_model(folder / f"own-{rank}.keras")
    answer["keras"] = digest_after_fit(loaded)
    weights = built()
    weights.load_weights(folder / f"own-{rank}.weights.h5")
    answer["weights"] = digest_after_fit(weights)
    restored = built()
    status = checkpoint_of(restored).read(str(folder / f"checkpoint-{rank}"))
    status.assert_existing_objects_matched()
    answer["checkpoint"] = digest_after_fit(restored)
    return answer


def case_checkpoint_callback(folder):
    """Saves by Keras' own callback, one file per worker."""
    path = str(Path(folder) / f"best-{own_rank()}.keras")
    model = make(METHODS["terngrad"])
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    with scope():
        loaded = keras.saving.load_model(path)
    return {"equal": digest(model) == digest(loaded)}


class Interrupt(keras.callbacks.Callback):
    """Ends training after two epochs."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


def case_shared_paths(folder):
    """Saves and resumes where one script gives all workers the same paths."""
    folder = Path(folder) / "shared"
    optimizer = METHODS["dist_ef_block_sgdm"]
    straight = make(optimizer)
    fit(straight, epochs=4)
    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
    callbacks = [
        backup,
        keras.callbacks.ModelCheckpoint(str(folder / "checkpoints/whole.keras")),
        keras.callbacks.ModelCheckpoint(
            str(folder / "checkpoints/{epoch}.weights.h5"), save_weights_only=True
        ),
        Interrupt(),
    ]
    interrupted = make(optimizer)
    try:
        fit(interrupted, epochs=4, callbacks=callbacks)
    except KeyboardInterrupt:
        pass
    resumed = make(optimizer)
    # A fresh callback, as in a fresh process.
    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
    fit(resumed, epochs=4, callbacks=[backup])
    with scope():
        # Without the optimizer, since the file may be that of either worker.
        path = folder / "checkpoints" / "whole.keras"
        whole = keras.saving.load_model(path, compile=False)
    return {
        "straight": digest(straight),
        "resumed": digest(resumed),
        "checkpoint": digest(whole) == digest(interrupted),
        "files": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }


def case_different(what):
    """Trains where worker 1 differs in its model or weights."""
    is_other = own_rank() == 1
    last = "other" if what == "models" and is_other else "second"
    model = make(METHODS["terngrad"], last=last)
    if what == "weights" and is_other:
        model.set_weights([w + 1 for w in model.get_weights()])
    return error_of_fit(model, epochs=1)
