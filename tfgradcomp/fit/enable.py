"""`model.fit` of Keras 3 on several workers, with this package's collectives."""

from __future__ import annotations

from tfgradcomp.collectives.replicas import across_hosts, for_strategy
from tfgradcomp.compat.multi_worker_fit import mend_keras


def enable_multi_worker_fit() -> None:
    """Makes Keras 3 train under `tf.distribute.MultiWorkerMirroredStrategy`.

    `fit`, `evaluate` and `predict` work, with `validation_data`,
    `steps_per_execution` and mixed precision. The optimizers of this package call
    it by themselves; call it for any other optimizer, before `fit`. Calling it again
    does nothing.

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
    mend_keras(across_hosts, for_strategy)
