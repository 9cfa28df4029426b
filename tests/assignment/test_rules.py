"""Which variables are compressed, and what that moves."""

import contextlib

import keras
import numpy as np
import pytest

import tfgradcomp
from tests.engine.test_step import SHAPES, sgd
from tests.helpers import make_variables, stable_id
from tests.methods import ROWS
from tfgradcomp.assignment.rules import excluded
from tfgradcomp.transports import Loopback
from tfgradcomp.transports.all_gather import AllGather


def big_model():
    inputs = keras.Input((64,))
    x = keras.layers.Dense(500, name="first")(inputs)
    x = keras.layers.LayerNormalization(name="norm")(x)
    x = keras.layers.Dense(140, name="second")(x)
    return keras.Model(inputs, keras.layers.Dense(10, name="head")(x))


def elements(optimizer, model):
    optimizer.build(model.trainable_variables)
    return optimizer.traffic.elements_compressed


SIZES = {
    "first/kernel": 64 * 500,
    "first/bias": 500,
    "norm/gamma": 500,
    "norm/beta": 500,
    "second/kernel": 500 * 140,
    "second/bias": 140,
    "head/kernel": 1400,
    "head/bias": 10,
}
KERNELS = 64 * 500 + 500 * 140 + 1400


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        ({}, ["bias", "norm/gamma", "norm/beta"]),
        ({"min_size": 0}, []),
        ({"min_size": 500}, ["second/bias", "head/bias"]),
        ({"min_size": 501}, ["bias", "norm"]),
        ({"min_size": 0, "exclude": "last"}, ["head"]),
        ({"min_size": 0, "exclude": "bias"}, ["bias"]),
        ({"min_size": 0, "exclude": "*/bias"}, ["bias"]),
        ({"min_size": 0, "exclude": "first*kernel"}, ["first/kernel"]),
        ({"min_size": 0, "exclude": "layer:Dense"}, ["first", "second", "head"]),
        ({"min_size": 0, "exclude": keras.layers.LayerNormalization}, ["norm"]),
        (
            {"min_size": 0, "exclude": lambda v: v.shape[0] == 140},
            ["second/bias"] + ["head/kernel"],
        ),
        (
            {"min_size": 0, "exclude": ["last", "*gamma", keras.layers.Embedding]},
            ["head", "norm/gamma"],
        ),
    ],
    ids=stable_id,
)
def test_what_is_not_compressed(arguments, out):
    model = big_model()
    expected = sum(
        size for name, size in SIZES.items() if not any(part in name for part in out)
    )
    optimizer = tfgradcomp.SignSGD(sgd(), **arguments)
    assert elements(optimizer, model) == expected
    assert optimizer.traffic.elements_plain == sum(SIZES.values()) - expected


def test_the_last_layer_without_a_model_is_that_of_the_last_path():
    variables = []
    for layer, size in (("a", 9), ("b", 8), ("b", 7)):
        with keras.name_scope(layer):
            variables.append(keras.Variable(np.ones(size), name=f"w{size}"))
    optimizer = tfgradcomp.SignSGD(sgd(), exclude="last", min_size=1)
    optimizer.build(variables)
    assert optimizer.traffic.elements_compressed == 9


@keras.saving.register_keras_serializable("tests")
class ScaleNorm(keras.layers.Layer):
    """A normalization of a user's own: its weight has no name that says so."""

    def build(self, shape):
        self.g = self.add_weight(shape=(shape[-1], 1), name="g")

    def call(self, x):
        return x * self.g[:, 0]


def norms_and_others():
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(50, 12, name="words")(inputs)
    x = keras.layers.MultiHeadAttention(2, 6, name="attention")(x, x)
    x = keras.layers.LayerNormalization(axis=[1, 2], name="first")(x)
    dense = keras.layers.Dense(12, name="inside")
    x = keras.layers.SpectralNormalization(dense, name="second")(x)
    x = keras.layers.GRU(9, name="gru")(x)
    x = keras.layers.BatchNormalization(name="third")(x)
    x = keras.layers.RMSNormalization(name="fourth")(x)
    x = ScaleNorm(name="fifth")(x)
    x = keras.layers.PReLU(name="activation")(x)
    return keras.Model(inputs, keras.layers.Dense(10, name="norms")(x))


