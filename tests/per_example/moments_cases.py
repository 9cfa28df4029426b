"""What the workers of a pool do in the tests of second moments."""

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tfgradcomp.per_example.second_moments import enable_second_moments

MANNERS = {
    "several_steps": {"steps_per_execution": 2},
    "mixed": {"policy": "mixed_float16"},
}


class Keep(keras.optimizers.SGD):
    """SGD that stores each worker's moments."""

    needs_second_moments = True

    def build(self, variables):
        super().build(variables)
        self.moments = [
            keras.Variable(
                tf.zeros(v.shape), synchronization="on_read", aggregation="mean"
            )
            for v in variables
        ]

    def apply(self, grads, trainable_variables=None, second_moments=None):
        super().apply(grads, trainable_variables)
        for variable, moment in zip(self.moments, second_moments, strict=True):
            variable.assign(moment)


class WithoutAllReduce(Keep):
    """Keep without Keras' all-reduce, which fails where steps run in a loop."""

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return grads_and_vars


def data():
    """Returns two global batches of 8 examples."""
    rng = np.random.default_rng(7)
    shapes = (16, 8, 8, 2), (16, 3)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def network(mixing):
    """Returns a small network, with dropout and batch normalization if `mixing`."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((8, 8, 2)), keras.layers.Conv2D(4, 3, activation="relu")]
    )
    if mixing:
        model.add(keras.layers.BatchNormalization())
        model.add(keras.layers.Dropout(0.3))
    model.add(keras.layers.PReLU(shared_axes=[1, 2]))
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(3, kernel_regularizer="l2", dtype="float32"))
    return model


def fitted(optimizer, mixing=True, policy="float32", **kwargs):
    """Returns a model after two epochs of two steps."""
    tfgradcomp.enable_multi_worker_fit()
    enable_second_moments()
    strategy, _ = strategy_and_rank()
    keras.config.set_dtype_policy(policy)
    with strategy.scope():
        model = network(mixing)
        model.compile(optimizer, "mse", **kwargs)
    x, y = data()
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


def weights_of(model):
    """Returns the weights of a model as lists."""
    return [w.tolist() for w in model.get_weights()]


def moments_of(model):
    """Returns the moments of each local replica as lists."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    strategy, _ = strategy_and_rank()
    local = strategy.experimental_local_results
    values = [local(m._value) for m in optimizer.moments]
    return [
        [v.numpy().tolist() for v in replica] for replica in zip(*values, strict=True)
    ]


def case_bits():
    """The weights of plain training, and those where moments are computed as well."""
    return {
        "plain": weights_of(fitted(keras.optimizers.SGD(0.01))),
        "with_moments": weights_of(fitted(Keep(0.01))),
    }


def case_moments(manner):
    """The moments of each replica's last batch."""
    model = fitted(WithoutAllReduce(0.0), mixing=False, **MANNERS[manner])
    return {"weights": weights_of(model), "moments": moments_of(model)}
