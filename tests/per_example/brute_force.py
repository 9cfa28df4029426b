"""Second moments by brute force: example by example, in float64."""

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.per_example import second_moments

layers = keras.layers


class Keep(keras.optimizers.SGD):
    """SGD that stores the moments of each step."""

    needs_second_moments = True

    def __init__(self, learning_rate=0.1, microbatches=None, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.microbatches = microbatches

    def build(self, variables):
        super().build(variables)
        self.moments = [self.moment_like(v) for v in variables]

    def moment_like(self, variable):
        return self.add_variable_from_reference(variable, "m")

    def apply(self, grads, trainable_variables=None, second_moments=None):
        super().apply(grads, trainable_variables)
        for variable, moment in zip(self.moments, second_moments, strict=True):
            variable.assign(moment)


def random(*shape):
    """Reproducible inputs."""
    return np.random.default_rng(sum(shape)).normal(size=shape)


def compiled(model, loss="mse", **kwargs):
    """Compiles a model, with every weight moved away from its initial zero or one."""
    rng = np.random.default_rng(3)
    for v in model.trainable_variables:
        v.assign(v + 0.1 * rng.normal(size=v.shape))
    model.compile(Keep(), loss, **kwargs)
    return model


def sequential(shape, *parts):
    return keras.Sequential([keras.Input(shape), *parts, layers.Flatten()])


def rows(tree, index):
    return None if tree is None else keras.tree.map_structure(lambda v: v[index], tree)


def groups_of(batch, microbatches):
    """Returns the indices of the examples in each sample."""
    size = 1 if microbatches is None else -(-batch // microbatches)
    return [range(i, min(i + size, batch)) for i in range(0, batch, size)]


def brute_force(model, x, y, sample_weight=None, microbatches=None):
    """Returns sums of squares, computed from the loss of each sample alone.

    Each example counts 1 / B; a regularizer is shared equally.
    """
    batch = len(keras.tree.flatten(x)[0])
    totals = [0.0] * len(model.trainable_variables)
    for group in groups_of(batch, microbatches):
        with tf.GradientTape() as tape:
            loss = 0.0
            for i in group:
                given, target, weight = (
                    rows(tree, slice(i, i + 1)) for tree in (x, y, sample_weight)
                )
                y_pred = model(given, training=False)
                loss += model.compute_loss(given, target, y_pred, weight) / batch
        gradients = tape.gradient(loss, model.trainable_variables)
        for index, gradient in enumerate(gradients):
            totals[index] += np.square(tf.convert_to_tensor(gradient))
    return totals


def map_present(function, tree):
    """Applies a function to each leaf of a tree that is not None."""
    return keras.tree.map_structure(lambda v: None if v is None else function(v), tree)


def eager(model, x, y, sample_weight=None, microbatches=None):
    """Returns gradients and moments of one eager step."""
    arguments = map_present(tf.constant, (x, y, sample_weight))
    done = second_moments.step_of(model, *arguments, microbatches)
    return done.gradients, done.moments


def traced(model, x, y, sample_weight=None, microbatches=None, static=False, jit=None):
    """Returns gradients and moments of one step in a graph."""

    @tf.function(jit_compile=jit, autograph=False)
    def step(x, y, sample_weight):
        done = second_moments.step_of(model, x, y, sample_weight, microbatches)
        return done.gradients, done.moments

    def tensor(value):
        value = tf.constant(value)
        if static:
            return value
        # A batch of unknown size, as in `fit`.
        return next(iter(tf.data.Dataset.from_tensor_slices(value).batch(len(value))))

    def spec(value):
        return tf.TensorSpec([None, *value.shape[1:]], value.dtype)

    arguments = map_present(tensor, (x, y, sample_weight))
    if static:
        return step(*arguments)
    return step.get_concrete_function(*map_present(spec, arguments))(*arguments)


def check(model, x, y, sample_weight=None, microbatches=None, step=eager, **kwargs):
    """Compares the moments of a step with brute force."""
    gradients, moments = step(model, x, y, sample_weight, microbatches, **kwargs)
    expected = brute_force(model, x, y, sample_weight, microbatches)
    assert len(moments) == len(model.trainable_variables) > 0
    for v, m, e in zip(model.trainable_variables, moments, expected, strict=True):
        np.testing.assert_allclose(m, e, rtol=1e-9, atol=1e-18, err_msg=v.path)
        assert e.shape == tuple(v.shape) and (e > 0).any()
    return gradients, moments
