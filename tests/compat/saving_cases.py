"""Cases of `model.fit` on several workers: saving, resuming, workers that differ."""

from pathlib import Path

import keras
import tensorflow as tf

from tests.compat.fit_models import (
    METHODS,
    digest,
    fit,
    make,
    own_rank,
    residuals,
    scope,
)


def case_state(folder):
    """Saved and restored in every way, the run goes on to the same bits."""
    folder, rank = Path(folder), own_rank()
    answer = {}
    model = make(METHODS["dist_ef_block_sgdm"])
    fit(model)
    answer["at_save"] = digest(model), residuals(model)
    if rank == 0:
        model.save(folder / "of_worker_0.keras")
    model.save(folder / f"own-{rank}.keras")
    model.save_weights(folder / f"own-{rank}.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.write(str(folder / f"checkpoint-{rank}"))
    fit(model)
    answer["uninterrupted"] = digest(model)

    with scope():
        loaded = keras.saving.load_model(folder / f"own-{rank}.keras")
    fit(loaded)
    answer["keras"] = digest(loaded)

    weights = make(METHODS["dist_ef_block_sgdm"])
    with scope():
        weights.optimizer.build(weights.trainable_variables)
    weights.load_weights(folder / f"own-{rank}.weights.h5")
    fit(weights)
    answer["weights"] = digest(weights)

    restored = make(METHODS["dist_ef_block_sgdm"])
    with scope():
        restored.optimizer.build(restored.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=restored, optimizer=restored.optimizer)
    checkpoint.read(
        str(folder / f"checkpoint-{rank}")
    ).assert_existing_objects_matched()
    fit(restored)
    answer["checkpoint"] = digest(restored)

    with scope():
        same = keras.saving.load_model(folder / "of_worker_0.keras")
    answer["of_worker_0"] = digest(same), residuals(same)
    return answer


def case_checkpoint_callback(folder):
    """Keras' own callbacks, a file a worker."""
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
    """One script gives all workers the same paths."""
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
        # Without the optimizer: either worker's file may be the last one.
        path = folder / "checkpoints" / "whole.keras"
        whole = keras.saving.load_model(path, compile=False)
    return {
        "straight": digest(straight),
        "resumed": digest(resumed),
        "checkpoint": digest(whole) == digest(interrupted),
        "files": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }


def case_different_weights():
    """Worker 1 has loaded other weights: all raise, none trains on."""
    model = make(METHODS["terngrad"])
    if own_rank() == 1:
        model.set_weights([w + 1 for w in model.get_weights()])
    try:
        fit(model, epochs=1)
        return {"error": None}
    except ValueError as error:
        return {"error": str(error)}


def case_different_models():
    """Worker 1 names a layer differently: all raise, none hangs."""
    keras.backend.clear_session()
    with scope():
        name = "second" if own_rank() == 0 else "other"
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(40),
                keras.layers.Dense(3, name=name),
            ]
        )
        model.compile(METHODS["terngrad"](), "mse")
    try:
        fit(model, epochs=1)
        return {"error": None}
    except ValueError as error:
        return {"error": str(error)}


def case_different_arguments():
    """Worker 1 has another seed."""
    model = make(lambda: METHODS["terngrad"](seed=own_rank()))
    try:
        fit(model, epochs=1)
        return {"error": None}
    except ValueError as error:
        return {"error": str(error)}
