"""Trainings with second moments on the workers of a pool."""

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.per_example import brute_force
from tfgradcomp.per_example.second_moments import enable_second_moments

MANNERS = {
    "several_steps": {"steps_per_execution": 2},
    "mixed": {"policy": "mixed_float16"},
}


class Keep(brute_force.Keep):
    """SGD that stores the moments of each worker."""

    def moment_like(self, variable):
        zeros = tf.zeros(variable.shape)
        return keras.Variable(zeros, synchronization="on_read", aggregation="mean")


class WithoutAllReduce(Keep):
    """Keep without Keras' all-reduce, which fails if steps run in a loop."""

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return grads_and_vars


def data():
    """Returns two global batches of 8 examples."""
    rng = np.random.default_rng(7)
    shapes = (16, 8, 8, 2), (16, 3)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def network(mixing, dtype="float32"):
    """Returns a small network, with dropout and batch normalization if `mixing`.

    `dtype` is that of the output, whatever the policy.
    """
    keras.utils.set_random_seed(3)
    layers = keras.layers
    parts = [keras.Input((8, 8, 2)), layers.Conv2D(4, 3, activation="relu")]
    if mixing:
        parts += [layers.BatchNormalization(), layers.Dropout(0.3)]
    parts += [layers.PReLU(shared_axes=[1, 2]), layers.Flatten()]
    parts.append(layers.Dense(3, kernel_regularizer="l2", dtype=dtype))
    return keras.Sequential(parts)


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
    """The weights of a plain training, and of a training that computes moments."""
    return {
        "plain": weights_of(fitted(keras.optimizers.SGD(0.01))),
        "with_moments": weights_of(fitted(Keep(0.01))),
    }


def case_moments(manner):
    """The moments of each replica's last batch."""
    model = fitted(WithoutAllReduce(0.0), mixing=False, **MANNERS[manner])
    return {"weights": weights_of(model), "moments": moments_of(model)}
