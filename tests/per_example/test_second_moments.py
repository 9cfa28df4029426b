"""Second moments against gradients of one example after the other, in float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cluster import run_workers
from tfgradcomp.per_example import moment_rules, second_moments
from tfgradcomp.per_example.layer_calls import Call

layers = keras.layers
pytestmark = pytest.mark.timeout(600)
second_moments.enable_second_moments()


@pytest.fixture(autouse=True)
def _float64():
    """Brute force needs digits; what needs float32 asks for it."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


class Keep(keras.optimizers.SGD):
    """SGD that stores the moments that it is given."""

    needs_second_moments = True

    def __init__(self, learning_rate=0.1, microbatches=None, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.microbatches = microbatches

    def build(self, variables):
        super().build(variables)
        self.moments = [self.add_variable_from_reference(v, "m") for v in variables]

    def apply(self, grads, trainable_variables=None, second_moments=None):
        super().apply(grads, trainable_variables)
        for variable, moment in zip(self.moments, second_moments, strict=True):
            variable.assign(moment)


def random(*shape):
    """Reproducible inputs."""
    return np.random.default_rng(sum(shape)).normal(size=shape)


def compiled(model, loss="mse", **kwargs):
    """The model, and every weight away from its initial zero or one."""
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
    """The examples' indices in each sample."""
    size = 1 if microbatches is None else -(-batch // microbatches)
    return [range(i, min(i + size, batch)) for i in range(0, batch, size)]


def brute_force(model, x, y, sample_weight=None, microbatches=None):
    """Sums of squares, from the loss of each sample by itself.

    All examples count for 1 / B, a regularizer for its share.
    """
    batch = len(keras.tree.flatten(x)[0])
    total = None
    for group in groups_of(batch, microbatches):
        with tf.GradientTape() as tape:
            loss = 0.0
            for i in group:
                one = slice(i, i + 1)
                loss += (
                    model.compute_loss(
                        rows(x, one),
                        rows(y, one),
                        model(rows(x, one), training=False),
                        rows(sample_weight, one),
                    )
                    / batch
                )
        gradients = tape.gradient(loss, model.trainable_variables)
        squares = [None if g is None else np.square(dense(g)) for g in gradients]
        if total is None:
            total = squares
        else:
            total = [
                None if t is None else t + s
                for t, s in zip(total, squares, strict=True)
            ]
    return total


def dense(gradient):
    return np.array(tf.convert_to_tensor(gradient))


def eager(model, x, y, sample_weight=None, microbatches=None):
    """Gradients and moments of one step without a graph."""
    arguments = keras.tree.map_structure(
        lambda v: None if v is None else tf.constant(v), (x, y, sample_weight)
    )
    done = second_moments.step_of(model, *arguments, microbatches)
    return done.gradients, done.moments


def traced(model, x, y, sample_weight=None, microbatches=None, static=False, jit=None):
    """Gradients and moments of one step in a graph."""

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

    arguments = keras.tree.map_structure(
        lambda v: None if v is None else tensor(v), (x, y, sample_weight)
    )
    if not static:
        specs = keras.tree.map_structure(
            lambda v: (
                None if v is None else tf.TensorSpec([None, *v.shape[1:]], v.dtype)
            ),
            arguments,
        )
        return step.get_concrete_function(*specs)(*arguments)
    return step(*arguments)


def check(model, x, y, sample_weight=None, microbatches=None, step=eager, **kwargs):
    """Compares a step with brute force."""
    gradients, moments = step(model, x, y, sample_weight, microbatches, **kwargs)
    expected = brute_force(model, x, y, sample_weight, microbatches)
    assert len(moments) == len(model.trainable_variables) > 0
    for v, m, e in zip(model.trainable_variables, moments, expected, strict=True):
        np.testing.assert_allclose(m, e, rtol=1e-9, atol=1e-18, err_msg=v.path)
        assert e.shape == tuple(v.shape) and (e > 0).any()
    return gradients, moments


LAYERS = {
    "dense": ((5,), lambda: layers.Dense(4, activation="tanh")),
    "dense_no_bias": ((5,), lambda: layers.Dense(4, use_bias=False)),
    "dense_rank_3": ((6, 5), lambda: layers.Dense(4, activation="relu")),
    "dense_layer_as_activation": (
        (5,),
        lambda: layers.Dense(4, activation=layers.LeakyReLU()),
    ),
    "einsum_dense": (
        (6, 5),
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"),
    ),
    "einsum_dense_dots": (
        (6, 2, 5),
        lambda: layers.EinsumDense("...x,xy->...y", 4, bias_axes="y"),
    ),
    "conv1d": ((9, 3), lambda: layers.Conv1D(4, 3, activation="tanh")),
    "conv1d_same_strides": (
        (10, 3),
        lambda: layers.Conv1D(4, 4, strides=3, padding="same"),
    ),
    "conv1d_causal": (
        (9, 3),
        lambda: layers.Conv1D(4, 3, padding="causal", dilation_rate=2),
    ),
    "conv2d": ((7, 8, 3), lambda: layers.Conv2D(4, (3, 2), activation="relu")),
    "conv2d_strides": ((9, 8, 3), lambda: layers.Conv2D(4, 3, strides=(2, 3))),
    "conv2d_same": ((7, 8, 3), lambda: layers.Conv2D(4, (4, 3), padding="same")),
    "conv2d_same_strides": (
        (9, 8, 3),
        lambda: layers.Conv2D(4, 3, strides=2, padding="same"),
    ),
    "conv2d_stride_over_kernel": (
        (9, 9, 2),
        lambda: layers.Conv2D(4, 1, strides=2, padding="same"),
    ),
    "conv2d_dilation": (
        (9, 8, 3),
        lambda: layers.Conv2D(4, 3, dilation_rate=(2, 1), padding="same"),
    ),
    "conv2d_groups": ((6, 7, 4), lambda: layers.Conv2D(6, 3, groups=2)),
    "conv2d_many_channels": ((5, 4, 20), lambda: layers.Conv2D(6, 3, padding="same")),
    "conv3d": (
        (5, 6, 4, 2),
        lambda: layers.Conv3D(3, (2, 3, 2), strides=(1, 2, 1), padding="same"),
    ),
    "conv3d_valid": ((4, 5, 4, 2), lambda: layers.Conv3D(3, 2, use_bias=False)),
    "depthwise1d": ((9, 3), lambda: layers.DepthwiseConv1D(3, depth_multiplier=2)),
    "depthwise2d": (
        (7, 8, 3),
        lambda: layers.DepthwiseConv2D(
            3, depth_multiplier=2, padding="same", activation="tanh"
        ),
    ),
    "depthwise2d_strides": ((7, 7, 3), lambda: layers.DepthwiseConv2D(3, strides=2)),
    "layer_normalization": ((6, 5), lambda: layers.LayerNormalization()),
    "layer_normalization_axes": (
        (6, 5, 2),
        lambda: layers.LayerNormalization(axis=(1, 3)),
    ),
    "layer_normalization_no_scale": (
        (6, 5),
        lambda: layers.LayerNormalization(scale=False),
    ),
    "rms_normalization": ((6, 5), lambda: layers.RMSNormalization()),
    # Without a rule.
    "prelu": ((6, 5), lambda: layers.PReLU(shared_axes=[1])),
    "prelu_as_activation": ((5,), lambda: layers.Dense(4, activation=layers.PReLU())),
    "separable": ((7, 8, 3), lambda: layers.SeparableConv2D(4, 3)),
    "transpose": ((5, 4, 3), lambda: layers.Conv2DTranspose(4, 3, strides=2)),
    "group_normalization": ((4, 4, 4), lambda: layers.GroupNormalization(2)),
    "lstm": ((6, 3), lambda: layers.LSTM(4)),
    "gru_sequences": ((6, 3), lambda: layers.GRU(4, return_sequences=True)),
    "rnn_unrolled": ((3, 3), lambda: layers.SimpleRNN(4, unroll=True)),
    "bidirectional": ((4, 3), lambda: layers.Bidirectional(layers.LSTM(2))),
    "time_distributed": ((3, 5), lambda: layers.TimeDistributed(layers.Dense(4))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    check_layer(name)


@pytest.mark.parametrize(
    "name",
    ["dense", "dense_rank_3", "einsum_dense", "conv2d_same", "conv1d_causal"]
    + ["depthwise2d", "layer_normalization", "lstm"],
)
def test_microbatches(name):
    # 7 examples in samples of 3, 3 and 1.
    check_layer(name, microbatches=3)


@pytest.mark.parametrize("name", ["dense_rank_3", "conv2d_strides", "conv3d", "prelu"])
def test_layers_in_a_graph(name):
    """With a batch of unknown size."""
    check_layer(name, step=traced)


def check_layer(name, **kwargs):
    shape, make = LAYERS[name]
    # Something follows: δ differs from position to position.
    model = sequential(shape, make(), layers.Activation("softplus"))
    x = random(7, *shape)
    y = random(*model(x).shape)
    check(compiled(model), x, y, **kwargs)


@pytest.mark.parametrize("kind", [layers.Conv2D, layers.DepthwiseConv2D])
def test_channels_first(kind):
    """By the rule alone: few processors run such a convolution."""
    arguments = (4, 3) if kind is layers.Conv2D else (3,)
    x, delta = random(7, 6, 5, 3), random(7, 4, 3, 4 if kind is layers.Conv2D else 3)
    gradients = {}
    for order in ("channels_last", "channels_first"):
        layer = kind(*arguments, data_format=order)
        pair = [x, delta]
        if order == "channels_first":
            pair = [np.moveaxis(value, -1, 1) for value in pair]
        layer.build(pair[0].shape)
        call = Call(layer, (tf.constant(pair[0]),), {})
        call.variables = {id(v): v for v in layer.trainable_variables}
        terms = moment_rules.terms_of(call, [tf.constant(pair[1])], 7)
        gradients[order] = [
            t.gradients(*([v[:, None] for v in vs] for vs in (t.inputs, t.deltas)))
            for t in terms
        ]
    for last, first in zip(*gradients.values(), strict=True):
        np.testing.assert_allclose(last[0], first[0], rtol=1e-12)


# Weights with another form, or used more than once.


@pytest.mark.parametrize("microbatches", [None, 3])
def test_embedding_sums_a_tokens_uses_before_it_squares(microbatches):
    model = sequential((6,), layers.Embedding(5, 3), layers.Dense(2))
    tokens = np.random.default_rng(0).integers(0, 4, (7, 6))
    tokens[0] = 2
    y = random(7, 12)
    _, moments = check(compiled(model), tokens, y, None, microbatches)
    # The token that nobody uses.
    assert not np.array(moments[0])[4].any() and np.array(moments[0])[2].all()


def test_weights_used_twice():
    shared, table = layers.Dense(4, activation="tanh"), layers.Embedding(5, 4)
    one, two = keras.Input((4,)), keras.Input((3,), dtype="int32")
    hidden = layers.Add()([shared(shared(one)), layers.Flatten()(table(two))[:, :4]])
    again = layers.GlobalAveragePooling1D()(table(two))
    model = compiled(keras.Model([one, two], shared(hidden) + again))
    tokens = np.random.default_rng(0).integers(0, 5, (7, 3))
    check(model, [random(7, 4), tokens], random(7, 4))


class Tied(keras.Model):
    """The embedding's table is the output's kernel too, which no sublayer reads."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(5, 4)
        self.hidden = layers.Dense(4, activation="tanh")

    def call(self, x):
        x = self.hidden(self.table(x))
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


def test_weights_that_a_model_reads_itself():
    model = Tied()
    tokens = np.random.default_rng(0).integers(0, 5, (7, 3))
    model(tokens)
    with pytest.warns(UserWarning, match=r"\(Tied\) has no rule.*which is slow"):
        check(compiled(model), tokens, random(7, 3, 5))


class Positions(layers.Layer):
    """Adds vectors to positions: their layer never sees an example."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(6, 4)

    def call(self, x):
        return x + self.table(keras.ops.arange(6))


def test_layers_that_see_no_example_are_those_of_the_layer_around_them():
    model = sequential((6, 4), Positions(), layers.Activation("tanh"))
    with pytest.warns(UserWarning, match=r"\(Positions\) has no rule"):
        check(compiled(model), random(7, 6, 4), random(7, 24))


class InLoop(layers.Layer):
    """Calls a layer inside of a loop."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(4, activation="tanh")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return tf.while_loop(
            lambda i, x: i < 2, lambda i, x: (i + 1, self.inner(x)), (0, x)
        )[1]


def test_layers_called_inside_a_loop():
    model = sequential((4,), InLoop())
    check(compiled(model), random(7, 4), random(7, 4), step=traced)


class Two(layers.Layer):
    """One output leads to the other."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        x = keras.ops.tanh(self.w * x)
        return x, keras.ops.square(x)


def test_outputs_that_depend_on_each_other():
    x = keras.Input((4,))
    a, b = Two()(x)
    check(compiled(keras.Model(x, a + 2 * b)), random(7, 4), random(7, 4))


# Models.


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


def functional_data():
    y = {"a": random(7, 2), "b": np.arange(7) % 3}
    return {"image": random(7, 6, 6, 3), "flat": random(7, 5)}, y


FUNCTIONAL = {
    "loss": {
        "a": "mse",
        "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
    "loss_weights": {"a": 0.7, "b": 2.0},
}


def test_nested_models_several_losses_and_sample_weights():
    model = compiled(functional(), **FUNCTIONAL)
    x, y = functional_data()
    check(model, x, y)
    weights = {"a": 1 + np.arange(7.0), "b": np.arange(7) % 2 + 0.5}
    check(model, x, y, weights)


class Subclassed(keras.Model):
    """Layers in a list, called with other arguments."""

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


class AtRest(layers.Layer):
    """Calls a layer as if not in training."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x, training=False)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("training", [True, False])
def test_batch_normalization_with_its_statistics_held(axis, training):
    """g_z of gamma is the sum over positions of δ_z x̂_z, of beta that of δ_z."""
    norm = layers.BatchNormalization(axis=axis)
    part = norm if training else AtRest(norm)
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


def test_renorm_is_refused():
    model = sequential((3,), layers.BatchNormalization(renorm=True))
    with pytest.raises(ValueError, match="with renorm=False"):
        eager(compiled(model), random(7, 3), random(7, 3))


# Losses that belong to no example.


@pytest.mark.parametrize("microbatches", [None, 7])
def test_a_regularizer_is_shared_by_all_examples(microbatches):
    model = sequential(
        (5,),
        layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.3)),
        layers.Dense(3, bias_regularizer="l1"),
    )
    check(compiled(model), random(7, 5), random(7, 3), microbatches=microbatches)


def test_activity_regularizers_are_the_examples_own():
    dense = layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.3))
    model = sequential((5,), dense, layers.ActivityRegularization(l2=0.01))
    x, y = random(7, 5), random(7, 4)
    _, moments = eager(compiled(model), x, y)
    out = x @ np.array(dense.kernel) + np.array(dense.bias)
    delta = 2 * (out - y) / y.size + 2 * (0.3 + 0.01) * out / 7
    np.testing.assert_allclose(moments[0], (x**2).T @ delta**2, rtol=1e-6)


class OwnLoss(layers.Layer):
    """Reads a weight and adds a loss."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        self.add_loss(keras.ops.sum(keras.ops.square(self.w)))
        return x * self.w


def test_a_loss_added_next_to_weights_is_refused():
    model = sequential((5,), OwnLoss())
    with pytest.raises(ValueError, match="in a layer of its own"):
        eager(compiled(model), random(7, 5), random(7, 5))


# What cannot be told apart.


def test_one_microbatch_is_refused():
    model = compiled(sequential((5,), layers.Dense(3)))
    with pytest.raises(ValueError, match="one group has no variance"):
        eager(model, random(7, 5), random(7, 3), microbatches=1)


def test_random_numbers_without_a_rule_are_refused():
    model = sequential((5, 3), layers.LSTM(4, dropout=0.5))
    with pytest.raises(ValueError, match="draws random numbers or keeps state"):
        eager(compiled(model), random(7, 5, 3), random(7, 4))


def test_an_axis_that_hides_the_examples_is_refused():
    x = keras.Input((6, 4))
    y = layers.Dense(3)(keras.ops.reshape(x, (-1, 4)))
    model = compiled(keras.Model(x, keras.ops.reshape(y, (-1, 18))))
    with pytest.raises(tf.errors.InvalidArgumentError, match="be that of the batch"):
        traced(model, random(7, 6, 4), random(7, 18))


# Ways to run.


def network():
    """A little of everything, without batch normalisation."""
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


@pytest.mark.parametrize("size", [1, 300])
def test_chunks_of_bounded_memory_change_nothing(size, monkeypatch):
    model = compiled(network())
    monkeypatch.setattr(second_moments, "_CHUNK", size)
    check(model, random(7, 8, 8, 2), random(7, 3), step=traced)


def test_static_batch():
    x, y = random(7, 8, 8, 2), random(7, 3)
    check(compiled(network()), x, y, step=traced, static=True)


@pytest.mark.parametrize("microbatches", [None, 3])
def test_xla(microbatches):
    model = compiled(plain_network(), jit_compile=True)
    x, y = random(7, 8, 8, 2), random(7, 3)
    check(model, x, y, None, microbatches, traced, static=True, jit=True)


def test_xla_embedding():
    model = compiled(sequential((6,), layers.Embedding(5, 3)), jit_compile=True)
    tokens = np.random.default_rng(0).integers(0, 4, (7, 6))
    check(model, tokens, random(7, 18), step=traced, static=True, jit=True)


@pytest.mark.parametrize("mode", ["full", "activations"])
def test_recomputed_layers(mode):
    with keras.RematScope(mode=mode):
        part = layers.Conv1D(4, 3, activation="tanh")
    model = sequential((5, 3), part, layers.Activation("tanh"))
    check(compiled(model), random(7, 5, 3), random(7, 12), step=traced)


def plain_network():
    """Of layers with a rule."""
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
    """Weights and history after two epochs of batches of 4, 4 and 2."""
    model.compile(optimizer, "mse", metrics=["mae"], **kwargs)
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    return model.get_weights(), history.history


def with_dropout():
    """Float32, dropout and batch normalisation."""
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
def test_training_is_that_without_moments_bit_for_bit(manner, microbatches):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    x, y = random(10, 8, 8, 2).astype("float32"), random(10, 3).astype("float32")
    keep = Keep(microbatches=microbatches)
    weights, history = fitted(keep, with_dropout(), x, y, **manner)
    plain = keras.optimizers.SGD(0.1)
    expected, expected_history = fitted(plain, with_dropout(), x, y, **manner)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert history == expected_history
    assert all((np.array(m) > 0).any() for m in keep.moments)


def test_fit_hands_over_the_moments_of_its_last_batch():
    model = plain_network()
    model.compile(Keep(), "mse")
    x, y = random(10, 8, 8, 2), random(10, 3)
    model.fit(x[:8], y[:8], batch_size=4, epochs=2, verbose=0, shuffle=False)
    expected = brute_force(model, x[8:], y[8:])
    model.fit(x[8:], y[8:], batch_size=4, verbose=0)
    for got, want in zip(model.optimizer.moments, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-18)


def test_mixed_precision_hands_over_unscaled_moments():
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
    # An overflow skips the step, moments included.
    kept = [np.array(m) for m in moments]
    model.fit(np.full_like(x, 6e4), np.full_like(y, 1e30), batch_size=8, verbose=0)
    for got, want in zip(moments, kept, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_static_loss_scale_is_in_the_moments_as_in_the_gradients():
    model = sequential((5,), layers.Dense(4, activation="tanh"))
    model = compiled(model)
    x, y = random(7, 5), random(7, 4)
    _, plain = eager(model, x, y)
    model.compile(Keep(loss_scale_factor=8.0), "mse")
    _, scaled = eager(model, x, y)
    for one, other in zip(plain, scaled, strict=True):
        np.testing.assert_array_equal(64 * one, other)


def test_a_train_step_of_ones_own_is_left_alone():
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
    assert seen and all(one is given for one in seen)


def test_other_optimizers_see_nothing():
    model = sequential((5,), layers.Dense(3))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(random(7, 5), random(7, 3), verbose=0)


# Several workers.

WORKER = Path(__file__).with_name("moments_worker.py")


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    """What two processes answer."""
    folder = tmp_path_factory.mktemp("two")
    return run_workers(WORKER, 2, folder, timeout=580)[0]


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """What two devices of one process answer."""
    folder = tmp_path_factory.mktemp("mirrored")
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / "answer-0.json").read_text())]


@pytest.mark.parametrize("strategy", ["mirrored", "two_workers"])
def test_workers_train_as_without_moments_bit_for_bit(strategy, request):
    for answer in request.getfixturevalue(strategy):
        assert answer["plain"] == answer["with_moments"]


@pytest.mark.parametrize("manner", ["several_steps", "mixed"])
@pytest.mark.parametrize("strategy", ["mirrored", "two_workers"])
def test_each_worker_has_the_moments_of_its_own_examples(strategy, manner, request):
    answers = [answer[manner] for answer in request.getfixturevalue(strategy)]
    got = [moments for answer in answers for moments in answer["moments"]]
    model = sequential(
        (8, 8, 2),
        layers.Conv2D(4, 3, activation="relu"),
        layers.PReLU(shared_axes=[1, 2]),
        layers.Flatten(),
        layers.Dense(3, kernel_regularizer="l2"),
    )
    model.compile(Keep(), "mse")
    model.set_weights([np.array(w) for w in answers[0]["weights"]])
    rng = np.random.default_rng(7)
    x, y = (rng.normal(size=s).astype("float32") for s in ((16, 8, 8, 2), (16, 3)))
    rtol = 0.05 if manner == "mixed" else 1e-4
    for rank, moments in enumerate(got):
        mine = slice(8 + 4 * rank, 12 + 4 * rank)
        # Keras divides by the number of replicas.
        expected = [e / 4 for e in brute_force(model, x[mine], y[mine])]
        for one, other in zip(moments, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol, 1e-3 * np.max(other))
    assert len(got) == 2
