"""Second moments of every type of layer, compared with brute force."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.per_example.brute_force import check, compiled, random, sequential, traced
from tfgradcomp.per_example import moment_rules
from tfgradcomp.per_example.layer_calls import LayerCall

layers = keras.layers


def case(shape, kind, *args, **kwargs):
    """The shape of an example, and a function that makes the layer."""
    return shape, lambda: getattr(layers, kind)(*args, **kwargs)


DEPTHWISE = {"depth_multiplier": 2, "padding": "same", "activation": "tanh"}
LAYERS = {
    "dense": case((5,), "Dense", 4, activation="tanh"),
    "dense_no_bias": case((5,), "Dense", 4, use_bias=False),
    "dense_rank_3": case((6, 5), "Dense", 4, activation="relu"),
    "dense_layer_as_activation": (
        (5,),
        lambda: layers.Dense(4, activation=layers.LeakyReLU()),
    ),
    "einsum_dense": case(
        (6, 5), "EinsumDense", "abc,cde->abde", (None, 2, 3), bias_axes="de"
    ),
    "einsum_dense_dots": case(
        (6, 2, 5), "EinsumDense", "...x,xy->...y", 4, bias_axes="y"
    ),
    "conv1d": case((9, 3), "Conv1D", 4, 3, activation="tanh"),
    "conv1d_same_strides": case((10, 3), "Conv1D", 4, 4, strides=3, padding="same"),
    "conv1d_causal": case((9, 3), "Conv1D", 4, 3, padding="causal", dilation_rate=2),
    "conv1d_causal_strides": case((6, 2), "Conv1D", 3, 3, padding="causal", strides=2),
    "conv2d": case((7, 8, 3), "Conv2D", 4, (3, 2), activation="relu"),
    "conv2d_strides": case((9, 8, 3), "Conv2D", 4, 3, strides=(2, 3)),
    "conv2d_same": case((7, 8, 3), "Conv2D", 4, (4, 3), padding="same"),
    "conv2d_same_strides": case((9, 8, 3), "Conv2D", 4, 3, strides=2, padding="same"),
    "conv2d_stride_over_kernel": case(
        (9, 9, 2), "Conv2D", 4, 1, strides=2, padding="same"
    ),
    "conv2d_dilation": case(
        (9, 8, 3), "Conv2D", 4, 3, dilation_rate=(2, 1), padding="same"
    ),
    "conv2d_groups": case((6, 7, 4), "Conv2D", 6, 3, groups=2),
    "conv2d_many_channels": case((5, 4, 20), "Conv2D", 6, 3, padding="same"),
    "conv3d": case(
        (5, 6, 4, 2), "Conv3D", 3, (2, 3, 2), strides=(1, 2, 1), padding="same"
    ),
    "conv3d_valid": case((4, 5, 4, 2), "Conv3D", 3, 2, use_bias=False),
    "depthwise1d": case((9, 3), "DepthwiseConv1D", 3, depth_multiplier=2),
    "depthwise2d": case((7, 8, 3), "DepthwiseConv2D", 3, **DEPTHWISE),
    "depthwise2d_strides": case((7, 7, 3), "DepthwiseConv2D", 3, strides=2),
    "layer_normalization": case((6, 5), "LayerNormalization"),
    "layer_normalization_axes": case((6, 5, 2), "LayerNormalization", axis=(1, 3)),
    "layer_normalization_no_scale": case((6, 5), "LayerNormalization", scale=False),
    "rms_normalization": case((6, 5), "RMSNormalization"),
    # Without a rule.
    "prelu": case((6, 5), "PReLU", shared_axes=[1]),
    "prelu_as_activation": ((5,), lambda: layers.Dense(4, activation=layers.PReLU())),
    "separable": case((7, 8, 3), "SeparableConv2D", 4, 3),
    "transpose": case((5, 4, 3), "Conv2DTranspose", 4, 3, strides=2),
    "group_normalization": case((4, 4, 4), "GroupNormalization", 2),
    "lstm": case((6, 3), "LSTM", 4),
    "gru_sequences": case((6, 3), "GRU", 4, return_sequences=True),
    "rnn_unrolled": case((3, 3), "SimpleRNN", 4, unroll=True),
    "bidirectional": ((4, 3), lambda: layers.Bidirectional(layers.LSTM(2))),
    "time_distributed": ((3, 5), lambda: layers.TimeDistributed(layers.Dense(4))),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    check_layer(name)


IN_MICROBATCHES = ["dense", "dense_rank_3", "einsum_dense", "conv2d_same"]
IN_MICROBATCHES += ["conv1d_causal", "depthwise2d", "layer_normalization", "lstm"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", IN_MICROBATCHES)
def test_microbatches(name):
    # 7 examples in samples of 3, 3 and 1.
    check_layer(name, microbatches=3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["dense_rank_3", "conv2d_strides", "conv3d", "prelu"])
def test_layers_in_a_graph(name):
    """With a batch of unknown size."""
    check_layer(name, step=traced)


def check_layer(name, **kwargs):
    shape, make = LAYERS[name]
    # With a layer behind it, δ differs from position to position.
    model = sequential(shape, make(), layers.Activation("softplus"))
    x = random(7, *shape)
    y = random(*model(x).shape)
    check(compiled(model), x, y, **kwargs)


@pytest.mark.parametrize("kind", [layers.Conv2D, layers.DepthwiseConv2D])
def test_channels_first(kind):
    """The rule alone, because few processors run such a convolution."""
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


@pytest.mark.parametrize("microbatches, dtype", [(None, "int64"), (3, "uint8")])
def test_embedding_sums_the_uses_of_a_token_before_squaring(microbatches, dtype):
    inputs = keras.Input((6,), dtype=dtype)
    embedded = layers.Embedding(5, 3)(inputs)
    model = keras.Model(inputs, layers.Flatten()(layers.Dense(2)(embedded)))
    tokens = np.random.default_rng(0).integers(0, 4, (7, 6)).astype(dtype)
    tokens[0] = 2
    y = random(7, 12)
    _, moments = check(compiled(model), tokens, y, None, microbatches)
    # Token 4 is not used.
    assert not np.array(moments[0])[4].any() and np.array(moments[0])[2].all()


def test_weights_used_twice():
    shared, table = layers.Dense(4, activation="tanh"), layers.Embedding(5, 4)
    x, words = keras.Input((4,)), keras.Input((3,), dtype="int32")
    hidden = layers.Add()([shared(shared(x)), layers.Flatten()(table(words))[:, :4]])
    again = layers.GlobalAveragePooling1D()(table(words))
    model = compiled(keras.Model([x, words], shared(hidden) + again))
    tokens = np.random.default_rng(0).integers(0, 5, (7, 3))
    check(model, [random(7, 4), tokens], random(7, 4))


class Tied(keras.Model):
    """Uses the embedding's table as the output's kernel, outside of any sublayer."""

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
    """Adds vectors to positions; the embedding's input has no axis of examples."""

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


@pytest.mark.slow
def test_layers_called_inside_a_loop():
    model = sequential((4,), InLoop())
    check(compiled(model), random(7, 4), random(7, 4), step=traced)


class Two(layers.Layer):
    """Has two outputs, the second computed from the first."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        x = keras.ops.tanh(self.w * x)
        return x, keras.ops.square(x)


def test_outputs_that_depend_on_each_other():
    x = keras.Input((4,))
    a, b = Two()(x)
    check(compiled(keras.Model(x, a + 2 * b)), random(7, 4), random(7, 4))
