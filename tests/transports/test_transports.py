"""Words between workers: what arrives, and that no more moves than declared."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits, make_context
from tfgradcomp import servers, transports
from tfgradcomp.compressors import (
    ORQ,
    QSGD,
    BinGrad,
    Clip,
    ErrorFeedback,
    Identity,
    Layout,
    LinearQuantization,
    Momentum,
    NesterovMomentum,
    ScaledSign,
    Sign,
    Strom,
    Ternary,
    TopK,
    VarianceBased,
)
from tfgradcomp.servers import CodeSum, MajorityVote, Mean, Recompress, Requantize
from tfgradcomp.transports import DirectExchange, Loopback
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce
from tfgradcomp.collectives.base import Collectives, SingleWorker
from tfgradcomp.transports.sharded import Sharded
from tfgradcomp.transports import messages

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
    "ORQ": (ORQ(5), Mean(ORQ(5))),
    "ORQ, requantized": (
        Clip(ORQ(9, 1, "float16")),
        Requantize(ORQ(9, 1, "float16")),
    ),
    "dist-EF ORQ": (ErrorFeedback(ORQ(17)), Recompress(ORQ(17))),
    "BinGrad": (ErrorFeedback(BinGrad()), Mean(BinGrad())),
    "BinGrad-pb": (BinGrad("pb", "bfloat16"), Requantize(BinGrad("pb", "bfloat16"))),
    "QSGD": (QSGD(7, "l2"), Requantize(QSGD(7, "l2"))),
    "linear": (LinearQuantization(3), Mean(LinearQuantization(3))),
    "variance, gaps": (
        VarianceBased(index_coding="delta"),
        Mean(VarianceBased(index_coding="delta")),
    ),
    "Strom": (Strom(0.7), Mean(Strom(0.7))),
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
ONE = LAYOUTS["one"]
# What they send cannot be added up.
NO_SUMS = {"TernGrad, own scales", "BinGrad", "BinGrad-pb", "ORQ", "ORQ, requantized"}
NO_SUMS |= {"QSGD", "linear", *(name for name in METHODS if "dist-EF" in name)}
VARYING = {
    name for name, (method, _) in METHODS.items() if "words" in method.fields(ONE)
}
NO_SUMS |= VARYING
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
        self.varying = 0

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


def alone(workers):
    """Collectives of which nothing but the number of workers is asked."""
    return Loopback(workers).collectives(0)


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
            # Every worker is sure of some elements, each of others, and now and then
            # of none.
            unsure = np.random.default_rng([rank, step]).random(layout.size)
            unsure += (step == 1) * rank
            context = context._replace(second_moments=unsure * tf.square(x))
            payload, state = compressor.compress(x, state, layout, context)
            update, server_state, statuses, varying = carrier.exchange(
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
            recorder.varying += int(varying)
        return seen, recorder, carrier

    return Loopback(workers, timeout=60).run(worker)


@every_method
@every_layout
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_every_transport_gives_the_bits_of_a_direct_exchange(workers, layout, method):
    direct = run(workers, DirectExchange, method, layout)[0][0]
    # What arrives is no constant that would be equal anyway.
    assert len({bits(update) for update, _ in direct}) > 1 or layout.size == 1
    names = transports.candidates(*method, layout, alone(workers))
    assert "all_gather" in names
    for name in names:
        if name == "all_reduce" and isinstance(method[0], Identity):
            continue  # A ring adds floats in an order of its own.
        ran = run(workers, TRANSPORTS[name], method, layout)
        workers_saw = [seen for seen, _, _ in ran]
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
        update, *_ = AllReduce(collectives).exchange(
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
def test_the_collectives_get_what_is_declared(workers, layout, method):
    compressor, server = method
    agreed = [4 * field.count for field in compressor.agreed(layout).values()]
    rounds = [("max", size) for size in agreed]
    for name in transports.candidates(*method, layout, alone(workers)):
        ran = run(workers, TRANSPORTS[name], method, layout, steps=2)
        for _, recorder, carrier in ran:
            declared = carrier.calls(compressor, servers.fused(server), layout)
            expected = rounds + [(call.kind, 4 * call.words) for call in declared]
            calls = [(kind, -(-size // 4) * 4) for kind, size in recorder.calls]
            # Each followed by a gather of a size of its own, of what varies.
            varying = calls[1::2] if messages.varies(compressor.fields(layout)) else []
            calls = calls[::2] if varying else calls
            assert {kind for kind, _ in varying} <= {"gather"}
            assert sum(size for _, size in varying) == 4 * recorder.varying
            assert varying == [c for c in ran[0][1].calls[1::2] if varying]
            assert calls == 2 * expected


@every_method
@every_layout
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_gather_moves_all_payloads(workers, layout, method):
    fields = method[0].fields(layout)
    words = 1 + messages.varies(fields) + messages.fixed_words(fields)
    # Everybody gets the words of all others, and gives them its own.
    expected = ((workers - 1) * words, (workers - 1) * words)
    assert AllGather(alone(workers)).words(*method, layout) == expected


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("name", ["TernGrad", "signSGD", "dist-EF"])
def test_what_shards_move_does_not_grow_with_the_workers(name, workers):
    compressor, server = METHODS[name][0], servers.fused(METHODS[name][1])
    layout = Layout.from_sizes([20_000_000, 5, 5_000_000])
    up = messages.message_words(compressor.fields(layout))
    down = messages.message_words(server.reply_fields(layout, workers))
    ideal = (workers - 1) / workers * (up + down)
    sent, received = Sharded(alone(workers)).words(compressor, server, layout)
    assert ideal <= sent == received <= 1.03 * ideal


def test_what_cannot_be_cut_is_not_padded():
    method, layout = METHODS["dist-EF ORQ"], LAYOUTS["one block"]
    sharded = Sharded(alone(3))
    assert len(sharded.held(0, *method, layout)) == layout.size
    assert sharded.held(2, *method, layout) == range(layout.size, layout.size)
    payload = messages.message_words(method[0].fields(layout))
    # To each of the others a row, with the status, and from one to each the reply.
    assert sharded.words(*method, layout).sent == 2 * (1 + payload) + 2 * payload


@pytest.mark.parametrize("name", ["TernGrad", "signSGD", "signSGD, abstention"])
def test_what_a_sum_of_codes_moves(name):
    layout = Layout.from_sizes([1_000_000])
    compressor, _ = METHODS[name]
    for workers in (2, 3, 4, 8):
        levels = workers * (compressor.fields(layout)["codes"].base - 1) + 1
        digits = math.floor(32 / math.log2(levels) + 1e-9)
        ring = 2 * (workers - 1) / workers
        moved = AllReduce(alone(workers)).words(*METHODS[name], layout).sent
        assert moved == pytest.approx(
            ring * (math.ceil(layout.size / digits) + workers)
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@every_layout
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_reduction_moves_the_declared_words(workers, layout, dtype):
    method = Identity(dtype), Mean(Identity(dtype))
    size = 4 if dtype == "float32" else 2
    for _, recorder, carrier in run(workers, AllReduce, method, layout, steps=2):
        # The statuses of all workers ride along, three numbers each.
        moved = size * (layout.size + 3 * workers)
        assert recorder.calls == 2 * [("sum", moved)]
        sent, received = carrier.words(*method, layout)
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
def test_the_choice_of_a_transport(workers):
    layout = LAYOUTS["ragged"]

    def chosen(name, compressor, server):
        (carrier,) = transports.carriers(
            name, compressor, server, [layout], alone(workers)
        )
        assert carrier[:2] == (compressor, server)
        return type(carrier[2])

    for name, (compressor, server) in METHODS.items():
        is_float = isinstance(compressor, Identity)
        expected = AllReduce if is_float else AllGather
        assert chosen("auto", compressor, server) is expected
        if name in VARYING:
            # Whatever it costs: nothing else carries them.
            free = transports.Costs(*[transports.Line(1.0, 1.0)] * 3)
            assert chosen(free, compressor, server) is AllGather
        assert chosen("all_gather", compressor, server) is AllGather
        if name not in NO_SUMS:
            assert chosen("all_reduce", compressor, server) is AllReduce
        else:
            with pytest.raises(ValueError, match="'all_reduce' cannot.*all_gather"):
                chosen("all_reduce", compressor, server)
        if name not in {"dist-EF top-k", *VARYING}:
            assert chosen("sharded", compressor, server) is Sharded
        else:
            with pytest.raises(ValueError, match="'sharded' cannot.*all_gather"):
                chosen("sharded", compressor, server)
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
