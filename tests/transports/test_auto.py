"""The transport that should be quickest."""

import numpy as np
import pytest

from tests.transports.test_transports import METHODS, alone
from tfgradcomp import transports
from tfgradcomp.compressors import Layout
from tfgradcomp.transports import AllGather, AllReduce, Costs, Line, Loopback, Sharded
from tfgradcomp.transports.base import Call
from tfgradcomp.transports.auto import (
    PLAIN,
    Choice,
    _block_size,
    agree,
    measure,
    quickest,
)

LARGE = Layout.from_sizes([10_000_000])
FREE = Line(0.0, 0.0)


def costs(latency, per_word):
    return Costs(*[Line(latency, per_word)] * 3)


def test_seconds_of_collectives():
    some = Costs(Line(1.0, 0.5), Line(10.0, 0.0), Line(100.0, 2.0))
    calls = [Call("gather", 4), Call("all_to_all", 9), Call("sum", 3)]
    assert some.seconds(calls) == (1 + 2) + 10 + (100 + 6)


@pytest.mark.parametrize("name", ["ORQ, requantized", "BinGrad-pb", "QSGD"])
def test_a_very_slow_network_decides_whatever_levels_cost(name):
    line = Line(0.0, 1e-4)
    slow = Costs(Line(0.0, 63 * line.per_word), line, Line(0.0, 2 * line.per_word))
    layout = Layout.from_sizes([1_000_000], 2048)
    assert quickest(*METHODS[name], layout, 64, slow).name == "sharded"


@pytest.mark.parametrize("name", ["TernGrad", "signSGD", "dist-EF"])
def test_the_network_decides(name):
    compressor, server = METHODS[name]

    def chosen(workers, costs, layout=LARGE):
        return quickest(compressor, server, layout, workers, costs).name

    # Nothing is gained by words that cost nothing.
    assert chosen(4, costs(0.0, 0.0)) == PLAIN
    # A gather hands every worker all payloads: with many it costs most.
    slow = 1e-6
    many = Costs(Line(0.0, 63 * slow), Line(0.0, slow), Line(0.0, 2 * slow))
    assert chosen(64, many) in ("sharded", "all_reduce")
    # One round is better than two where rounds are all that counts.
    rounds = Costs(Line(1.0, slow), Line(1.0, slow), Line(2.0, 1e-3))
    assert chosen(2, rounds) == "all_gather"


def test_a_probe_has_blocks_like_those_of_the_bucket():
    assert _block_size(Layout.from_sizes([10_000, 5], 2048)) == 2048
    assert _block_size(Layout.from_sizes([3, 90_000, 1])) == 90_000
    assert _block_size(Layout.from_sizes([1])) == 1
    assert _block_size(LARGE) < LARGE.size


def test_an_all_reduce_where_it_is_cheap():
    compressor, server = METHODS["signSGD"]
    cheap = Costs(Line(10.0, 1e-6), Line(10.0, 1e-6), Line(0.0, 1e-6))
    assert quickest(compressor, server, LARGE, 2, cheap).name == "all_reduce"


def test_compression_must_lose_clearly_before_it_is_given_up():
    compressor, server = METHODS["TernGrad"]
    network = Costs(Line(1.0, 0.0), Line(2.0, 0.0), Line(0.5, 0.0))
    # Two rounds of its own, 0.5 + 1.0, against one of 0.5.
    assert quickest(compressor, server, LARGE, 2, network).name == PLAIN
    almost = network._replace(sum=Line(0.0, 1.49 / LARGE.size), gather=Line(1.4, 0.0))
    assert quickest(compressor, server, LARGE, 2, almost).name != PLAIN


def test_estimates_are_those_of_the_choice():
    choice = quickest(*METHODS["dist-EF"], LARGE, 4, costs(0.0, 1e-7))
    assert choice.milliseconds.keys() == {"all_gather", "sharded", PLAIN}
    assert choice.name == min(choice.milliseconds, key=choice.milliseconds.get)
    assert choice.milliseconds[PLAIN] == pytest.approx(1e3 * 1e-7 * LARGE.size)


def test_costs_that_are_given_are_used():
    given = Costs(Line(0.0, 1e-3), FREE, Line(0.0, 1e-3))
    ((compressor, _, transport),) = transports.carriers(
        given, *METHODS["dist-EF"], [LARGE], alone(8)
    )
    assert isinstance(transport, Sharded)
    assert compressor is METHODS["dist-EF"][0]
    ((compressor, _, transport),) = transports.carriers(
        costs(0.0, 0.0), *METHODS["TernGrad"], [LARGE], alone(8)
    )
    assert isinstance(transport, AllReduce)
    assert compressor == METHODS["TernGrad"][0].uncompressed()


def test_workers_measure_and_agree_with_the_first(capfd):
    names = ["all_gather", "sharded", PLAIN]

    def worker(rank, collectives):
        seen = measure(collectives)
        assert all(line.latency >= 0 and line.per_word >= 0 for line in seen)
        choices = [Choice(name, {name: 1.25}) for name in np.roll(names, rank)]
        return agree(choices, collectives)

    assert Loopback(3, timeout=60).run(worker) == [names] * 3
    lines = [line for line in capfd.readouterr().err.splitlines() if "auto" in line]
    assert lines == [
        "tfgradcomp: transport='auto' on 3 workers, by estimated ms a bucket: "
        "all_gather (all_gather 1.25); sharded (sharded 1.25); float32 (float32 1.25)"
    ]


def test_every_bucket_has_a_carrier_of_its_own():
    layouts = [LARGE, Layout.from_sizes([3])]
    one, other = transports.carriers(
        "all_gather", *METHODS["TernGrad"], layouts, alone(2)
    )
    assert isinstance(one[2], AllGather)
    assert isinstance(other[2], AllGather)
