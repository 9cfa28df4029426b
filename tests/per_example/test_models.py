"""Second moments of whole models and losses, compared with brute force."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import KERAS
from tests.per_example.brute_force import (
    Keep,
    check,
    compiled,
    eager,
    random,
    sequential,
    traced,
)

layers = keras.layers


def functional():
    """Nested models, two inputs, two outputs, a residual connection."""
    block = keras.Sequential(
        [keras.Input((6, 6, 3)), layers.Conv2D(3, 3, padding="same", activation="tanh")]
    )
    image, flat = keras.Input((6, 6, 3)), keras.Input((5,))
    x = block(image) + image
    x = layers.GlobalAveragePooling2D()(block(x))
    x = layers.Concatenate()([x, layers.Dense(4, activation="tanh")(flat)])
    outputs = {"a": layers.Dense(2, name="a")(x), "b": layers.Dense(3, name="b")(x)}
    return keras.Model({"image": image, "flat": flat}, outputs)


def test_nested_models_several_losses_and_sample_weights():
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss, loss_weights = {"a": "mse", "b": entropy}, {"a": 0.7, "b": 2.0}
    model = compiled(functional(), loss, loss_weights=loss_weights)
    y = {"a": random(7, 2), "b": np.arange(7) % 3}
    x = {"image": random(7, 6, 6, 3), "flat": random(7, 5)}
    check(model, x, y)
    weights = {"a": 1 + np.arange(7.0), "b": np.arange(7) % 2 + 0.5}
    check(model, x, y, weights)


class Subclassed(keras.Model):
    """Has layers in a list, which it calls with keyword arguments."""

    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(4, activation="tanh") for _ in range(2)]
        self.norm = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, 3)

    def call(self, inputs, training=None):
        for part in self.parts:
            inputs = part(inputs=inputs)
        x = self.attention(inputs, inputs, use_causal_mask=True)
        return self.norm(x + inputs)


def test_subclassed_model_with_attention(recwarn):
    model = Subclassed()
    model(random(2, 5, 4))
    check(compiled(model), random(7, 5, 4), random(7, 5, 4))
    assert not [w for w in recwarn if "has no rule" in str(w.message)]


def test_frozen_weights_have_no_moment():
    model = sequential((5,), layers.Dense(4, activation="tanh"), layers.Dense(3))
    model.layers[0].trainable = False
    assert len(check(compiled(model), random(7, 5), random(7, 3))[1]) == 2


def test_a_weight_without_a_gradient_has_no_moment():
    x = keras.Input((4,))
    used, unused = layers.Dense(2)(x), layers.Dense(3)(x)
    model = keras.Model(x, [used, unused])
    model.compile(Keep(), ["mse", None])
    gradients, moments = traced(model, random(7, 4), [random(7, 2), None])
    assert [m is None for m in moments] == [g is None for g in gradients]
    assert [m is None for m in moments] == [False, False, True, True]


class InInference(layers.Layer):
    """Calls a layer in inference mode."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x, training=False)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("training", [True, False])
def test_batch_normalization_with_constant_statistics(axis, training):
    """g_z of gamma is the sum over positions of δ_z x̂_z, of beta that of δ_z."""
    norm = layers.BatchNormalization(axis=axis)
    part = norm if training else InInference(norm)
    model = compiled(sequential((4, 3, 2), part, layers.Activation("tanh")))
    norm.moving_mean.assign(random(*norm.moving_mean.shape))
    x, y = random(7, 4, 3, 2), random(7, 24)
    shape = [1, 1, 1, 2] if axis == -1 else [1, 4, 1, 1]
    over = (0, 1, 2) if axis == -1 else (0, 2, 3)
    gamma, beta = (np.reshape(v, shape) for v in (norm.gamma, norm.beta))
    if training:
        mean, variance = x.mean(over, keepdims=True), x.var(over, keepdims=True)
    else:
        mean, variance = np.reshape(norm.moving_mean, shape), 1.0
    normal = (x - mean) / np.sqrt(variance + norm.epsilon)
    out = np.tanh(gamma * normal + beta)
    delta = 2 * (out - y.reshape(out.shape)) / y.size * (1 - out**2)
    _, (m_gamma, m_beta) = eager(model, x, y)
    for m, terms in ((m_gamma, delta * normal), (m_beta, delta)):
        want = np.square(terms.sum(over[1:])).sum(0)
        np.testing.assert_allclose(m, want, rtol=1e-9)


