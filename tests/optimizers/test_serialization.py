"""What is saved and comes back: configurations, and a run in its middle."""

import copy
import json

import keras
import pytest

import tfgradcomp
from tests.helpers import Rates
from tfgradcomp.compressors import (
    ORQ,
    QSGD,
    BinGrad,
    Clip,
    ErrorFeedback,
    Hybrid,
    Identity,
    LinearQuantization,
    Momentum,
    NesterovMomentum,
    ScaledSign,
    Sign,
    Strom,
    Ternary,
    TopK,
    VarianceBased,
    WeightDecay,
)
from tfgradcomp.servers import CodeSum, MajorityVote, Mean, Recompress, Requantize


def sgd(**arguments):
    return keras.optimizers.SGD(Rates([0.1, 0.05, 0.2, 0.02]), **arguments)


COMMON = {
    "transport": "all_gather",
    "exclude": ["last", "*/bias", "layer:Embedding"],
    "min_size": 3,
    "seed": 2**62 + 1,
    "nonfinite": "skip",
    "bucket_bytes": 1000,
    "fallback": "float32",
    "sparse": ["*/table"],
    "name": "mine",
}
WRAPPERS = {
    "TernGrad": {"clip_factor": None, "block_size": 100, "share_scaler": False},
    "SignSGD": {
        "aggregate": "vote",
        "tie": "random",
        "abstain_below": 0.25,
        "quorum": 2,
    },
    "Signum": {
        "momentum": 0.5,
        "warmup_steps": "auto",
        "aggregate": "sum",
        "tie": "random",
        "abstain_below": 0.5,
        "quorum": 0,
        "allow_inner_momentum": True,
    },
    "DistEFSGD": {"compressor": ORQ(5), "weight_decay": 0.25, "block_size": 512},
    "DistEFBlockSGD": {"block_size": 77, "weight_decay": 0.125},
    "DistEFBlockSGDM": {
        "momentum": 0.75,
        "block_size": 12,
        "weight_decay": 0.5,
        "allow_inner_momentum": True,
    },
    "HalfPrecision": {"dtype": "float16"},
    "ORQ": {
        "levels": 17,
        "block_size": None,
        "clip_factor": 2.5,
        "refine": 2,
        "reply": "requantize",
        "error_feedback": True,
        "table_dtype": "float16",
    },
    "BinGrad": {
        "variant": "pb",
        "block_size": 100,
        "clip_factor": 1.7,
        "reply": "requantize",
        "error_feedback": True,
        "table_dtype": "bfloat16",
    },
    "QSGD": {
        "levels": 5,
        "block_size": None,
        "norm": "l2",
        "reply": "requantize",
        "error_feedback": True,
    },
    "LinearQuantization": {
        "levels": 4,
        "block_size": None,
        "reply": "requantize",
        "error_feedback": True,
        "table_dtype": "float16",
    },
    "ScaledSign": {"block_size": 64, "reply": "requantize", "error_feedback": True},
    "VarianceBased": {
        "alpha": 1.25,
        "zeta": 0.5,
        "microbatches": 3,
        "index_coding": "delta",
    },
    "Strom": {"threshold": 0.25, "index_coding": "delta"},
    "Hybrid": {
        "threshold": 0.25,
        "alpha": 1.25,
        "zeta": 0.5,
        "microbatches": 3,
        "index_coding": "delta",
    },
}
# There is no default for these.
REQUIRED = {"Strom": {"threshold": 1.0}, "Hybrid": {"threshold": 1.0}}
COMPOSED = {
    "clip, momentum, signs": (Clip(Momentum(Sign(), 0.5, 3), 1.5), MajorityVote()),
    "ternary": (Clip(Ternary(False), 3.0), Mean(Clip(Ternary(False), 3.0))),
    "codes": (Ternary(), CodeSum(Ternary())),
    "top-k": (ErrorFeedback(TopK(0.25)), Mean(TopK(0.25))),
    "two-way": (
        NesterovMomentum(ErrorFeedback(ScaledSign()), 0.3),
        Recompress(ScaledSign()),
    ),
    "levels": (Clip(ORQ(33, 1, "float16"), 2.0), Requantize(QSGD(5, "l2"))),
    "unambiguous": (VarianceBased(1.5, 0.9, "delta"), Mean(VarianceBased())),
    "over a threshold": (Strom(0.5, "delta"), Mean(Hybrid(0.5, 1.5, 0.9, "delta"))),
    "quantiles": (LinearQuantization(3, "bfloat16"), Mean(BinGrad("pb"))),
    "half": (Identity("bfloat16"), Mean(Identity("bfloat16"))),
}
every_wrapper = pytest.mark.parametrize(("name", "own"), WRAPPERS.items(), ids=WRAPPERS)
every_pair = pytest.mark.parametrize(
    ("compressor", "server"), COMPOSED.values(), ids=COMPOSED
)


