"""PowerSGD beside NumPy, and its state through files and other numbers of workers."""

import contextlib

import h5py
import keras
import numpy as np
import pytest

import tfgradcomp
from tests.harness import Worker
from tests.helpers import Rates, bits, make_variables
from tests.optimizers.trajectories import RATES, SEED, Run
from tests.pairwise import parametrize_pairwise
from tfgradcomp import ops
from tfgradcomp.checkpoint.state_file import join_groups
from tfgradcomp.collectives import Loopback
from tfgradcomp.compressors import MeanErrorFeedback, TopK
from tfgradcomp.compressors.low_rank import Matrices
from tfgradcomp.core import Layout
from tfgradcomp.methods import Method
from tfgradcomp.parameter_server.push_stepper import PushLogTransport
from tfgradcomp.parameter_server.transport import ParameterServer
from tfgradcomp.servers import Mean
from tfgradcomp.testing.inputs import make_context
from tfgradcomp.transports.auto import BY_NAME
from tfgradcomp.transports.direct import DirectExchange

# Two matrices, of which one is a convolution's kernel, among what is sent as it is.
SHAPES = [(7,), (20, 12), (3, 2, 4, 10), (), (5, 3)]
LAYOUT = Layout.from_shapes(SHAPES)
RANK = 2
KEPT = "residual", "update.left", "update.right"
LONG = [*RATES, *RATES[:8]]
CARRIERS = {**BY_NAME, "direct": DirectExchange}
del CARRIERS["sharded"]


class PowerSGD:
    """Vogels et al., Algorithms 1 and 2, and ACP-SGD, in float64."""

    def __init__(self, workers, reuse_query=True, alternate=False):
        self.errors = [np.zeros((workers, *shape)) for shape in SHAPES]
        self.kept = {}
        self.reuse_query, self.alternate = reuse_query, alternate
        self.previous_rate = 0.0

    def update(self, step, gradients, weights, rate):
        ratio = self.previous_rate / rate if rate else 0.0
        parts = np.split(gradients, LAYOUT.row_splits[1:-1], axis=1)
        updates = []
        for i, shape in enumerate(SHAPES):
            given = parts[i].reshape(-1, *shape) + ratio * self.errors[i]
            if i not in (1, 2):
                updates.append(given.mean(0))
                continue
            m = given.reshape(len(given), -1, shape[-1])
            product = self.alternating if self.alternate else self.product
            updates.append(product(i, m, step).reshape(shape))
            if rate:
                self.errors[i] = given - updates[-1]
        self.previous_rate = rate or self.previous_rate
        return np.concatenate([update.reshape(-1) for update in updates])

    def product(self, i, m, step):
        q = self.kept.get(i) if self.reuse_query else None
        q = drawn(step, i, m.shape[2]) if q is None else q
        basis, _ = np.linalg.qr(np.mean(m @ q, axis=0))
        self.kept[i] = np.mean(m.transpose(0, 2, 1) @ basis, axis=0)
        return basis @ self.kept[i].T

    def alternating(self, i, m, step):
        m = m.transpose(0, 2, 1) if step % 2 == 0 else m
        factor = self.kept.get(i)
        factor = drawn(step, i, m.shape[2]) if factor is None else factor
        basis, _ = np.linalg.qr(factor)
        self.kept[i] = np.mean(m @ basis, axis=0)
        product = self.kept[i] @ basis.T
        return product.T if step % 2 == 0 else product


def drawn(step, i, count):
    """The normal numbers of a matrix: as many rows as its factor has."""
    counts = [count if position == i else 0 for position in range(len(SHAPES))]
    numbers = Matrices.of(LAYOUT, RANK).drawn(counts, RANK, make_context(step, SEED))
    return np.reshape(numbers, [-1, RANK]).astype(np.float64)


@pytest.mark.sample(1)
@parametrize_pairwise(
    arguments=[{}, {"reuse_query": False}, {"alternate": True}],
    workers=[1, 2, 3],
    transport=[*CARRIERS],
)
def test_twenty_steps_equal_those_of_numpy(arguments, workers, transport):
    def make(transport):
        inner = keras.optimizers.SGD(Rates(LONG), momentum=0.6)
        given = {**arguments, "transport": transport, "seed": SEED}
        return tfgradcomp.PowerSGD(inner, RANK, **given)

    run = Run(make, workers, SHAPES, CARRIERS[transport], LONG)
    reference = PowerSGD(workers, **arguments)
    run.follows(reference.update, momentum=0.6, atol=1e-4 / len(LONG))


def make(transport, **arguments):
    inner = keras.optimizers.SGD(0.05, momentum=0.6)
    return tfgradcomp.PowerSGD(inner, RANK, transport=transport, **arguments)


def train(workers, steps, saved=None, carrier="all_reduce", **arguments):
    """Trains in threads, and returns what each worker saves after some steps."""

    def run(rank, collectives):
        transport = CARRIERS[carrier](collectives)
        worker = Worker(make(transport, **arguments), SHAPES, saved and saved[rank])
        for step in steps:
            random = np.random.default_rng([step, rank])
            worker.step(random.normal(size=LAYOUT.size).astype(np.float32))
        return worker.save()

    return Loopback(workers, timeout=60).run(run)


def residual_of(state):
    """The residual of a file: what is kept, less the product of its factors."""
    p, left, right = (state[f"compressed.worker.{name}"][0] for name in KEPT)
    form = Matrices.of(LAYOUT, RANK)
    return p - np.asarray(ops.multiply_factors(left, right, *form, RANK))


