"""Words between workers: what arrives, and that no more moves than declared."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits, make_context
from tfgradcomp import servers, transports
from tfgradcomp.compressors import (
    Clip,
    ErrorFeedback,
    Identity,
    Layout,
    Momentum,
    NesterovMomentum,
    ScaledSign,
    Sign,
    Ternary,
    TopK,
)
from tfgradcomp.servers import CodeSum, MajorityVote, Mean, Recompress
from tfgradcomp.transports import DirectExchange, Loopback
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce
from tfgradcomp.transports.collectives import Collectives, SingleWorker
from tfgradcomp.transports.sharded import Sharded
from tfgradcomp.wire import words as wire

METHODS = {
    "signSGD": (Sign(), MajorityVote()),
    "signSGD, random ties": (Sign(), MajorityVote("random")),
    "signSGD, abstention": (Sign(0.5), MajorityVote("zero", 1, Sign(0.5))),
    "Signum, sum": (Momentum(Sign()), CodeSum(Sign())),
    "TernGrad": (Clip(Ternary()), CodeSum(Ternary())),
    "TernGrad, own scales": (Ternary(False), Mean(Ternary(False))),
    "dist-EF": (ErrorFeedback(ScaledSign()), Recompress(ScaledSign())),
    "dist-EF momentum": (
        NesterovMomentum(ErrorFeedback(ScaledSign())),
        Recompress(ScaledSign()),
    ),
    "dist-EF top-k": (ErrorFeedback(TopK(0.1)), Recompress(TopK(0.1))),
    "bfloat16": (Identity("bfloat16"), Mean(Identity("bfloat16"))),
    "float16": (Identity("float16"), Mean(Identity("float16"))),
    "float32": (Identity(), Mean()),
}
LAYOUTS = {
    "one": Layout.from_sizes([1]),
    "ragged": Layout.from_sizes([33, 1, 7, 20], 21),
    "tensors": Layout.from_sizes([64, 5, 1]),
    # Blocks of several shards, shards of several blocks, and cuts inside of both.
    "long": Layout.from_sizes([300, 7, 90_001, 2_000, 30_000, 1, 513]),
    "one block": Layout.from_sizes([70_000, 3], "model"),
    "buckets": Layout.from_sizes([50_000], 2048),
}
TRANSPORTS = {"all_gather": AllGather, "all_reduce": AllReduce, "sharded": Sharded}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def status_of(rank, step):
    """Statuses over the whole of their range, [0, 2**24)."""
    return (0, 2**24 - 1, 1, 2**16, 255 + 256 * 3)[(rank + step) % 5]


class Recorder(Collectives):
    """Passes on to other collectives and writes down what they are given."""

    def __init__(self, collectives):
        self._collectives = collectives
        self.num_workers = collectives.num_workers
        self.place = collectives.place
        self.calls = []

    @property
    def rank(self):
        return self._collectives.rank

    def gather(self, vector, site):
        return self._pass_on("gather", vector, site)

    def all_to_all(self, rows, site):
        return self._pass_on("all_to_all", rows, site)

    def sum(self, vector, site):
        return self._pass_on("sum", vector, site)

    def max(self, vector, site):
        return self._pass_on("max", vector, site)

    def _pass_on(self, kind, vector, site):
        self.calls.append((kind, vector.shape.num_elements() * vector.dtype.size))
        return getattr(self._collectives, kind)(vector, site)


def run(workers, transport, method, layout, steps=3):
    """A few steps on threads; what each worker decoded, and what it moved."""
    compressor, server = method[0], servers.fused(method[1])

    def worker(rank, collectives):
        recorder = Recorder(collectives)
        carrier = transport(recorder)
        rng = np.random.default_rng(rank)
        state = compressor.init(layout)
        server_state = carrier.init_server(compressor, server, layout)
        seen = []
        for step in range(steps):
            context = make_context(
                step,
                4,
                rank,
                workers,
                previous_rate=0.1 if step else 0.0,
                maximum=lambda vector: recorder.max(vector, "agreed"),
            )
            x = tf.constant(rng.normal(size=layout.size), tf.float32)
            payload, state = compressor.compress(x, state, layout, context)
            update, server_state, statuses = carrier.exchange(
                payload,
                compressor,
                server,
                server_state,
                layout,
                context,
                tf.constant(status_of(rank, step)),
                "site",
            )
            assert statuses.dtype == tf.int32
            np.testing.assert_array_equal(
                statuses, [status_of(other, step) for other in range(workers)]
            )
            held = [s.numpy() for s in tf.nest.flatten(server_state)]
            seen.append((update.numpy(), held))
        return seen, recorder.calls, carrier

    return Loopback(workers, timeout=60).run(worker)


@every_method
@every_layout
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_every_transport_gives_the_bits_of_a_direct_exchange(workers, layout, method):
    direct = run(workers, DirectExchange, method, layout)[0][0]
    # What arrives is no constant that would be equal anyway.
    assert len({bits(update) for update, _ in direct}) > 1 or layout.size == 1
    names = transports.candidates(*method, layout, workers)
    assert "all_gather" in names
    for name in names:
        if name == "all_reduce" and isinstance(method[0], Identity):
            continue  # A ring adds floats in an order of its own.
        workers_saw = [
            seen for seen, _, _ in run(workers, TRANSPORTS[name], method, layout)
        ]
        for step, (expected, expected_state) in enumerate(direct):
            for seen in workers_saw:
                assert bits(seen[step][0]) == bits(expected), (name, step)
            for place, vector in enumerate(expected_state):
                held = [seen[step][1][place] for seen in workers_saw]
                if name == "sharded":
                    whole = np.concatenate(held)
                    assert bits(whole[: layout.size]) == bits(vector)
                    assert not whole[layout.size :].any()
                else:
                    assert {bits(h) for h in held} == {bits(vector)}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2), ("float16", 2e-3)]
)
@every_layout
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_all_reduce_gives_the_mean(workers, layout, dtype, tolerance):
    method = Identity(dtype), Mean(Identity(dtype))
    reduced = run(workers, AllReduce, method, layout)
    rngs = [np.random.default_rng(rank) for rank in range(workers)]
    for step in range(3):
        mean = np.mean([rng.normal(size=layout.size) for rng in rngs], 0)
        updates = [seen[step][0] for seen, _, _ in reduced]
        np.testing.assert_allclose(updates[0], mean, rtol=0, atol=3 * tolerance)
        assert len({bits(update) for update in updates}) == 1


@pytest.mark.parametrize("value", [6e4, -6e4])
def test_a_sum_of_half_floats_does_not_overflow(value):
    layout = LAYOUTS["ragged"]

    def worker(rank, collectives):
        payload = {"values": tf.fill([layout.size], tf.constant(value, tf.float16))}
        update, _, _ = AllReduce(collectives).exchange(
            payload,
            Identity("float16"),
            Mean(Identity("float16")),
            (),
            layout,
            make_context(rank=rank, num_workers=4),
            tf.constant(0),
            "site",
        )
        return update.numpy()

    for mean in Loopback(4, timeout=60).run(worker):
        np.testing.assert_allclose(mean, value, rtol=1e-3)


@every_method
@every_layout
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_gather_moves_the_declared_words(workers, layout, method):
    compressor, _ = method
    words = 1 + wire.message_words(compressor.fields(layout))
    agreed = [4 * field.count for field in compressor.agreed(layout).values()]
    for _, calls, carrier in run(workers, AllGather, method, layout, steps=2):
        expected = [("max", size) for size in agreed] + [("gather", 4 * words)]
        assert calls == 2 * expected
        declared = carrier.words(compressor.fields(layout), workers)
        # Everybody gets the words of all others, and gives them its own.
        assert declared == ((workers - 1) * words, (workers - 1) * words)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@every_layout
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_reduction_moves_the_declared_words(workers, layout, dtype):
    method = Identity(dtype), Mean(Identity(dtype))
    size = 4 if dtype == "float32" else 2
    for _, calls, carrier in run(workers, AllReduce, method, layout, steps=2):
        # The statuses of all workers ride along, three numbers each.
        moved = size * (layout.size + 3 * workers)
        assert calls == 2 * [("sum", moved)]
        sent, received = carrier.words(method[0].fields(layout), workers)
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


def test_the_choice_of_a_transport():
    layout = LAYOUTS["ragged"]
    alone = SingleWorker()

    def chosen(name, compressor, server):
        return type(transports.choose(name, compressor, server, layout, alone))

    assert chosen("auto", Identity(), Mean()) is AllReduce
    assert chosen("all_gather", Identity(), Mean()) is AllGather
    assert chosen("all_reduce", Identity("bfloat16"), Mean()) is AllReduce
    for compressor, server in METHODS.values():
        if not isinstance(compressor, Identity):
            assert chosen("auto", compressor, server) is AllGather
            with pytest.raises(ValueError, match="use 'auto' or 'all_gather'"):
                chosen("all_reduce", compressor, server)
    # The mean is not all that this server needs.
    assert chosen("auto", Identity(), Recompress(Identity())) is AllGather


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


def test_workers_at_different_sites_are_told():
    def worker(rank, collectives):
        return collectives.max(tf.constant([1.0]), f"site {rank}")

    with pytest.raises(RuntimeError, match="different call sites.*site 0.*site 1"):
        Loopback(2, timeout=60).run(worker)
