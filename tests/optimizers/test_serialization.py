"""What is saved and comes back: configurations, and a run in its middle."""

import copy
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import Rates, bits, make_variables, named
from tfgradcomp.collectives import Loopback
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
from tfgradcomp.transports import AllGather


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


# Saving in the middle of a run.

RUNS = {
    "TernGrad": lambda: tfgradcomp.TernGrad(
        keras.optimizers.Adam(0.01, use_ema=True), min_size=10, seed=2**61 + 3
    ),
    "Signum": lambda: tfgradcomp.Signum(sgd(), warmup_steps=6, min_size=10, seed=5),
    "DistEFSGD": lambda: tfgradcomp.DistEFSGD(sgd(momentum=0.5), min_size=10),
    "DistEFBlockSGDM": lambda: tfgradcomp.DistEFBlockSGDM(
        sgd(), 0.8, weight_decay=0.01, min_size=10
    ),
    "top-k": lambda: tfgradcomp.CompressedOptimizer(
        sgd(), ErrorFeedback(TopK(0.2)), Mean(TopK(0.2)), min_size=10
    ),
    "HalfPrecision": lambda: tfgradcomp.HalfPrecision(sgd(momentum=0.5), min_size=10),
    "ORQ": lambda: tfgradcomp.ORQ(
        sgd(), 5, 16, reply="requantize", error_feedback=True, min_size=10, seed=9
    ),
    "VarianceBased": lambda: tfgradcomp.VarianceBased(keras.optimizers.Adam(0.01)),
    # Saved in the middle of a window.
    "Hybrid": lambda: tfgradcomp.Hybrid(
        sgd(gradient_accumulation_steps=3), 0.1, alpha=1.0, microbatches=4
    ),
    "Strom": lambda: tfgradcomp.Strom(sgd(), 0.1, "delta"),
}
every_run = pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
# With one worker there is nothing left for the server to lose.
STATE = [
    "compressed.worker.residual",
    "compressed.worker.momentum",
    "compressed.local.decay_momentum",
    "plain.worker.momentum",
]


def make_model(optimizer):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(7, activation="relu"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def train(model, first, last):
    for step in range(first, last):
        rng = np.random.default_rng(step)
        x, y = rng.normal(size=(8, 6)), rng.normal(size=(8, 2))
        model.train_on_batch(x.astype(np.float32), y.astype(np.float32))


def snapshot(model):
    """Weights and all of the optimizer's variables, in order, as bits."""
    # Names hold those of the layers, which Keras counts up.
    state = [(v.shape, v.dtype, bits(v.numpy())) for v in model.optimizer.variables]
    return [bits(w) for w in model.get_weights()], state


@every_run
def test_a_saved_model_goes_on_as_if_nothing_had_been(make, tmp_path):
    model = make_model(make())
    train(model, 0, 4)
    model.save(tmp_path / "model.keras")
    saved, steps = snapshot(model), int(model.optimizer.iterations)
    train(model, 4, 8)
    uninterrupted = snapshot(model)
    assert saved != uninterrupted

    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.iterations == steps > 0
    assert snapshot(loaded) == saved
    train(loaded, 4, 8)
    assert snapshot(loaded) == uninterrupted


def test_that_what_is_saved_is_something(tmp_path):
    model = make_model(RUNS["DistEFBlockSGDM"]())
    train(model, 0, 4)
    for name in STATE:
        assert np.abs(named(model.optimizer, name)).max() > 0, name


@pytest.mark.parametrize("name", ["DistEFBlockSGDM", "TernGrad"])
def test_weights_files_hold_the_state(name, tmp_path):
    make = RUNS[name]
    model = make_model(make())
    train(model, 0, 4)
    model.save_weights(tmp_path / "run.weights.h5")
    saved = snapshot(model)
    train(model, 4, 7)

    other = make_model(make())
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "run.weights.h5")
    assert snapshot(other) == saved
    train(other, 4, 7)
    assert snapshot(other) == snapshot(model)


@every_run
def test_checkpoints_hold_the_state(make, tmp_path):
    model = make_model(make())
    train(model, 0, 4)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    saved = snapshot(model)
    train(model, 4, 7)
    uninterrupted = snapshot(model)

    other = make_model(make())
    train(other, 20, 22)
    assert snapshot(other) != saved
    restored = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    restored.restore(path).assert_existing_objects_matched()
    assert snapshot(other) == saved
    train(other, 4, 7)
    assert snapshot(other) == uninterrupted
    # And back in place.
    checkpoint.restore(path)
    assert snapshot(model) == saved


