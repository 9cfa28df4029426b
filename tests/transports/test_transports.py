"""Transports: their results, and their traffic against the declared words."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits, make_context
from tests.methods import ROWS
from tests.pairwise import pairwise, parametrize_pairwise
from tests.selection import rows, select
from tfgradcomp.collectives import Loopback, SingleWorker
from tfgradcomp.compressors import Identity
from tfgradcomp.core import Layout
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean, Recompress
from tfgradcomp.testing.exchanges import (
    exchanges_give_the_bits_of_a_direct_exchange,
    run,
)
from tfgradcomp.transports import (
    AllGather,
    AllReduce,
    Costs,
    DirectExchange,
    LinearCost,
    Sharded,
    messages,
    select_transports,
)
from tfgradcomp.transports.auto import BY_NAME, supported_names

LAYOUTS = {
    "one": Layout.from_sizes([1]),
    "ragged": Layout.from_sizes([33, 1, 7, 20], 21),
    "tensors": Layout.from_sizes([64, 5, 1]),
    # Blocks of several shards, shards of several blocks, and cuts inside of both.
    "long": Layout.from_sizes([300, 7, 90_001, 2_300, 30_000, 1, 513]),
    "one block": Layout.from_sizes([70_000, 3], "model"),
    "buckets": Layout.from_sizes([50_000], 2048),
}
WORKERS = (3, 1, 2, 4, 5)
# Each kind of message, beside what `check_method` exchanges for each row: up to three
# workers, other layouts.
BY_WIRE = select(by=lambda row: row.wire_kinds)
# Of servers only this one draws a number at an element's place in the vector.
TIES = "SignSGD, random ties"
# Each method on the layout with all kinds of cuts; quickly, each kind of message.
LONG = [
    pytest.param(
        *("long", 2 + i % 4, row),
        marks=[] if row in BY_WIRE or row.name == TIES else pytest.mark.slow,
    )
    for i, row in enumerate(select(by=lambda row: (row.compressor, row.server)))
]
SHORT = pairwise(["one", "ragged", "one block"], (4, 5), BY_WIRE)
every_sum = parametrize_pairwise(
    dtype=["float32", "bfloat16", "float16"], layout=LAYOUTS, workers=WORKERS
)


def alone(workers):
    """Collectives of which only the number of workers is used."""
    return Loopback(workers).collectives(0)


@pytest.mark.sample(24, TIES, "[long-2-TernGrad", "long-3-ORQ, requantized")
@pytest.mark.parametrize(
    ("layout", "workers", "row"),
    [*LONG, *SHORT],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_transport_gives_the_bits_of_a_direct_exchange(layout, workers, row):
    layout = LAYOUTS[layout]
    exchanges_give_the_bits_of_a_direct_exchange(row.method, layout, workers)


@pytest.mark.sample(19)
@pytest.mark.parametrize("row", BY_WIRE, ids=lambda row: row.name)
def test_what_arrives_is_not_equal_anyway(row):
    first, second = run(2, DirectExchange, row.method, LAYOUTS["ragged"])[0].steps
    assert bits(first[0]) != bits(second[0])
    assert "all_gather" in supported_names(row.method, LAYOUTS["ragged"], alone(2))


@pytest.mark.sample(19)
@every_sum
def test_all_reduce_gives_the_mean(workers, layout, dtype):
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    method = Method(Identity(dtype), Mean(Identity(dtype)))
    reduced = run(workers, AllReduce, method, layout)
    rngs = [np.random.default_rng(rank) for rank in range(workers)]
    for step in range(2):
        mean = np.mean([rng.normal(size=layout.size) for rng in rngs], 0)
        updates = [worker.steps[step][0] for worker in reduced]
        np.testing.assert_allclose(updates[0], mean, rtol=0, atol=3 * tolerance)
        assert len({bits(update) for update in updates}) == 1


@pytest.mark.parametrize("value", [6e4, -6e4])
def test_a_sum_of_half_floats_does_not_overflow(value):
    layout = LAYOUTS["ragged"]

    def worker(rank, collectives):
        payload = {"values": tf.fill([layout.size], tf.constant(value, tf.float16))}
        method = Method(Identity("float16"), Mean(Identity("float16")))
        route = AllReduce(collectives).bind(method, layout, "site")
        context = make_context(rank=rank, num_workers=4)
        return route.exchange(payload, (), context, tf.constant(0)).update.numpy()

    for mean in Loopback(4, timeout=60).run(worker):
        np.testing.assert_allclose(mean, value, rtol=1e-3)


@rows(by=lambda row: row.compressor)
def test_a_gather_moves_all_payloads(row):
    for layout, workers in pairwise([*LAYOUTS.values()], WORKERS):
        fields = row.compressor.fields(layout)
        # What all workers have does not travel.
        fields = {name: field for name, field in fields.items() if not field.shared}
        words = 1 + messages.has_variable_length(fields) + messages.fixed_words(fields)
        # Every worker receives the words of all other workers.
        route = AllGather(alone(workers)).bind(row.method, layout, "site")
        reduced = row.compressor.first_round(layout).values()
        first_round = sum(field.count for field in reduced)
        first_round *= 2 * (workers - 1) / workers
        expected = (workers - 1) * words + first_round
        assert route.words == (expected, expected)


# One bit and a scale; codes with a first round; signs alone.
@parametrize_pairwise(
    row=[ROWS[name] for name in ("DistEFSGD", "TernGrad", "SignSGD")],
    workers=(1, 2, 3, 4, 8, 64),
)
def test_traffic_of_shards_does_not_grow_with_the_workers(row, workers):
    method = row.method
    layout = Layout.from_sizes([20_000_000, 5, 5_000_000])
    up = messages.message_words(method.compressor.fields(layout))
    down = messages.message_words(method.server.reply_fields(layout, workers))
    ideal = (workers - 1) / workers * (up + down)
    sent, received = Sharded(alone(workers)).bind(method, layout, "site").words
    assert ideal <= sent == received <= 1.03 * ideal


def test_an_uncut_vector_is_not_padded():
    method, layout = ROWS["DistEFSGD, ORQ-9"].method, LAYOUTS["one block"]
    route = Sharded(alone(3)).bind(method, layout, "site")
    assert len(route.owned_range(0)) == layout.size
    assert route.owned_range(2) == range(layout.size, layout.size)
    payload = messages.message_words(method.compressor.fields(layout))
    # A row with the flag to each other worker, and one worker's reply to each.
    assert route.words.sent == 2 * (1 + payload) + 2 * payload


@rows(lambda row: "all_reduce" in row.transports and not row.adds_numbers)
def test_traffic_of_a_sum_of_codes(row):
    layout, method = Layout.from_sizes([1_000_000]), row.method
    for workers in (2, 3, 4, 8):
        levels = workers * (method.compressor.fields(layout)["codes"].base - 1) + 1
        digits = math.floor(32 / math.log2(levels) + 1e-9)
        ring = 2 * (workers - 1) / workers
        route = AllReduce(alone(workers)).bind(method, layout, "site")
        scales = sum(field.count for field in route.max_reduced_fields.values())
        words = math.ceil(layout.size / digits) + workers + scales
        assert route.words.sent == pytest.approx(ring * words)


@pytest.mark.sample(19)
@every_sum
def test_a_reduction_moves_the_declared_words(workers, layout, dtype):
    size = 4 if dtype == "float32" else 2
    method = Method(Identity(dtype), Mean(Identity(dtype)))
    for worker in run(workers, AllReduce, method, layout):
        # The message includes the flags of all workers, three numbers each.
        moved = size * (layout.size + 3 * workers)
        assert worker.calls == 2 * [("sum", moved)]
        sent, received = worker.route.words
        ring = 2 * (workers - 1) / workers * np.ceil(moved / 4)
        np.testing.assert_allclose([sent, received], ring)


def test_one_worker_moves_nothing():
    vector = tf.constant([1.0, -2.0])
    alone = SingleWorker()
    assert alone.num_workers == 1
    assert alone.rank == 0
    np.testing.assert_array_equal(alone.gather(vector, "a"), [[1, -2]])
    np.testing.assert_array_equal(alone.sum(vector, "b"), vector)
    np.testing.assert_array_equal(alone.max(vector, "c"), vector)


@pytest.mark.parametrize("workers", [1, 3])
@rows()
def test_names_select_transports(row, workers):
    assert selected("auto", row.method, workers) is (
        AllReduce if row.adds_numbers else AllGather
    )
    if row.variable_length:
        # No other transport carries them, so costs do not matter.
        assert (
            selected(Costs(*[LinearCost(1.0, 1.0)] * 3), row.method, workers)
            is AllGather
        )
    for name, kind in BY_NAME.items():
        if name in row.transports:
            assert selected(name, row.method, workers) is kind
            continue
        with pytest.raises(ValueError, match=f"'{name}' cannot.*all_gather"):
            selected(name, row.method, workers)


def selected(transport, method, workers):
    """The type of the single selected transport."""
    selection = select_transports(
        transport, method, [LAYOUTS["ragged"]], alone(workers)
    )
    assert not selection.is_float32_quicker
    (one,) = selection.transports
    return type(one)


def test_a_server_that_needs_more_than_the_mean_is_gathered():
    recompressed = Method(Identity(), Recompress(Identity()))
    assert selected("auto", recompressed, 3) is AllGather


def test_an_unsupported_method_raises():
    for kind, name in ((AllReduce, "DistEFSGD"), (Sharded, "Strom")):
        with pytest.raises(ValueError, match="cannot carry.*transport='auto'"):
            kind(alone(3)).bind(ROWS[name].method, LAYOUTS["ragged"], "site")


def test_a_failing_worker_fails_the_run():
    def worker(rank, collectives):
        if rank == 1:
            raise KeyError("worker 1")
        collectives.sum(tf.constant([1.0]), "never")

    loopback = Loopback(3, timeout=60)
    with pytest.raises(KeyError, match="worker 1"):
        loopback.run(worker)
    totals = loopback.run(lambda rank, c: c.sum(tf.constant([1.0 + rank]), "s"))
    assert [float(total[0]) for total in totals] == [6, 6, 6]


def test_workers_at_different_call_sites_raise():
    def worker(rank, collectives):
        return collectives.max(tf.constant([1.0]), f"site {rank}")

    with pytest.raises(RuntimeError, match="different call sites.*site 0.*site 1"):
        Loopback(2, timeout=60).run(worker)
