"""Wrappers refuse inner optimizers that error feedback does not go with."""

import warnings

import keras
import pytest

import tfgradcomp
from tests.helpers import KERAS
from tfgradcomp.compressors import ErrorFeedback, ScaledSign, TopK
from tfgradcomp.servers import Mean

SGD = keras.optimizers.SGD


class Squares(keras.optimizers.RMSprop):
    """An optimizer of a user's own."""


def top_k(inner, **arguments):
    return tfgradcomp.CompressedOptimizer(
        inner, ErrorFeedback(TopK()), Mean(TopK()), **arguments
    )


def orq(inner, **arguments):
    return tfgradcomp.ORQ(inner, error_feedback=True, **arguments)


def policy(inner, **arguments):
    own = [("*", tfgradcomp.DistEFBlockSGD.for_layers())]
    return tfgradcomp.TernGrad(inner, policy=own, **arguments)


def several():
    others = {".*bias": SGD(0.1, momentum=0.5)}
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(SGD(0.1), others)
    )


FORMS = [
    (lambda: SGD(0.1, momentum=0.9), r"DistEFBlockSGDM\(.*SGD\(.*, momentum=0.9\),"),
    (keras.optimizers.Adam, "OneBitAdam"),
    (keras.optimizers.AdamW, "OneBitAdam"),
    (lambda: keras.optimizers.Adam(beta_1=0.0), "OneBitAdam"),
    (keras.optimizers.Lamb, "OneBitLAMB"),
    (lambda: keras.optimizers.RMSprop(momentum=0.5), "QSGD"),
    *((kind, "QSGD") for kind in (keras.optimizers.Adagrad, Squares)),
]
NAMES = ["nadam", "adamax", "rmsprop", "adadelta", "adafactor", "ftrl", "lion"]


@pytest.mark.parametrize(
    "make",
    [
        tfgradcomp.DistEFSGD,
        tfgradcomp.DistEFBlockSGD,
        tfgradcomp.OneBitSGD,
        tfgradcomp.RandomK,
        orq,
        top_k,
        policy,
    ],
)
def test_feedback_in_front_of_momentum_raises_unless_allowed(make):
    for inner, form in FORMS:
        message = f"train badly. Use .*{form}.*allow_inner_momentum=True.*Received:"
        with pytest.raises(ValueError, match=message):
            make(inner())
    make(SGD(0.1, momentum=0.9), allow_inner_momentum=True)
    make("adam", allow_inner_momentum=True)
    make(SGD(0.1))


@pytest.mark.parametrize("name", NAMES)
def test_every_average_is_found(name):
    with pytest.raises(ValueError, match="train badly.*such as QSGD"):
        tfgradcomp.DistEFSGD(name)


@pytest.mark.skipif(KERAS < (3, 15), reason="It has no MultiOptimizer.")
def test_every_member_of_a_multi_optimizer_is_checked():
    with pytest.raises(ValueError, match=r"train badly.*SGD\(momentum=0.5\)"):
        tfgradcomp.DistEFSGD(several())
    tfgradcomp.DistEFSGD(several(), allow_inner_momentum=True)


def test_feedback_of_the_common_error_goes_with_momentum_and_warns_of_adam():
    with pytest.warns(UserWarning, match="train badly.*inner_optimizer=Adam"):
        tfgradcomp.PowerSGD("adam")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tfgradcomp.PowerSGD(SGD(0.1, momentum=0.9))


def test_methods_without_error_feedback_go_with_every_optimizer():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inner, _ in FORMS:
            tfgradcomp.ORQ(inner())
            tfgradcomp.DistEFSGD(inner(), "identity")
            tfgradcomp.CompressedOptimizer(inner(), ScaledSign(), Mean(ScaledSign()))
        # It sends momenta.
        tfgradcomp.OneBitAdam("adam", 1)


def test_momentum_on_both_sides_of_local_steps_is_that_of_the_workers():
    outer = tfgradcomp.DistEFBlockSGDM(SGD(0.7))
    tfgradcomp.LocalSteps(SGD(0.1, momentum=0.9), outer)
    with pytest.raises(ValueError, match="DistEFBlockSGDM"):
        tfgradcomp.DistEFBlockSGD(SGD(0.7, momentum=0.9, nesterov=True))


def test_files_of_earlier_versions_load():
    sgd = SGD(0.1, momentum=0.9)
    wrapper = tfgradcomp.DistEFBlockSGD(sgd, allow_inner_momentum=True)
    config = wrapper.get_config()
    del config["allow_inner_momentum"]
    again = tfgradcomp.DistEFBlockSGD.from_config(config)
    assert again.allow_inner_momentum
    layers = tfgradcomp.DistEFBlockSGDM.for_layers(momentum=0.5)
    config = layers.get_config()
    config["arguments"]["allow_inner_momentum"] = False
    assert type(layers).from_config(config).method == layers.method
