"""`model.fit` of Keras 3 on several workers, with this package's collectives."""

from __future__ import annotations

from tfgradcomp.compat.variables import add_number_conversions
from tfgradcomp.fit.loops import synchronize_loops
from tfgradcomp.fit.seeds import share_global_seeds
from tfgradcomp.fit.shared_paths import share_paths
from tfgradcomp.fit.step import adapt_steps


def enable_multi_worker_fit() -> None:
    """Makes Keras 3 train under `tf.distribute.MultiWorkerMirroredStrategy`.

    `fit`, `evaluate` and `predict` work, with `validation_data`,
    `steps_per_execution` and mixed precision. The optimizers of this package call
    it by themselves; call it for any other optimizer, before `fit`. Calling it again
    does nothing.

    Under a strategy with one process and several devices, the devices also vote on an
    overflow, average their statistics and take a step only if each has a row. Without
    a strategy, Keras' own code runs.

    Example:
        ```python
        tfgradcomp.enable_multi_worker_fit()
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(x, y)
        ```
    """
    synchronize_loops()
    share_global_seeds()
    adapt_steps()
    share_paths()
    add_number_conversions()
