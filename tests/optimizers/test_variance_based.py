"""Second moments on their way through the optimizer; what is sent and counted."""

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.harness import Worker
from tests.helpers import flat, make_variables, named
from tests.pairwise import parametrize_pairwise
from tests.selection import select
from tfgradcomp.checkpoint import backups
from tfgradcomp.checkpoint.backups import Point
from tfgradcomp.checkpoint.reshard import reshard
from tfgradcomp.testing.exchanges import RecordingCollectives
from tfgradcomp.transports import DirectExchange, Loopback
from tfgradcomp.transports.all_gather import AllGather

SHAPES = [(7, 5), (33,), (2, 3, 5)]
SIZE = 98
METHODS = {
    row.wrapper: row
    for row in select(lambda row: row.kind == "late", by=lambda row: row.wrapper)
}
ARGUMENTS = {"threshold": 0.3, "alpha": 1.2, "index_coding": "fixed"}
every_method = pytest.mark.parametrize("name", METHODS)


def sgd(**arguments):
    return keras.optimizers.SGD(0.1, **arguments)


def make(name, inner=None, **arguments):
    row = METHODS[name]
    own = {key: value for key, value in ARGUMENTS.items() if row.takes(key)}
    return row.make(inner or sgd(), **{**own, **arguments})


def draw(seed=0, shapes=SHAPES):
    """A gradient, and its second moments: its square, or a tenth, or the double."""
    rng = np.random.default_rng(seed)
    g = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return g, [rng.uniform(0.1, 2.0, x.shape).astype(np.float32) * x**2 for x in g]


def applied(optimizer, gradients, moments, variables=None):
    """One call; what the weights moved by."""
    variables = variables or make_variables([g.shape for g in gradients])
    before = flat([v.numpy() for v in variables])
    given = {"second_moments": moments} if optimizer.needs_second_moments else {}
    optimizer.apply([tf.constant(g) for g in gradients], variables, **given)
    return flat([v.numpy() for v in variables]) - before


def state_of_worker(optimizer):
    names = ["residual"] + ["variance"] * optimizer.needs_second_moments
    return [named(optimizer, f"compressed.worker.{name}") for name in names]


def follows_hybrid(optimizer, r, v):
    """Checks what a first step of Hybrid on r and v leaves."""
    residual, variance = state_of_worker(optimizer)
    sent = (r**2 > 1.2 * v) & (np.abs(r) > 0.3)
    assert 20 < sent.sum() < len(r) - 20
    left = np.where(sent, np.maximum(v - 0.6 * np.abs(r) + 0.09, 0), v)
    np.testing.assert_allclose(residual, r - 0.3 * np.sign(r) * sent, atol=1e-6)
    np.testing.assert_allclose(variance, 0.999 * left, rtol=1e-4, atol=1e-6)


# A power of two, by which the division is exact, and another number.
@pytest.mark.parametrize("scale", [8.0, 3.0])
def test_moments_are_unscaled_as_gradients_are(scale):
    g, m = draw()
    optimizer = make("Hybrid", sgd(loss_scale_factor=scale))
    applied(optimizer, [scale * x for x in g], [scale**2 * x for x in m])
    follows_hybrid(optimizer, flat(g), flat(m))


@pytest.mark.parametrize(
    "rule", [{"clipnorm": 1.5}, {"clipvalue": 0.6}, {"global_clipnorm": 4.0}], ids=str
)
def test_clipping_shrinks_moments_with_the_square(rule):
    g, m = draw(1)
    optimizer = make("Hybrid", sgd(**rule), threshold=0.05)
    norms = {
        "clipnorm": [np.linalg.norm(x) for x in g],
        "global_clipnorm": [np.linalg.norm(flat(g))] * 3,
    }
    ((kind, limit),) = rule.items()
    if kind == "clipvalue":
        c = np.clip(flat(g), -limit, limit)
    else:
        c = flat([x * min(1, limit / n) for x, n in zip(g, norms[kind], strict=True)])
    applied(optimizer, g, m)
    residual, variance = state_of_worker(optimizer)
    r, v = c, flat(m) * (c / flat(g)) ** 2
    sent = (np.abs(r) > 0.05) & (r**2 > 1.2 * v)
    assert 20 < sent.sum() < SIZE - 20 and np.abs(c).max() < np.abs(flat(g)).max()
    np.testing.assert_allclose(residual, r - 0.05 * np.sign(r) * sent, atol=1e-6)
    left = np.where(sent, np.maximum(v - 0.1 * np.abs(r) + 0.0025, 0), v)
    np.testing.assert_allclose(variance, 0.999 * left, rtol=1e-4, atol=1e-6)