def there_and_back(optimizer):
    """Serializes by way of JSON, as a `.keras` file does."""
    saved = json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    before = copy.deepcopy(saved)
    again = keras.saving.deserialize_keras_object(saved)
    assert saved == before, "the caller's dict was changed"
    assert type(again) is type(optimizer)
    assert keras.saving.serialize_keras_object(again) == before
    return again


@every_wrapper
def test_wrappers_come_back_with_all_arguments(name, own):
    cls = getattr(tfgradcomp, name)
    again = there_and_back(cls(sgd(momentum=0.5, clipnorm=2.0), **own, **COMMON))
    for argument, value in {**own, **COMMON}.items():
        assert getattr(again, argument) == value, argument
    assert isinstance(again.inner_optimizer, keras.optimizers.SGD)
    assert again.inner_optimizer.momentum == 0.5
    assert again.inner_optimizer.clipnorm == 2.0
    # Those are not the defaults, which come back as well.
    plain = cls("sgd", **REQUIRED.get(name, {}))
    for argument, value in {**own, **COMMON}.items():
        # A quorum goes with votes only, so one of the two is the default.
        if (name, argument) not in {("SignSGD", "aggregate"), ("Signum", "quorum")}:
            assert getattr(plain, argument) != value, argument
    there_and_back(plain)


@every_wrapper
def test_from_config_leaves_the_callers_dict_alone(name, own):
    cls = getattr(tfgradcomp, name)
    config = cls(sgd(), **own, **COMMON).get_config()
    assert set(config) == {"inner_optimizer", *own, *COMMON}
    before = copy.deepcopy(config)
    again = cls.from_config(config)
    assert config == before
    assert again.get_config() == before


@every_pair
@pytest.mark.parametrize("block_size", [None, "model", 50])
def test_composed_methods_come_back(compressor, server, block_size):
    decay = WeightDecay(0.01, 0.5)
    again = there_and_back(
        tfgradcomp.CompressedOptimizer(
            sgd(), compressor, server, block_size, decay, **COMMON
        )
    )
    assert (again.compressor, again.server) == (compressor, server)
    assert type(again.server) is type(server)
    assert (again.block_size, again.weight_decay) == (block_size, decay)


@every_pair
def test_components_come_back(compressor, server):
    for component in (compressor, server, WeightDecay(0.5)):
        saved = keras.saving.serialize_keras_object(component)
        before = copy.deepcopy(saved)
        assert keras.saving.deserialize_keras_object(saved) == component
        assert saved == before


def test_dist_ef_comes_back_with_a_compressor_of_ones_own():
    again = there_and_back(tfgradcomp.DistEFSGD(sgd(), compressor=TopK(0.25)))
    assert again.compressor == TopK(0.25)


def test_a_layer_class_is_saved_by_its_name():
    optimizer = tfgradcomp.SignSGD(sgd(), exclude=[keras.layers.Dense, "last"])
    assert there_and_back(optimizer).exclude == ["layer:Dense", "last"]
