"""Transports: their results, and their traffic against the declared words."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits, make_context
from tests.methods import ROWS, parts_of
from tests.pairwise import pairwise, parametrize_pairwise
from tests.selection import rows, select
from tfgradcomp.collectives import Collectives, Loopback, SingleWorker
from tfgradcomp.compressors import Identity
from tfgradcomp.core import Layout
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean, Recompress
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
BY_METHOD = select(by=lambda row: (row.compressor, row.server))
# Each method on the layout with all kinds of cuts. For each class of server and of
# compressor, with its inner compressors, one method is quick.
KINDS = select(by=lambda row: (type(row.server), *map(type, parts_of(row.compressor))))
LONG = [
    pytest.param(
        *("long", 2 + i % 4, row), marks=[] if row in KINDS else pytest.mark.slow
    )
    for i, row in enumerate(BY_METHOD)
]


# Each kind of message in every layout and with every number of workers.
SHORT = pairwise(
    [name for name in LAYOUTS if name != "long"],
    WORKERS,
    select(by=lambda row: row.message_kinds),
)
every_sum = parametrize_pairwise(
    dtype=["float32", "bfloat16", "float16"], layout=LAYOUTS, workers=WORKERS
)


def flag_of(rank, step):
    """Flags from their whole range, [0, 2**24)."""
    return (0, 2**24 - 1, 1, 2**16, 255 + 256 * 3)[(rank + step) % 5]


class Recorder(Collectives):
    """Collectives that record the sizes of all calls."""

    def __init__(self, collectives):
        self._collectives = collectives
        self.num_workers = collectives.num_workers
        self.process_index = collectives.process_index
        self.num_processes = collectives.num_processes
        self.calls = []
        self.variable_length_words = 0

    @property
    def rank(self):
        return self._collectives.rank

    def gather(self, vector, call_site):
        return self._pass_on("gather", vector, call_site)

    def all_to_all(self, rows, call_site):
        return self._pass_on("all_to_all", rows, call_site)

    def sum(self, vector, call_site):
        return self._pass_on("sum", vector, call_site)

    def max(self, vector, call_site):
        return self._pass_on("max", vector, call_site)

    def _pass_on(self, kind, vector, call_site):
        self.calls.append((kind, vector.shape.num_elements() * vector.dtype.size))
        return getattr(self._collectives, kind)(vector, call_site)


def alone(workers):
    """Collectives of which only the number of workers is used."""
    return Loopback(workers).collectives(0)


def moments_of(x, rank, step):
    """Second moments that let each worker send other elements, in step 1 maybe none."""
    unsure = np.random.default_rng([rank, step]).random(x.shape[0])
    return (unsure + (step == 1) * rank) * tf.square(x)


def run(workers, transport, method, layout, steps=2):
    """Takes steps on threads; returns each worker's updates, states and calls."""

    def worker(rank, collectives):
        recorder = Recorder(collectives)
        route = transport(recorder).bind(method, layout, "site")
        compressor = route.method.compressor
        rng = np.random.default_rng(rank)
        state = compressor.init(layout)
        server_state = route.init_state()
        seen = []
        for step in range(steps):
            context = make_context(
                step, 4, rank, workers, previous_rate=0.1 if step else 0.0
            )
            x = tf.constant(rng.normal(size=layout.size), tf.float32)
            context = context._replace(second_moments=moments_of(x, rank, step))
            prepared = compressor.prepare(x, state, layout, context)
            prepared = route.reduce_max(prepared, server_state)
            context = context._replace(prepared=prepared)
            payload, state, _ = compressor.compress(x, state, layout, context)
            flag = tf.constant(flag_of(rank, step))
            result = route.exchange(payload, server_state, context, flag)
            server_state = result.state
            assert result.nonfinite_flags.dtype == tf.int32
            np.testing.assert_array_equal(
                result.nonfinite_flags,
                [flag_of(other, step) for other in range(workers)],
            )
            held = [s.numpy() for s in tf.nest.flatten(server_state)]
            seen.append((result.update.numpy(), held))
            recorder.variable_length_words += int(result.variable_length_words)
        return seen, recorder, route

    return Loopback(workers, timeout=60).run(worker)


@pytest.mark.parametrize(
    ("layout", "workers", "row"),
    [*LONG, *SHORT],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_transport_gives_the_bits_of_a_direct_exchange(layout, workers, row):
    layout, method = LAYOUTS[layout], row.method
    direct = run(workers, DirectExchange, method, layout)[0][0]
    # Constant updates would be equal on any transport.
    assert len({bits(update) for update, _ in direct}) > 1 or layout.size == 1
    names = supported_names(method, layout, alone(workers))
    assert "all_gather" in names
    for name in names:
        ran = run(workers, BY_NAME[name], method, layout)
        check_calls(ran, method.compressor.fields(layout))
        if name == "all_reduce" and row.adds_numbers:
            continue  # A ring adds floats in an order of its own.
        workers_saw = [seen for seen, _, _ in ran]
        route = ran[0][2]
        for step, (expected, expected_state) in enumerate(direct):
            for seen in workers_saw:
                assert bits(seen[step][0]) == bits(expected), (name, step)
            for place, vector in enumerate(expected_state):
                held = [seen[step][1][place] for seen in workers_saw]
                assert bits(route.to_whole(held)) == bits(vector)
                for rank, part in enumerate(held):
                    assert bits(route.from_whole(vector, rank)) == bits(part)
                if name != "sharded":
                    assert {bits(part) for part in held} == {bits(vector)}


def check_calls(ran, fields):
    """Checks that the calls of collectives are those that the route declares."""
    for seen, recorder, route in ran:
        expected = [(call.kind, 4 * call.words) for call in route.calls]
        calls = [(kind, -(-size // 4) * 4) for kind, size in recorder.calls]
        # Each call is followed by a gather of the field of variable length.
        variable = calls[1::2] if messages.has_variable_length(fields) else []
        calls = calls[::2] if variable else calls
        assert {kind for kind, _ in variable} <= {"gather"}
        assert sum(size for _, size in variable) == 4 * recorder.variable_length_words
        assert variable == [c for c in ran[0][1].calls[1::2] if variable]
        assert calls == len(seen) * expected


@every_sum
def test_all_reduce_gives_the_mean(workers, layout, dtype):
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    method = Method(Identity(dtype), Mean(Identity(dtype)))
    reduced = run(workers, AllReduce, method, layout)
    rngs = [np.random.default_rng(rank) for rank in range(workers)]
    for step in range(2):
        mean = np.mean([rng.normal(size=layout.size) for rng in rngs], 0)
        updates = [seen[step][0] for seen, _, _ in reduced]
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
        words = 1 + messages.has_variable_length(fields) + messages.fixed_words(fields)
        # Every worker receives the words of all other workers.
        route = AllGather(alone(workers)).bind(row.method, layout, "site")
        shared = route.max_reduced_fields.values()
        first_round = 2 * (workers - 1) / workers * sum(field.count for field in shared)
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


@every_sum
def test_a_reduction_moves_the_declared_words(workers, layout, dtype):
    size = 4 if dtype == "float32" else 2
    method = Method(Identity(dtype), Mean(Identity(dtype)))
    for _, recorder, route in run(workers, AllReduce, method, layout):
        # The message includes the flags of all workers, three numbers each.
        moved = size * (layout.size + 3 * workers)
        assert recorder.calls == 2 * [("sum", moved)]
        sent, received = route.words
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
