"""What is saved and comes back: configurations, and a run in its middle."""

import copy
import json

import keras
import pytest

import tfgradcomp
from tests.helpers import Rates
from tests.methods import parts_of
from tests.pairwise import parametrize_pairwise
from tests.saved_arguments import SAVED_ARGUMENTS
from tests.selection import required_arguments, rows, select
from tfgradcomp.compressors import WeightDecay


def sgd(**arguments):
    return keras.optimizers.SGD(Rates([0.1, 0.05, 0.2, 0.02]), **arguments)


COMMON = {
    "transport": "all_gather",
    "carrier": "tcp",
    "exclude": ["last", "*/bias", "layer:Embedding"],
    "min_size": 3,
    "seed": 2**62 + 1,
    "nonfinite": "skip",
    "bucket_bytes": 1000,
    "fallback": "float32",
    "warmup_steps": 7,
    "dense_every": 100,
    "sparse": ["*/table"],
    "verify_every": 50,
    "allow_inner_momentum": True,
    "name": "mine",
}
every_wrapper = pytest.mark.parametrize("name", SAVED_ARGUMENTS)


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
def test_wrappers_come_back_with_all_arguments(name):
    cls, own = getattr(tfgradcomp, name), SAVED_ARGUMENTS[name]
    again = there_and_back(cls(sgd(momentum=0.5, clipnorm=2.0), **{**COMMON, **own}))
    for argument, value in {**COMMON, **own}.items():
        assert getattr(again, argument) == value, argument
    assert isinstance(again.inner_optimizer, keras.optimizers.SGD)
    assert again.inner_optimizer.momentum == 0.5
    assert again.inner_optimizer.clipnorm == 2.0
    # Those are not the defaults, which come back as well.
    plain = cls("sgd", **required_arguments(name))
    for argument, value in {**COMMON, **own}.items():
        # A quorum goes with votes only, so one of the two is the default.
        exempt = {("SignSGD", "aggregate"), ("Signum", "quorum")}
        # Lloyd's steps go with the default variant only.
        exempt |= {("BinGrad", "variant")}
        if (name, argument) not in exempt:
            assert getattr(plain, argument) != value, argument
    there_and_back(plain)


@every_wrapper
def test_from_config_leaves_the_callers_dict_alone(name):
    cls, own = getattr(tfgradcomp, name), SAVED_ARGUMENTS[name]
    config = cls(sgd(), **{**COMMON, **own}).get_config()
    # A policy does not go with the fallback; tests/assignment/test_policy.py has it.
    assert set(config) == {"inner_optimizer", "policy", *own, *COMMON}
    before = copy.deepcopy(config)
    again = cls.from_config(config)
    assert config == before
    assert again.get_config() == before


@rows()
def test_every_optimizer_comes_back_with_its_method(row):
    # `warmup_steps` of Signum belong to the method.
    own = SAVED_ARGUMENTS.get(row.wrapper, {})
    common = {k: v for k, v in COMMON.items() if k not in own}
    optimizer = row.make(sgd(), **common)
    again = there_and_back(optimizer)
    assert again.method == optimizer.method
    assert type(again.server) is type(row.server)


# Any method can be composed, those of the wrappers, too.
@pytest.mark.sample(100)
@parametrize_pairwise(
    row=select(by=lambda row: (row.compressor, row.server)),
    block_size=[None, "model", 50],
)
def test_composed_methods_come_back(row, block_size):
    decay = WeightDecay(0.01, 0.5)
    again = there_and_back(
        tfgradcomp.CompressedOptimizer(
            sgd(), row.compressor, row.server, block_size, decay, **COMMON
        )
    )
    assert (again.compressor, again.server) == (row.compressor, row.server)
    assert (again.block_size, again.weight_decay) == (block_size, decay)


@rows()
def test_components_come_back(row):
    for component in (row.method, *parts_of(row.compressor), *parts_of(row.server)):
        saved = keras.saving.serialize_keras_object(component)
        before = copy.deepcopy(saved)
        assert keras.saving.deserialize_keras_object(saved) == component
        assert saved == before


def test_a_layer_class_is_saved_by_its_name():
    optimizer = tfgradcomp.SignSGD(sgd(), exclude=[keras.layers.Dense, "last"])
    assert there_and_back(optimizer).exclude == ["layer:Dense", "last"]


@pytest.mark.parametrize("name", ["SignSGD", "Signum"])
def test_the_mean_of_signs_of_version_0_1_loads(name):
    config = getattr(tfgradcomp, name)(sgd(), aggregate="mean").get_config()
    before = {**config, "aggregate": "sum"}
    again = getattr(tfgradcomp, name).from_config(before)
    assert again.get_config() == config
    assert before["aggregate"] == "sum"