def test_files_hold_whole_factors_once_whatever_wrote_them():
    whole, cut = train(2, range(3)), train(2, range(3), bucket_bytes=1)
    residuals = (residual_of(one[1].state) for one in (whole, cut))
    assert len({*map(bits, residuals)}) == 1
    factors = cut[0].state["compressed.local.right"]
    assert factors.shape == (1, RANK * (12 + 10))
    for other in (whole[1], cut[1]):
        assert bits(factors) == bits(other.state["compressed.local.right"])


def test_a_run_resumes_on_another_transport_in_other_buckets():
    uninterrupted = train(2, range(6), carrier="all_gather")
    saved = train(2, range(3), carrier="all_gather", bucket_bytes=1)
    rest = train(2, range(3, 6), saved, carrier="direct")
    assert [one.bits() for one in rest] == [one.bits() for one in uninterrupted]


def without_factors(saved):
    """The state as version 0.3.0 has saved it."""
    state = {k: v for k, v in saved.state.items() if ".worker.update." not in k}
    state["compressed.worker.residual"] = residual_of(saved.state)[np.newaxis]
    return saved._replace(state=state)


@pytest.mark.parametrize("buckets", [{}, {"bucket_bytes": 1}])
def test_a_residual_without_factors_resumes_to_the_bit(buckets):
    uninterrupted, saved = train(2, range(6)), train(2, range(3))
    assert np.any(saved[0].state["compressed.worker.update.left"])
    rest = train(2, range(3, 6), [*map(without_factors, saved)], **buckets)
    assert [one.bits() for one in rest] == [one.bits() for one in uninterrupted]


def joined_files(saved, folder):
    with contextlib.ExitStack() as stack:
        groups = []
        for rank, one in enumerate(saved):
            group = stack.enter_context(h5py.File(folder / f"{rank}.h5", "w"))
            for name, value in one.state.items():
                group[name] = value
            groups.append(group)
        return join_groups(groups)


def test_residuals_that_lack_different_updates_have_no_mean(tmp_path):
    first, second = train(2, range(3))
    zeros = {k: 0 * v for k, v in second.state.items() if ".worker.update." in k}
    other = second._replace(state={**second.state, **zeros})
    with pytest.raises(ValueError, match="lack different updates.*1.h5"):
        joined_files([first, other], tmp_path)


def test_another_number_of_workers_keeps_the_factors_and_the_mean_residual(tmp_path):
    saved = train(2, range(3))
    joined = joined_files(saved, tmp_path)
    residual = np.mean([residual_of(one.state) for one in saved], 0)
    np.testing.assert_allclose(residual_of(joined), residual, 1e-5, 1e-6)
    given = saved[0]._replace(state={**saved[0].state, **joined})
    places = [np.array([rank, 3]) for rank in range(3)]
    alone = [given._replace(state={**given.state, "place": at}) for at in places]
    (first, *others) = train(3, range(3, 5), alone)
    assert all(bits(first.weights[1]) == bits(other.weights[1]) for other in others)
    # With the same state and gradients, workers go on alike: nothing was lost.
    factors = given.state["compressed.local.right"]
    assert bits(factors) == bits(saved[1].state["compressed.local.right"])


@pytest.mark.parametrize("kind", [ParameterServer, PushLogTransport])
def test_servers_that_are_no_workers_raise(kind):
    with pytest.raises(ValueError, match="of matrices need servers on all workers"):
        kind(Loopback(1).collectives(0)).bind(
            tfgradcomp.methods.power_sgd(), LAYOUT, "site"
        )


def test_what_depends_on_the_reply_needs_a_barrier():
    method = Method(MeanErrorFeedback(TopK(0.5)), Mean(TopK(0.5)))
    with pytest.raises(ValueError, match="depends on the reply, need a barrier"):
        PushLogTransport(Loopback(1).collectives(0)).bind(method, LAYOUT, "site")


def test_bits_of_an_element_are_those_of_both_rounds():
    def build(rank, collectives):
        optimizer = make(CARRIERS["all_reduce"](collectives))
        optimizer.build(make_variables(SHAPES))
        return optimizer.traffic

    traffic, *_ = Loopback(3).run(build)
    others, slots = 7 + 1 + 15, 3 * 3
    words = RANK * (20 + 12 + 24 + 10) + others
    assert traffic.bits_per_element_up == 32 * words / LAYOUT.size
    assert traffic.bits_per_element_reply == 32 * words / LAYOUT.size
    # A ring of three sends a sum 2 (N - 1) / N times.
    assert traffic.words_sent == pytest.approx(4 / 3 * (words + slots))


@pytest.mark.parametrize("waits", [False, True])
def test_a_matrix_alternates_in_steps_that_compress_it(waits):
    """Its gradient comes, or is compressed, in every second step alone."""
    inner, (v, other) = keras.optimizers.SGD(0.05), make_variables([(20, 12), (6, 5)])
    dense_every = None if waits else 2
    optimizer = tfgradcomp.PowerSGD(inner, 1, alternate=True, dense_every=dense_every)
    optimizer.build([v, other])
    target = np.random.default_rng(1).normal(size=v.shape).astype(np.float32)
    for _ in range(200):
        optimizer.apply([v - target, other], [v, other])
        if waits:
            optimizer.apply([other], [other])
    # With the same factor each time, most of it would never be sent.
    np.testing.assert_allclose(v, target, atol=0.02)