def test_an_element_of_zero_is_not_clipped():
    g, m = [np.float32([0.0, 30.0, -40.0])], [np.float32([0.5, 1000.0, 2000.0])]
    optimizer = make("VarianceBased", sgd(clipnorm=5.0))
    applied(optimizer, g, m)
    residual, variance = state_of_worker(optimizer)
    np.testing.assert_array_equal(residual, np.float32([0, 3, -4]))
    np.testing.assert_allclose(
        variance, 0.999 * np.float32([0.5, 10, 2000 / 64 * 0.64])
    )


@every_method
def test_accumulated_gradients_are_terms_of_one_step(name):
    """Means over three calls; saved and restored in the middle."""
    calls = [draw(seed) for seed in range(6)]
    worker, again = (
        Worker(make(name, sgd(gradient_accumulation_steps=3)), SHAPES) for _ in range(2)
    )
    optimizer, variables = worker.optimizer, worker.variables
    for count, (g, m) in enumerate(calls):
        if count == 2:
            again.load(worker.save())
            applied(again.optimizer, g, m, again.variables)
        moved = applied(optimizer, g, m, variables)
        assert moved.any() == (count % 3 == 2)
        if count == 2:
            assert again.save().bits() == worker.save().bits()
            if name == "Hybrid":
                r = np.mean([flat(x) for x, _ in calls[:3]], 0)
                v = np.sum([flat(x) for _, x in calls[:3]], 0) / 9
                follows_hybrid(optimizer, r, v)
    plain = make(name)
    others = make_variables(SHAPES)
    for first in (0, 3):
        window = calls[first : first + 3]
        g = [np.mean(x, 0) for x in zip(*[g for g, _ in window], strict=True)]
        m = [np.sum(x, 0) / 9 for x in zip(*[m for _, m in window], strict=True)]
        applied(plain, g, m, others)
    for one, other in zip(variables, others, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_window_with_a_nan_is_dropped_with_its_moments():
    inner = sgd(gradient_accumulation_steps=2)
    optimizer = make("VarianceBased", inner, nonfinite="skip")
    variables = make_variables(SHAPES)
    (g, m), (h, _) = draw(0), draw(1)
    broken = [x.copy() for x in m]
    broken[1][3] = np.inf
    applied(optimizer, g, m, variables)
    assert named(optimizer, "compressed.worker.moments").any()
    moved = applied(optimizer, h, broken, variables)
    assert optimizer.skipped_steps == 1 and not moved.any()
    assert not any(x.any() for x in state_of_worker(optimizer))
    assert not named(optimizer, "compressed.worker.moments").any()


def test_variables_without_a_gradient_wait():
    """A None has no moment; residual and variance stay, whatever would be sent."""
    variables = make_variables(SHAPES)
    optimizer = make("VarianceBased")
    g, m = draw()
    applied(optimizer, g, m, variables)
    before = [x[35:68] for x in state_of_worker(optimizer)]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply(
            [tf.constant(g[0]), None, tf.constant(g[2])],
            variables,
            second_moments=[m[0], None, m[2]],
        )
    assert before[0].any() and before[1].any()
    for leaf, old in zip(state_of_worker(optimizer), before, strict=True):
        np.testing.assert_array_equal(leaf[35:68], old)


def test_slices_with_repeated_rows_equal_their_dense_gradient():
    """`IndexedSlices`, of which rows come twice: as the dense tensor."""
    rows, g = [4, 1, 4], draw(2, [(3, 6)])[0][0]
    slices = tf.IndexedSlices(tf.constant(g), tf.constant(rows), (7, 6))
    total = tf.convert_to_tensor(slices).numpy()
    for name in METHODS:
        moved = []
        for gradient in (slices, tf.constant(total)):
            variables = make_variables([(7, 6)])
            optimizer = make(name)
            given = {}
            if optimizer.needs_second_moments:
                given["second_moments"] = [total**2 / 4]
            optimizer.apply([gradient], variables, **given)
            moved.append(variables[0].numpy())
        np.testing.assert_array_equal(*moved)


@pytest.mark.sample(1)
@parametrize_pairwise(name=[*METHODS], workers=[2, 3], coding=["fixed", "delta"])
def test_traffic_is_what_the_collectives_are_given(name, workers, coding):
    """In two buckets, with one variable uncompressed; means over four steps."""
    sent = []

    def worker(rank, collectives):
        recorder = RecordingCollectives(collectives)
        optimizer = make(
            name,
            transport=AllGather(recorder),
            index_coding=coding,
            exclude=lambda v: v.shape == (33,),
            bucket_bytes=120,
        )
        variables = make_variables(SHAPES)
        optimizer.build(variables)
        assert np.isnan(optimizer.traffic.elements_sent)
        recorder.calls.clear()
        before = flat([v.numpy() for v in variables])
        for step in range(4):
            g, m = draw([step, rank])
            applied(optimizer, g, [x / workers for x in m], variables)
        traffic = optimizer.traffic
        ring = 2 * (workers - 1) / workers
        moved = sum(
            size * (ring if kind in ("sum", "max") else workers - 1)
            for kind, size in recorder.calls
        )
        assert traffic.bytes_sent == traffic.bytes_received == moved / 4
        assert {kind for kind, _ in recorder.calls} <= {"gather", "sum"}
        assert traffic.elements_plain == 33 and traffic.elements_compressed == 65
        assert 33 < traffic.elements_sent < 98
        assert traffic.ratio == 98 / traffic.elements_sent
        assert len(optimizer.stepper.buckets) == 3
        sent.append(traffic.elements_sent)
        return flat([v.numpy() for v in variables]) - before

    moved = Loopback(workers, timeout=60).run(worker)
    assert len({x.tobytes() for x in moved}) == 1 and len(set(sent)) == workers


@pytest.mark.sample(2)
@every_method
def test_vectors_that_indices_cannot_reach_are_cut(name, monkeypatch):
    """Blocks and buckets of at most so many elements: the same steps for Strom."""
    shapes = [(300,), (50, 50), (700,)]
    weights = {}
    for most in (2**28 - 1, 1500):
        monkeypatch.setattr(type(METHODS[name].compressor), "most_elements", most)

        def worker(rank, collectives):
            optimizer = make(name, transport=DirectExchange(collectives))
            variables = make_variables(shapes)
            for step in range(3):
                applied(optimizer, *draw([step, rank], shapes), variables)
            sizes = [bucket.layout.size for bucket in optimizer.stepper.buckets]
            return flat([v.numpy() for v in variables]), sizes

        (one, sizes), (other, _) = Loopback(2, timeout=60).run(worker)
        assert one.tobytes() == other.tobytes()
        assert max(sizes) <= most and (len(sizes) == 1 or most == 1500)
        weights[most] = one
    assert len(sizes) > 3
    same = weights[1500] == weights[2**28 - 1]
    # Of VarianceBased the largest of a block says what the others become.
    assert same.all() if name != "VarianceBased" else same.mean() > 0.5


def test_resharding_conserves_residuals(tmp_path):
    """Residuals, variances and unfinished windows of two workers, for three."""

    def worker_of(collectives):
        inner = sgd(gradient_accumulation_steps=2)
        transport = AllGather(collectives)
        return Worker(make("VarianceBased", inner, transport=transport), SHAPES)

    def state_of_worker(worker):
        variables = worker.optimizer.variables
        return {v.name: v.numpy() for v in variables if "worker" in v.name}

    def save(rank, collectives):
        worker = worker_of(collectives)
        for step in range(3):
            worker.step(*map(flat, draw([step, rank])))

        def write(folder):
            with h5py.File(folder / backups.WEIGHTS, "w") as file:
                worker.optimizer.save_own_variables(file.create_group("optimizer"))

        folder = backups.worker_folder(tmp_path / "old", rank)
        backups.write(folder, Point(1), backups.Origin(rank, 2), write)
        return state_of_worker(worker)

    def load(rank, collectives):
        worker = worker_of(collectives)
        folder = backups.worker_folder(tmp_path / "new", rank)
        path = backups.point_folder(folder, Point(1)) / backups.WEIGHTS
        with h5py.File(path) as file:
            worker.optimizer.load_own_variables(file["optimizer"])
        return state_of_worker(worker)

    saved = Loopback(2, timeout=60).run(save)
    reshard(tmp_path / "old", 3, tmp_path / "new")
    for state in Loopback(3, timeout=60).run(load):
        assert len(state) == 3
        for key, value in state.items():
            mean = (saved[0][key] + saved[1][key]) / 2
            assert mean.any() and (saved[0][key] != saved[1][key]).any()
            np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "name", [n for n in METHODS if METHODS[n].needs_second_moments]
)
def test_wrong_moments_raise(name):
    g, m = draw()
    variables = make_variables(SHAPES)
    with pytest.raises(ValueError, match="(?s)needs second moments.*second_moments="):
        make(name).apply([tf.constant(x) for x in g], variables)
    with pytest.raises(ValueError, match="3 gradients, 2 second moments"):
        make(name).apply(g, variables, second_moments=m[:2])
    with pytest.raises(ValueError, match="None at \\[\\] and \\[1\\]"):
        make(name).apply(g, variables, second_moments=[m[0], None, m[2]])
    for other in (tfgradcomp.SignSGD(sgd()), make("Strom")):
        with pytest.raises(ValueError, match="takes no second moments.*Leave"):
            other.apply(g, variables, second_moments=m)
    with pytest.raises(ValueError, match="microbatches must be an integer, at least 2"):
        make(name, microbatches=1)
