"""The same bits on every transport and kind of pool, in `fit`; plans that differ."""

import keras
import pytest

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.harness import digest, fit, make_model
from tests.methods import ROWS
from tfgradcomp.collectives import for_strategy
from tfgradcomp.transports import Costs, LinearCost
from tfgradcomp.transports.sharded import Sharded

NEVER, FREE = LinearCost(1e9, 0.0), LinearCost(0.0, 0.0)
# A sharded exchange gathers its replies, 1/N of the words.
COSTS = {
    "all_gather": Costs(gather=FREE, all_to_all=NEVER, sum=NEVER),
    "all_reduce": Costs(gather=NEVER, all_to_all=NEVER, sum=FREE),
    "sharded": Costs(gather=LinearCost(0.0, 1e3), all_to_all=FREE, sum=NEVER),
    # The bucket of the small layer is gathered, that of the large one sharded.
    "mixed": Costs(
        gather=LinearCost(0.0, 1e3), all_to_all=LinearCost(3e5, 0.0), sum=NEVER
    ),
    "measured": "auto",
}
ROUTES = {
    "all_gather": {"AllGatherRoute"},
    "all_reduce": {"AllReduceRoute"},
    "sharded": {"ShardedRoute"},
    "mixed": {"AllGatherRoute", "ShardedRoute"},
}


def accumulating():
    return keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)


def by_width(variable):
    """Other methods for the wide layers, whose blocks are of one size."""
    methods = {
        300: tfgradcomp.QSGD.for_layers(block_size=64),
        200: tfgradcomp.DistEFBlockSGD.for_layers(block_size=128),
    }
    return methods.get(variable.shape[-1])


def of_row(name):
    return lambda transport: ROWS[name].make_to_train(
        transport=transport, bucket_bytes=8_000, min_size=1_000
    )


# Codes that are added up, and one bit with states and weight decay; a policy, whose
# gathered vectors share a message; steps as float32.
OPTIMIZERS = {
    "TernGrad": of_row("TernGrad"),
    "DistEFBlockSGDM": of_row("DistEFBlockSGDM"),
    "policy": lambda transport: tfgradcomp.TernGrad(
        accumulating(),
        block_size=32,
        exclude="norms_and_biases",
        policy=by_width,
        min_size=0,
        transport=transport,
    ),
    "uncompressed steps": lambda transport: tfgradcomp.DistEFBlockSGD(
        accumulating(),
        min_size=100,
        transport=transport,
        bucket_bytes=2000,
        warmup_steps=3,
        dense_every=4,
    ),
}
WIDE = {"units": (1000, 4), "features": 120}
MODELS = {
    "TernGrad": WIDE,
    "DistEFBlockSGDM": WIDE,
    "policy": {"units": (300, 200, 10), "steps_per_execution": 2},
    "uncompressed steps": {"steps_per_execution": 2},
}


# Of each fit: 11 steps, the 12th and the 13th.
BATCHES = {"uncompressed steps": (22, 2, 2)}


def routes_of(optimizer):
    buckets = optimizer.stepper.buckets
    return {type(b.route).__name__ for b in buckets if b.is_compressed}


