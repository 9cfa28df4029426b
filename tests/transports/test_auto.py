"""The choice of the quickest transport among those with equal bits."""

import pytest

from tests.methods import ROWS
from tests.selection import rows
from tests.transports.test_transports import alone
from tfgradcomp.collectives import CollectiveCall, Loopback
from tfgradcomp.core import Layout
from tfgradcomp.transports import (
    AllGather,
    AllReduce,
    Costs,
    LinearCost,
    Sharded,
    select_transports,
)
from tfgradcomp.transports.auto import Estimate, _agree, estimate, names_with_equal_bits
from tfgradcomp.transports.costs import measure, typical_block_size

LARGE = Layout.from_sizes([10_000_000])
FREE = LinearCost(0.0, 0.0)


def costs(latency, per_word):
    return Costs(*[LinearCost(latency, per_word)] * 3)


def quickest(name, layout, workers, costs):
    method = ROWS[name].method
    names = names_with_equal_bits(method, layout, alone(workers))
    return estimate(names, method, layout, workers, costs).quickest


def test_seconds_of_collectives():
    some = Costs(LinearCost(1.0, 0.5), LinearCost(10.0, 0.0), LinearCost(100.0, 2.0))
    calls = [
        CollectiveCall("gather", 4),
        CollectiveCall("all_to_all", 9),
        CollectiveCall("sum", 3),
        CollectiveCall("max", 1),
    ]
    assert some.seconds(calls) == (1 + 2) + 10 + (100 + 6) + (100 + 2)


def test_a_very_slow_network_decides_whatever_levels_cost():
    line = LinearCost(0.0, 1e-4)
    slow = Costs(
        LinearCost(0.0, 63 * line.per_word), line, LinearCost(0.0, 2 * line.per_word)
    )
    layout = Layout.from_sizes([1_000_000], 2048)
    assert quickest("ORQ, requantized", layout, 64, slow) == "sharded"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["TernGrad", "DistEFSGD"])
def test_the_network_decides(name):
    # A gather sends all payloads to every worker: with many workers it costs most.
    slow = 1e-6
    many = Costs(
        LinearCost(0.0, 63 * slow), LinearCost(0.0, slow), LinearCost(0.0, 2 * slow)
    )
    assert quickest(name, LARGE, 64, many) in ("sharded", "all_reduce")
    # One round is better than two if only latency matters.
    rounds = Costs(LinearCost(1.0, slow), LinearCost(1.0, slow), LinearCost(2.0, 1e-3))
    assert quickest(name, LARGE, 2, rounds) == "all_gather"


@pytest.mark.sample(4)
@rows(lambda row: row.adds_numbers, by=lambda row: row.server)
def test_sums_of_floats_use_the_rule(row):
    expensive = Costs(FREE, FREE, LinearCost(100.0, 1.0))
    selection = select_transports(expensive, row.method, [LARGE], alone(3))
    assert [type(one) for one in selection.transports] == [AllReduce]


@rows()
def test_a_measurement_chooses_only_among_equal_bits(row):
    layout = Layout.from_sizes([3_000, 5, 1_000], 1_024)
    names = names_with_equal_bits(row.method, layout, alone(3))
    # The tests of transports compare the bits of each with a direct exchange. Only a
    # ring adds numbers in another order. Only a gather carries variable lengths.
    if row.adds_numbers:
        assert names == ["all_reduce"]
    elif row.variable_length:
        assert names == ["all_gather"]
    else:
        assert sorted(names) == sorted(row.transports)


def test_a_probe_has_blocks_of_the_bucket_size():
    assert typical_block_size(Layout.from_sizes([10_000, 5], 2048)) == 2048
    assert typical_block_size(Layout.from_sizes([3, 90_000, 1])) == 90_000
    assert typical_block_size(Layout.from_sizes([1])) == 1
    assert typical_block_size(LARGE) < LARGE.size


def test_a_cheap_all_reduce_is_quickest():
    cheap = Costs(LinearCost(10.0, 1e-6), LinearCost(10.0, 1e-6), LinearCost(0.0, 1e-6))
    assert quickest("SignSGD", LARGE, 2, cheap) == "all_reduce"


def test_float32_must_be_clearly_quicker():
    def is_quicker(network):
        selection = select_transports(
            network, ROWS["TernGrad"].method, [LARGE], alone(2)
        )
        return selection.is_float32_quicker

    network = Costs(LinearCost(1.0, 0.0), LinearCost(2.0, 0.0), LinearCost(0.5, 0.0))
    # Two rounds, 0.5 + 1.0, against one of 0.5.
    assert is_quicker(network)
    almost = network._replace(
        sum=LinearCost(0.0, 1.49 / LARGE.size), gather=LinearCost(1.4, 0.0)
    )
    assert not is_quicker(almost)


def test_estimates_cover_transports_with_equal_bits():
    method = ROWS["DistEFSGD"].method
    names = names_with_equal_bits(method, LARGE, alone(4))
    seen = estimate(names, method, LARGE, 4, costs(0.0, 1e-7))
    assert seen.seconds.keys() == {"all_gather", "sharded"}
    assert seen.quickest == min(seen.seconds, key=seen.seconds.get)
    assert seen.float32_seconds == pytest.approx(1e-7 * LARGE.size)


def test_given_costs_are_used():
    given = Costs(LinearCost(0.0, 1e-3), FREE, LinearCost(0.0, 1e-3))
    selection = select_transports(given, ROWS["DistEFSGD"].method, [LARGE], alone(8))
    assert [type(one) for one in selection.transports] == [Sharded]
    assert not selection.is_float32_quicker
    free = costs(0.0, 0.0)
    selection = select_transports(free, ROWS["TernGrad"].method, [LARGE], alone(8))
    assert selection.is_float32_quicker


def test_workers_measure_and_the_medians_decide(caplog):
    def worker(rank, collectives):
        seen = measure(collectives)
        assert all(line.latency >= 0 and line.per_word >= 0 for line in seen)
        # The first worker alone would take another transport.
        of_sharded = 2.5e-3 if rank else 0.5e-3
        seconds = {"all_gather": 1.25e-3, "sharded": of_sharded}
        other = {"all_reduce": 2e-3 * rank}
        estimates = [Estimate(seconds, 5e-4 * rank), Estimate(other, 0.0)]
        return _agree(estimates, collectives)

    chosen = ["all_gather", "all_reduce"], True
    assert Loopback(3, timeout=60).run(worker) == [chosen] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "transport='auto' on 3 workers, by estimated ms per bucket: "
        "all_gather (all_gather 1.25, sharded 2.5, float32 0.5); "
        "all_reduce (all_reduce 2, float32 0)",
        "float32 would be quicker on this network: 0.5 ms a step instead of "
        "3.25. Compression continues; use fallback='float32' to switch in such a case",
    ]


def test_every_bucket_has_a_transport():
    layouts = [LARGE, Layout.from_sizes([3])]
    selection = select_transports(
        "all_gather", ROWS["TernGrad"].method, layouts, alone(2)
    )
    assert [type(one) for one in selection.transports] == [AllGather, AllGather]
