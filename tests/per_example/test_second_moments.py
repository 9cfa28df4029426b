"""Second moments in all modes of a train step on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.per_example.brute_force import (
    Keep,
    brute_force,
    check,
    compiled,
    eager,
    random,
    sequential,
    traced,
)
from tfgradcomp.per_example import second_moments

layers = keras.layers


def network():
    """Layers with and without a rule, but no batch normalization."""
    return sequential(
        (8, 8, 2),
        layers.Conv2D(4, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.DepthwiseConv2D(2),
        layers.LayerNormalization(),
        layers.Reshape((2, -1)),
        layers.LSTM(5),
        layers.Dense(3),
    )


# Chunks of one example, and of several examples with fewer in the last chunk.
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 300])
def test_chunks_of_bounded_memory_change_nothing(size, monkeypatch):
    model = compiled(network())
    monkeypatch.setattr(second_moments, "_CHUNK", size)
    check(model, random(7, 8, 8, 2), random(7, 3), step=traced)


@pytest.mark.slow
def test_static_batch():
    x, y = random(7, 8, 8, 2), random(7, 3)
    check(compiled(network()), x, y, step=traced, static=True)


@pytest.mark.parametrize(
    "microbatches", [None, pytest.param(3, marks=pytest.mark.slow)]
)
def test_xla(microbatches):
    model = compiled(plain_network(), jit_compile=True)
    x, y = random(7, 8, 8, 2), random(7, 3)
    check(model, x, y, None, microbatches, traced, static=True, jit=True)


def test_xla_embedding():
    model = compiled(sequential((6,), layers.Embedding(5, 3)), jit_compile=True)
    tokens = np.random.default_rng(0).integers(0, 4, (7, 6))
    check(model, tokens, random(7, 18), step=traced, static=True, jit=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["full", "activations"])
def test_recomputed_layers(mode):
    with keras.RematScope(mode=mode):
        part = layers.Conv1D(4, 3, activation="tanh")
    model = sequential((5, 3), part, layers.Activation("tanh"))
    check(compiled(model), random(7, 5, 3), random(7, 12), step=traced)


def plain_network():
    """Layers with a rule."""
    return sequential(
        (8, 8, 2),
        layers.Conv2D(4, 3, activation="relu"),
        layers.LayerNormalization(),
        layers.Flatten(),
        layers.Dense(3),
    )


def test_one_example():
    check(compiled(plain_network()), random(1, 8, 8, 2), random(1, 3), step=traced)


def fitted(optimizer, model, x, y, **kwargs):
    """Weights and history after two epochs of batches of 4, the last one smaller."""
    model.compile(optimizer, "mse", metrics=["mae"], **kwargs)
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    return model.get_weights(), history.history


def with_dropout():
    """A network with dropout and batch normalization."""
    keras.utils.set_random_seed(5)
    return sequential(
        (8, 8, 2),
        layers.Conv2D(4, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.4),
        layers.Conv2D(4, 3, padding="same", strides=2),
        layers.Flatten(),
        layers.Dense(8, activation="relu", kernel_regularizer="l2"),
        layers.Dropout(0.4),
        layers.Dense(3),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manner", "microbatches"),
    [
        ({"jit_compile": False, "steps_per_execution": 3}, None),
        ({"jit_compile": False}, 2),
        ({"run_eagerly": True}, None),
        ({"jit_compile": True}, None),
    ],
    ids=["loop", "microbatches", "eager", "xla"],
)
def test_moments_do_not_change_the_bits_of_training(manner, microbatches):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    # XLA compiles for each size of batches.
    rows = 8 if manner.get("jit_compile") else 10
    x, y = random(rows, 8, 8, 2).astype("float32"), random(rows, 3).astype("float32")
    keep = Keep(microbatches=microbatches)
    weights, history = fitted(keep, with_dropout(), x, y, **manner)
    plain = keras.optimizers.SGD(0.1)
    expected, expected_history = fitted(plain, with_dropout(), x, y, **manner)
    for got, want in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert history == expected_history
    assert all((np.array(m) > 0).any() for m in keep.moments)


def test_fit_passes_the_moments_of_each_batch():
    model = plain_network()
    model.compile(Keep(), "mse")
    x, y = random(10, 8, 8, 2), random(10, 3)
    model.fit(x[:8], y[:8], batch_size=4, epochs=2, verbose=0, shuffle=False)
    expected = brute_force(model, x[8:], y[8:])
    model.fit(x[8:], y[8:], batch_size=4, verbose=0)
    for got, want in zip(model.optimizer.moments, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-18)


def test_mixed_precision_passes_unscaled_moments():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    parts = layers.Dense(6, activation="tanh"), layers.Dense(3, dtype="float32")
    model = sequential((5,), *parts)
    model.compile(Keep(0.0), "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = random(8, 5).astype("float32"), random(8, 3).astype("float32")
    for steps_per_execution in (1, 2):
        model.steps_per_execution = steps_per_execution
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        expected = brute_force(model, x, y)
        moments = model.optimizer.inner_optimizer.moments
        for got, want in zip(moments, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0.02, atol=1e-6)
    # An overflow skips the step and its moments.
    kept = [np.array(m) for m in moments]
    model.fit(np.full_like(x, 6e4), np.full_like(y, 1e30), batch_size=8, verbose=0)
    for got, want in zip(moments, kept, strict=True):
        np.testing.assert_array_equal(got, want)


def test_static_loss_scale_applies_to_moments_and_gradients():
    model = compiled(sequential((5,), layers.Dense(4, activation="tanh")))
    x, y = random(7, 5), random(7, 4)
    _, plain = eager(model, x, y)
    model.compile(Keep(loss_scale_factor=8.0), "mse")
    _, scaled = eager(model, x, y)
    for moment, scaled_moment in zip(plain, scaled, strict=True):
        np.testing.assert_array_equal(64 * moment, scaled_moment)


def test_overridden_train_step_is_left_alone():
    given = object()

    class Model(keras.Sequential):
        def train_step(self, data):
            self.optimizer.apply([], [], second_moments=given)
            return {"loss": tf.constant(0.0)}

    class Optimizer(Keep):
        def apply(self, grads, trainable_variables=None, second_moments=None):
            seen.append(second_moments)

    seen = []
    model = Model([keras.Input((5,)), layers.Dense(3)])
    model.compile(Optimizer(), "mse")
    model.fit(random(7, 5), random(7, 3), verbose=0)
    assert seen and all(moments is given for moments in seen)


def test_other_optimizers_get_no_moments():
    model = sequential((5,), layers.Dense(3))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(random(7, 5), random(7, 3), verbose=0)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_model_that_its_first_step_builds(run_eagerly):
    model = keras.Sequential([layers.Dense(4), layers.Dense(1)])
    model.compile(Keep(), "mse", run_eagerly=run_eagerly)
    model.fit(random(4, 5), random(4, 1), batch_size=2, verbose=0)
    assert model.optimizer.iterations == 2
    assert all(np.any(moment) for moment in model.optimizer.moments)
