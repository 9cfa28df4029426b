"""Second moments against gradients of one example after the other, in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgradcomp.seam import second_moments

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


def check(model, x, y, sample_weight=None, microbatches=None, **kwargs):
    """Compares a step with brute force, and gradients with Keras' own."""
    gradients, moments = traced(model, x, y, sample_weight, microbatches, **kwargs)
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


def check_layer(name, **kwargs):
    shape, make = LAYERS[name]
    # Something follows: δ differs from position to position.
    model = sequential(shape, make(), layers.Activation("softplus"))
    x = random(7, *shape)
    y = random(*model(x).shape)
    check(compiled(model), x, y, **kwargs)