def test_batch_normalization_under_a_mask():
    norm = layers.BatchNormalization()
    model = sequential((5, 2), layers.Masking(), norm, layers.Activation("tanh"))
    x, y = random(7, 5, 2), random(7, 10)
    x[1, 3:] = x[4, 1:] = 0
    there = x.any(-1, keepdims=True)
    mean = (x * there).sum((0, 1)) / there.sum()
    variance = (np.square(x - mean) * there).sum((0, 1)) / there.sum()
    normal = (x - mean) / np.sqrt(variance + norm.epsilon)
    out = np.tanh(normal)
    delta = 2 * (out - y.reshape(out.shape)) / y.size * (1 - out**2)
    model.compile(Keep(), "mse")
    _, moments = eager(model, x, y)
    want = np.square((delta * normal).sum(1)).sum(0)
    # Keras adds an epsilon to the number of positions.
    np.testing.assert_allclose(moments[0], want, rtol=1e-6)


@pytest.mark.skipif(KERAS < (3, 14), reason="Keras 3.14 is the first that has it.")
def test_renorm_raises():
    model = sequential((3,), layers.BatchNormalization(renorm=True))
    with pytest.raises(ValueError, match="with renorm=False"):
        eager(compiled(model), random(7, 3), random(7, 3))


# Losses that depend on the weights directly.


@pytest.mark.parametrize("microbatches", [None, 7])
def test_a_regularizer_is_shared_by_all_examples(microbatches):
    model = sequential(
        (5,),
        layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.3)),
        # Not "l1": before Keras 3.15 it is a float32, whatever it is applied to.
        layers.Dense(3, bias_regularizer=keras.regularizers.L1L2(l1=0.01)),
    )
    check(compiled(model), random(7, 5), random(7, 3), microbatches=microbatches)


def test_activity_regularizers_belong_to_each_example():
    dense = layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.3))
    model = sequential((5,), dense, layers.ActivityRegularization(l2=0.01))
    x, y = random(7, 5), random(7, 4)
    _, moments = eager(compiled(model), x, y)
    out = x @ np.array(dense.kernel) + np.array(dense.bias)
    # Keras adds up the examples' terms; from 3.14 on it takes their mean.
    number = 1 if KERAS < (3, 14) else 7
    delta = 2 * (out - y) / y.size + 2 * (0.3 + 0.01) * out / number
    np.testing.assert_allclose(moments[0], (x**2).T @ delta**2, rtol=1e-6)


class OwnLoss(layers.Layer):
    """Reads a weight and adds a loss."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        self.add_loss(keras.ops.sum(keras.ops.square(self.w)))
        return x * self.w


def test_add_loss_in_a_layer_with_weights_raises():
    model = sequential((5,), OwnLoss())
    with pytest.raises(ValueError, match="in a separate layer"):
        eager(compiled(model), random(7, 5), random(7, 5))


# Gradients that cannot be split by examples.


def test_one_microbatch_raises():
    model = compiled(sequential((5,), layers.Dense(3)))
    with pytest.raises(ValueError, match="one group has no variance"):
        eager(model, random(7, 5), random(7, 3), microbatches=1)


def test_random_layer_without_a_rule_raises():
    model = sequential((5, 3), layers.LSTM(4, dropout=0.5))
    with pytest.raises(ValueError, match="draws random numbers or keeps state"):
        eager(compiled(model), random(7, 5, 3), random(7, 4))


def test_output_without_the_axis_of_examples_raises():
    x = keras.Input((6, 4))
    y = layers.Dense(3)(keras.ops.reshape(x, (-1, 4)))
    model = compiled(keras.Model(x, keras.ops.reshape(y, (-1, 18))))
    with pytest.raises(tf.errors.InvalidArgumentError, match="be that of the batch"):
        traced(model, random(7, 6, 4), random(7, 18))
