"""Second moments of every type of layer, compared with brute force."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.per_example.brute_force import check, compiled, random, sequential, traced
from tfgradcomp.per_example import moment_rules
from tfgradcomp.per_example.layer_calls import LayerCall

layers = keras.layers

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
        call = LayerCall(layer, (tf.constant(pair[0]),), {})
        call.variables = {id(v): v for v in layer.trainable_variables}
        terms = moment_rules.terms_of(call, [tf.constant(pair[1])], 7)
        gradients[order] = [
            t.gradients(*([v[:, None] for v in vs] for vs in (t.inputs, t.deltas)))
            for t in terms
        ]
    for last, first in zip(*gradients.values(), strict=True):
        np.testing.assert_allclose(last[0], first[0], rtol=1e-12)


# Weights of another form, or used more than once.


@pytest.mark.parametrize("microbatches", [None, 3])
def test_embedding_sums_the_uses_of_a_token_before_squaring(microbatches):
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


def test_weights_read_by_the_model_itself():
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


def test_layers_without_an_axis_of_examples_belong_to_the_outer_layer():
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