def test_each_worker_saves_its_own_state():
    names = [*STATE, "compressed.server.residual"]
    shapes = [(7, 3), (5,)]

    def gradients_of(step, rank):
        rng = np.random.default_rng([step, rank])
        return [tf.constant(rng.normal(size=s), tf.float32) for s in shapes]

    def worker(rank, collectives):
        def start():
            variables = make_variables(shapes)
            optimizer = tfgradcomp.DistEFBlockSGDM(
                sgd(),
                weight_decay=0.1,
                min_size=10,
                transport=AllGather(collectives),
            )
            optimizer.build(variables)
            return optimizer, variables

        def run(optimizer, variables, first, last):
            for step in range(first, last):
                optimizer.apply(gradients_of(step, rank), variables)

        optimizer, variables = start()
        run(optimizer, variables, 0, 3)
        store, inner_store = {}, {}
        optimizer.save_own_variables(store)
        optimizer.inner_optimizer.save_own_variables(inner_store)
        kept = [v.numpy() for v in variables]
        state = {name: named(optimizer, name) for name in names}
        run(optimizer, variables, 3, 6)

        again, others = start()
        again.load_own_variables({k: np.array(v) for k, v in store.items()})
        again.inner_optimizer.load_own_variables(inner_store)
        for variable, value in zip(others, kept, strict=True):
            variable.assign(value)
        for name in names:
            assert np.abs(state[name]).max() > 0, name
            assert bits(named(again, name)) == bits(state[name]), name
        run(again, others, 3, 6)
        for one, other in zip(variables, others, strict=True):
            assert bits(one.numpy()) == bits(other.numpy())
        return bits(state["compressed.worker.residual"]), store["place"]

    (one, place), (other, other_place) = Loopback(2, timeout=60).run(worker)
    assert one != other
    assert (tuple(place), tuple(other_place)) == ((0, 2), (1, 2))


# What a file has besides rows of state.
ALWAYS = ("place", "fallback", "compressed.server_owned")


def test_state_of_two_devices_is_averaged_on_one():
    seed = 2**61 + 3
    optimizer = tfgradcomp.DistEFSGD(sgd(), min_size=1, seed=seed)
    optimizer.build(make_variables([(3,)]))
    store = {}
    optimizer.save_own_variables(store)
    assert all(len(v) == 1 for k, v in store.items() if k not in ALWAYS)
    two = {k: np.concatenate([v, v]) for k, v in store.items() if k not in ALWAYS}
    two["compressed.worker.residual"] = np.array([[1, 2, 3], [5, 2, -1]], np.float32)
    again = tfgradcomp.DistEFSGD(sgd(), min_size=1, seed=1)
    again.build(make_variables([(3,)]))
    again.load_own_variables({**two, "place": np.array([0, 1])})
    assert named(again, "seed") == seed
    np.testing.assert_array_equal(named(again, "compressed.worker.residual"), [3, 2, 1])


def test_the_state_of_another_method_is_not_taken(tmp_path):
    model = make_model(RUNS["DistEFBlockSGDM"]())
    train(model, 0, 2)
    model.save_weights(tmp_path / "run.weights.h5")
    other = make_model(RUNS["DistEFSGD"]())
    other.optimizer.build(other.trainable_variables)
    # The weights alone may be what is wanted; training on would lose the rest.
    other.load_weights(tmp_path / "run.weights.h5")
    with pytest.raises(ValueError, match="not restored as a whole.*no place for comp"):
        train(other, 2, 3)


def test_a_model_that_never_trained_has_no_state_to_restore(tmp_path):
    model = make_model(RUNS["DistEFBlockSGDM"]())
    model.save_weights(tmp_path / "run.weights.h5")
    other = make_model(RUNS["DistEFBlockSGDM"]())
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "run.weights.h5")
    train(other, 0, 2)


@every_run
def test_variables_are_named_and_complete(make):
    model = make_model(make())
    train(model, 0, 1)
    optimizer = model.optimizer
    names = [v.name for v in optimizer.variables]
    own = names[: len(names) - len(optimizer.inner_optimizer.variables)]
    assert len(own) == len(set(own))
    assert {"seed", "previous_learning_rate", "skipped_steps"} <= set(own)
    assert named(optimizer, "seed") == optimizer.seed
    assert not {v.path for v in model.trainable_variables} & {
        v.path for v in optimizer.variables
    }