def train(name, transport):
    """Returns a digest of the weights, the routes, and the residuals after each fit."""
    model = make_model(lambda: OPTIMIZERS[name](transport), **MODELS[name])
    residuals = []
    for batches in BATCHES.get(name, (6,)):
        fit(model, rows=12 * batches, batch_size=12)
        left = [v for v in model.optimizer.variables if "residual" in v.name]
        residuals.append(b"".join(v.numpy().tobytes() for v in left))
    return digest(model), routes_of(model.optimizer), residuals


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "transports", "workers", "kind"),
    [
        ("DistEFBlockSGDM", ("all_gather", "mixed"), 2, "multi_worker"),
        # `test_uncompressed_steps` compares shards with a gather.
        ("uncompressed steps", ("sharded",), 2, "multi_worker"),
        *[
            pytest.param(name, transports, workers, kind, marks=pytest.mark.slow)
            for name, transports, workers, kind in (
                ("DistEFBlockSGDM", (*COSTS,), 3, "multi_worker"),
                ("TernGrad", (*COSTS,), 3, "multi_worker"),
                ("policy", ("all_gather", "sharded"), 2, "multi_worker"),
                ("policy", ("all_gather", "sharded"), 2, "mirrored"),
                ("uncompressed steps", ("all_gather", "sharded"), 3, "multi_worker"),
                ("uncompressed steps", ("sharded",), 2, "mirrored"),
            )
        ],
    ],
)
def test_weights_are_the_same_on_every_transport(
    pools, name, transports, workers, kind
):
    digests = set()
    carried = (*ROWS.get(name, ROWS["TernGrad"]).transports, "mixed", "measured")
    for transport in set(transports) & set(carried):
        given = COSTS[transport] if name in ROWS else transport
        answers = pools(workers, kind).run(train, name, given).answers
        digests |= {digest for digest, _, _ in answers}
        routes = [routes for _, routes, _ in answers]
        assert all(one == routes[0] for one in routes)
        if name in ROWS and transport != "measured":
            # Of small buckets a shard's padding may outweigh what is saved.
            assert ROUTES[transport] <= routes[0], transport
        if name == "uncompressed steps":
            # The 12th step travels as float32, so residuals wait.
            for _, _, (before, after_float, after) in answers:
                assert any(before) and after_float == before != after
    assert len(digests) == 1


# Plans that workers compare.


def is_bias(variable):
    return variable.path.endswith("bias")


def of_other_shapes(rank):
    return lambda variable: variable.shape[0] == (8 if rank else 300)


ARGUMENTS = {
    # Their `repr` differs between processes.
    "function": lambda strategy, rank: {"exclude": lambda v: is_bias(v)},
    "functions": lambda strategy, rank: {"exclude": ["last", is_bias]},
    "transport": lambda strategy, rank: {"transport": Sharded(for_strategy(strategy))},
    "other functions": lambda strategy, rank: {"exclude": of_other_shapes(rank)},
}


def train_with(case):
    """Returns the number of plain elements, routes and a digest, or the error."""
    strategy, rank = strategy_and_rank()

    def make():
        arguments = {"transport": "all_gather", **ARGUMENTS[case](strategy, rank)}
        return tfgradcomp.TernGrad(keras.optimizers.SGD(0.1), min_size=0, **arguments)

    try:
        model = fit(make_model(make), epochs=2)
    except ValueError as error:
        return str(error)
    optimizer = model.optimizer
    return optimizer.traffic.elements_plain, routes_of(optimizer), digest(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "plain", "route"),
    [
        ("function", 302, "AllGatherRoute"),
        ("functions", 902, "AllGatherRoute"),
        ("transport", 0, "ShardedRoute"),
    ],
)
def test_objects_with_an_address_are_equal(pools, case, plain, route):
    first, second = pools(2).run(train_with, case).answers
    assert first == second
    assert first[:2] == (plain, {route})


def test_different_plans_raise_on_all_workers(pools):
    for answer in pools(2).run(train_with, "other functions").answers:
        assert "Variables travel otherwise on workers [1] than on worker 0" in answer


# Residuals that outgrow a threshold.


def train_with_threshold(threshold):
    """Trains for two epochs by `Hybrid`."""

    def make():
        inner = keras.optimizers.SGD(1e-3)
        return tfgradcomp.Hybrid(inner, threshold=threshold, transport="all_gather")

    fit(make_model(make, units=(40,)), rows=96, batch_size=12, epochs=2, shift=3.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["multi_worker", "virtual"])
def test_one_of_several_workers_warns(pools, kind):
    run, warning = pools(2, kind).run, "outgrown its threshold"
    assert run(train_with_threshold, 1e-5).output.count(warning) == 1
    assert warning not in run(train_with_threshold, "auto").output
