"""Methods as functions, and the wrappers that follow from their signatures."""

import inspect

import keras
import numpy as np
import pytest

import tfgradcomp
from tests.helpers import bits, make_variables
from tfgradcomp import methods
from tfgradcomp.compressors import TopK
from tfgradcomp.methods import Method
from tfgradcomp.optimizers.method_wrapper import MethodWrapper
from tfgradcomp.servers import Mean

FUNCTIONS = [getattr(methods, name) for name in methods.__all__ if name.islower()]
WRAPPERS = [
    kind
    for name in tfgradcomp.optimizers.__all__
    if issubclass(kind := getattr(tfgradcomp, name), MethodWrapper)
]
REQUIRED = {"strom": {"threshold": 0.5}, "hybrid": {"threshold": 0.5}}


def sgd():
    return keras.optimizers.SGD(0.1)


def test_every_function_has_one_wrapper():
    assert sorted(kind.make_method.__name__ for kind in WRAPPERS) == sorted(
        function.__name__ for function in FUNCTIONS
    )


@pytest.mark.parametrize("kind", WRAPPERS, ids=lambda kind: kind.__name__)
def test_a_wrapper_takes_the_arguments_of_its_function(kind):
    function = kind.make_method
    own = inspect.signature(function).parameters
    assert {*own} <= {*kind.argument_names}
    given = REQUIRED.get(function.__name__, {})
    optimizer, method = kind(sgd(), **given), function(**given)
    assert optimizer.method == method
    assert method.name == kind.__name__
    assert optimizer.min_size == method.min_size
    for name in own:
        assert name in kind.__doc__, name
        assert getattr(optimizer, name) == given.get(name, own[name].default), name


@pytest.mark.parametrize("name", ["terngrad", "dist_ef_block_sgdm", "strom"])
def test_a_method_needs_no_wrapper(name):
    method = getattr(methods, name)(**REQUIRED.get(name, {}))
    (kind,) = [kind for kind in WRAPPERS if kind.make_method.__name__ == name]
    gradients = np.random.default_rng(0).normal(size=(2, 64, 32)).astype("float32")
    weights = []
    for make in (
        lambda: tfgradcomp.CompressedOptimizer(sgd(), method),
        lambda: kind(sgd(), **REQUIRED.get(name, {})),
        # A policy takes it as well; `min_size` is then that of the whole optimizer.
        lambda: tfgradcomp.HalfPrecision(sgd(), policy=[("*", method)], min_size=0),
    ):
        variables = make_variables([(64, 32)])
        optimizer = make()
        for gradient in gradients:
            optimizer.apply([gradient], variables)
        weights.append(bits(variables[0].numpy()))
    assert weights[0] == weights[1] == weights[2]


def test_a_method_is_saved_with_its_optimizer():
    method = methods.orq(levels=5, reply="requantize", error_feedback=True)
    optimizer = tfgradcomp.CompressedOptimizer(
        sgd(), method, policy=[("*/bias", methods.half_precision())]
    )
    saved = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(saved)
    assert again.method == method
    assert again.method.name == "ORQ"
    assert again.policy == [["*/bias", methods.half_precision()]]


def test_what_a_subclass_adds_is_saved():
    class Mine(tfgradcomp.QSGD):
        def __init__(self, inner_optimizer, note="", **kwargs):
            super().__init__(inner_optimizer, **kwargs)
            self.keep_arguments(note=note)

    config = Mine(sgd(), note="x", levels=5, seed=3).get_config()
    again = Mine.from_config(config)
    assert (again.note, again.levels, again.seed) == ("x", 5, 3)
    assert again.get_config() == config


def test_equal_mathematics_are_equal_methods():
    method = methods.dist_ef_block_sgd()
    other = Method(method.compressor, method.server)
    assert other == method
    assert other.name == "ErrorFeedback, Recompress"
    assert methods.dist_ef_block_sgd(block_size=8) != method


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"noise_std": -1.0}, "noise_std must be 0 or positive"),
        ({"block_size": 0}, "block_size must be an integer, at least 1"),
        ({"block_size": "layer"}, "block_size must be an integer"),
        ({"server": None}, "server must be a Server"),
    ],
)
def test_a_method_checks_its_arguments(arguments, sentence):
    method = methods.terngrad()
    halves = {"compressor": method.compressor, "server": method.server}
    with pytest.raises(ValueError, match=sentence):
        Method(**{**halves, **arguments})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: tfgradcomp.ChunkedTopK(sgd(), block_size=32), "block_size is part of"),
        (
            lambda: tfgradcomp.CompressedOptimizer(
                sgd(), methods.signsgd(), server=Mean(TopK(0.1))
            ),
            "Received: method=SignSGD, server=Mean",
        ),
        (
            lambda: tfgradcomp.TernGrad(sgd(), weight_decay=0.1),
            "Received: method=TernGrad, weight_decay=0.1",
        ),
        (
            lambda: tfgradcomp.Signum(sgd(), compressor=TopK(0.1)),
            "Received: method=Signum, compressor=TopK",
        ),
        (
            lambda: tfgradcomp.CompressedOptimizer(
                sgd(), TopK(0.1), Mean(TopK(0.1)), compressor=TopK(0.2)
            ),
            "as `method` or as `compressor`. Received: method=TopK",
        ),
    ],
)
def test_a_method_takes_no_other_parts(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_a_renamed_argument_is_named():
    with pytest.raises(ValueError, match="`bucket_size` is called `block_size`"):
        tfgradcomp.TernGrad(sgd(), bucket_size=8)


@pytest.mark.parametrize(
    ("name", "value"), [("nonfinite", "skip"), ("levels", 5), ("exclude", "last")]
)
@pytest.mark.parametrize("is_built", [False, True])
def test_an_argument_cannot_be_set_later(name, value, is_built):
    optimizer = tfgradcomp.ORQ(sgd())
    if is_built:
        optimizer.build(make_variables([(3, 2)]))
    before = optimizer.get_config()
    message = rf"`{name}` of ORQ is fixed.*ORQ\(\.\.\., {name}={value!r}\)"
    with pytest.raises(AttributeError, match=message):
        setattr(optimizer, name, value)
    assert optimizer.get_config() == before


def test_a_missing_attribute_is_the_wrappers():
    with pytest.raises(AttributeError, match="'TernGrad' object has no .*'stepper'"):
        _ = tfgradcomp.TernGrad(sgd()).stepper