def test_norms_and_biases_are_known_by_what_they_are():
    model = norms_and_others()
    found = excluded(model.trainable_variables, "norms_and_biases")
    left = [model.trainable_variables[index].path for index in found]
    # Some biases are matrices, and larger than a kernel may be.
    assert sorted(left) == sorted(
        [f"attention/{part}/bias" for part in ("query", "key", "value")]
        + ["attention/attention_output/bias", "second/inside/bias"]
        + ["gru/gru_cell/bias", "norms/bias", "first/gamma", "first/beta"]
        + ["third/gamma", "third/beta", "fourth/scale", "fifth/g"]
    )


def test_norms_and_biases_without_a_model_are_known_by_their_paths():
    paths = ["block/bn/gamma", "block/bn/beta", "block/my_norm/scale", "block/b/bias"]
    others = ["block/normalizer/kernel", "block/dense/kernel", "block/prelu/alpha"]
    shapes = {"block/normalizer/kernel": (2, 3)}
    variables = []
    for path in (*paths, *others):
        *layers, name = path.split("/")
        with contextlib.ExitStack() as stack:
            for layer in layers:
                stack.enter_context(keras.name_scope(layer))
            values = np.ones(shapes.get(path, (5,)))
            variables.append(keras.Variable(values, name=name))
    found = excluded(variables, "norms_and_biases")
    assert [variables[index].path for index in sorted(found)] == paths
    assert {*found.values()} == {"exclude='norms_and_biases'"}


def test_exclusion_by_layer_needs_a_model():
    optimizer = tfgradcomp.SignSGD(sgd(), exclude="layer:Dense")
    with pytest.raises(ValueError, match="needs a Keras model.*exclude='layer:Dense'"):
        optimizer.build(make_variables(SHAPES))


@pytest.mark.parametrize(
    ("name", "up"),
    [
        ("TernGrad", 1.65),
        ("SignSGD", 1.05),
        ("Signum", 1.05),
        ("DistEFSGD", 1.05),
        ("DistEFBlockSGD", 1.05),
        ("DistEFBlockSGDM", 1.05),
        ("HalfPrecision", 16.05),
        # 20 digits a word and three levels a block of 2048; one bit and two levels.
        ("ORQ, 3 levels", 1.65),
        ("BinGrad", 1.05),
    ],
)
def test_bits_per_element(name, up):
    optimizer = ROWS[name].make(sgd())
    with pytest.raises(ValueError, match="`traffic` depends on the model's variables"):
        _ = optimizer.traffic
    assert elements(optimizer, big_model()) == KERNELS > 100_000
    traffic = optimizer.traffic
    three = np.log2(3)
    floor = {"TernGrad": three, "ORQ, 3 levels": three, "HalfPrecision": 16}
    floor = floor.get(name, 1)
    assert floor <= traffic.bits_per_element_up <= up
    assert traffic.num_workers == 1
    assert traffic.words_sent == traffic.bytes_received == 0


def test_words_of_two_workers():
    def worker(rank, collectives):
        optimizer = tfgradcomp.TernGrad(sgd(), transport=AllGather(collectives))
        optimizer.build(make_variables([(100, 100), (10,)]))
        return optimizer.traffic

    for traffic in Loopback(2, timeout=60).run(worker):
        # 20 codes a word, one status; the scale's own round; and the ten
        # floats with three numbers of status a worker.
        expected = (500 + 1) + 1 + (10 + 6)
        assert traffic.words_sent == traffic.words_received == expected
        assert traffic.bytes_sent == 4 * expected
        assert traffic.elements_plain == 10
        # A reply has 2N + 1 = 5 levels, 13 to a word.
        np.testing.assert_allclose(
            traffic.bits_per_element_reply, 32 * (np.ceil(10_000 / 13) + 1) / 10_000
        )
