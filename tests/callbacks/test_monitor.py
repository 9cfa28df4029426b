"""CompressionMonitor and Timeline: correct figures, and the same bits of training."""

import contextlib
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.callbacks import monitor_cases as cases
from tests.helpers import bits, make_variables
from tfgradcomp.callbacks import CompressionMonitor, Timeline, timeline
from tfgradcomp.callbacks.figures import Figures

pytestmark = pytest.mark.timeout(600)
SHAPES = [(40, 30), (30,), (7, 5)]
WORKERS = 2
norm = np.linalg.norm


# The papers' formulas in NumPy.


def gradient(weights, rank):
    """A worker's mean gradient of the mean squared error."""
    rows = slice(rank * cases.ROWS // WORKERS, (rank + 1) * cases.ROWS // WORKERS)
    x, y = cases.X[rows].astype(float), cases.Y[rows]
    return (2 / y.size * x.T @ (x @ weights - y)).ravel()


def scaled_sign(v):
    return np.mean(np.abs(v)) * np.where(v >= 0, 1.0, -1.0)


def cosine(a, b):
    return a @ b / norm(a) / norm(b)


def density(v):
    return np.sum(np.abs(v)) ** 2 / v.size / np.sum(v * v)


def trajectory(steps):
    """The figures of both workers, step by step: dist-EF-SGD, Algorithm 2."""
    weights = cases.START.astype(float).ravel()
    e, server = np.zeros([WORKERS, weights.size]), np.zeros(weights.size)
    figures = [[] for _ in range(WORKERS)]
    noises = []
    for step in range(steps):
        g = np.stack([gradient(weights.reshape(-1, 3), r) for r in range(WORKERS)])
        p = g + e
        q = np.stack([scaled_sign(row) for row in p])
        e = p - q
        whole = q.mean(0) + server
        update = scaled_sign(whole)
        server = whole - update
        weights = weights - cases.RATE * update
        noises.append(g - g.mean(0))
        deviations = np.std(noises, axis=0)
        for rank in range(WORKERS):
            magnitudes = np.abs(g[rank])
            figures[rank].append(
                {
                    "quantization_error": norm(e[rank]) / norm(p[rank]),
                    "cosine": cosine(update, g.mean(0)),
                    "zero_share": 0.0,
                    "residual_norm": norm(e[rank]),
                    "gradient_density": density(g.mean(0)),
                    "noise_density": density(deviations[rank]) if step else math.nan,
                    "block_variation": magnitudes.std() / magnitudes.mean(),
                    "elements_sent": weights.size,
                    # Shards are not smaller than 512 elements.
                    "server_residual_norm": (rank == 0) * norm(server),
                }
            )
    return figures


@pytest.fixture(scope="module")
def observed(pools, tmp_path_factory):
    """A training of two workers with both callbacks: its folder and answers."""
    folder = tmp_path_factory.mktemp("observed")
    answers, _ = pools(WORKERS).run(cases.case_figures, str(folder))
    return folder, answers


def test_figures_of_two_workers_are_those_of_numpy(observed):
    _, answers = observed
    expected = trajectory(4)
    for answer, steps in zip(answers, expected, strict=True):
        history = answer["history"]
        for name in steps[0]:
            found = history[f"compression/{name}"]
            want = [step[name] for step in steps]
            if name == "noise_density":
                # A single sample has no deviation.
                want = want[1:]
            np.testing.assert_allclose(found, want, rtol=2e-5, err_msg=name)
    first, second = (answer["history"] for answer in answers)
    assert first["compression/residual_norm"] != second["compression/residual_norm"]
    assert first["compression/cosine"] == second["compression/cosine"]


def test_bytes_and_times_are_in_the_logs(observed):
    _, answers = observed
    for answer in answers:
        history = answer["history"]
        # 72 signs are three words, and the scale is one; so is the flag.
        assert history["compression/bits_per_element"][-1] == 32 * 4 / 72
        assert history["compression/float32_bytes"][-1] == 4 * 72
        assert 0 < history["compression/bytes_sent"][-1] < 4 * 72
        assert history["compression/exchange_ms"][-1] >= 0
        assert 0 <= history["compression/hidden_share"][-1] <= 1
        absent = ("clipped_share", "vote_margin", "tie_rate")
        assert not any(f"compression/{name}" in history for name in absent)
        assert not any(math.isnan(v) for values in history.values() for v in values)
        assert "R2 = " in answer["reading"]
        assert answer["probe"] and answer["closed"]


def test_prometheus_reads_the_newest_sample(observed):
    _, answers = observed
    for rank, answer in enumerate(answers):
        lines = answer["text"].splitlines()
        (line,) = [line for line in lines if line.startswith("tfgradcomp_cosine{")]
        name, value = line.split()
        assert name == f'tfgradcomp_cosine{{worker="{rank}"}}'
        assert float(value) == answer["history"]["compression/cosine"][-1]
        assert "# TYPE tfgradcomp_cosine gauge" in lines


def test_tensorboard_reads_figures_and_histograms(observed):
    folder, answers = observed
    for rank, answer in enumerate(answers):
        (path,) = (folder / "logs" / f"worker-{rank}").iterdir()
        values, plugins = {}, {}
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                key = value.tag, event.step
                values[key] = tf.make_ndarray(value.tensor)
                plugins[value.tag] = value.metadata.plugin_data.plugin_name
        history = answer["history"]
        for step, cosine_of_step in enumerate(history["compression/cosine"]):
            assert values["compression/cosine", step] == np.float32(cosine_of_step)
        (tag,) = [tag for tag in plugins if tag.endswith("/gradient")]
        assert plugins["compression/cosine"] == "scalars"
        assert plugins[tag] == "histograms"
        # All 72 elements are in the bins, whose ends are the smallest and the largest.
        bins = values[tag, 0]
        assert bins[:, 2].sum() == 72
        g = gradient(cases.START.astype(float), rank)
        np.testing.assert_allclose([bins[0, 0], bins[-1, 1]], [g.min(), g.max()], 1e-5)


def spans(events, *worker_and_track):
    found = [e for e in events if (e["pid"], e["tid"]) == worker_and_track]
    return sorted((e["ts"], -e["dur"], e["name"]) for e in found if e["ph"] == "X")


def test_timelines_of_two_workers_are_merged(observed, tmp_path):
    folder, _ = observed
    out = tmp_path / "trace.json"
    files = [str(folder / f"trace.worker-{rank}.json") for rank in range(WORKERS)]
    timeline.main([*files, "-o", str(out)])
    trace = json.loads(out.read_text())
    events = trace["traceEvents"]
    for worker in range(WORKERS):
        named = {
            e["args"]["name"]
            for e in events
            if e["pid"] == worker and e["name"] == "thread_name"
        }
        assert named == {"step", "compressed"}
        assert {name for *_, name in spans(events, worker, 1)} == {
            *("compressed", "flatten", "encode", "all_to_all", "server", "gather"),
            "decode",
        }
        assert [name for *_, name in spans(events, worker, 0)] == [
            *("step 1", "forward and backward", "apply"),
            *("step 2", "forward and backward", "apply"),
        ]
        for track in (0, 1):
            open_until = []
            for begin, minus, _ in spans(events, worker, track):
                assert minus <= 0
                end = begin - minus
                open_until = [until for until in open_until if until > begin]
                # Spans are nested, or do not overlap.
                assert all(end <= until + 1e-3 for until in open_until)
                open_until.append(end)
    # By aligned clocks, a gather ends on no worker before the other has entered it.
    error = max(file["clock_error_us"] for file in trace["metadata"].values())
    gathers = [[s for s in spans(events, w, 1) if s[2] == "gather"] for w in (0, 1)]
    for (begin, minus, _), (begin_2, minus_2, _) in zip(*gathers, strict=True):
        assert begin - minus + error >= begin_2 - error
        assert begin_2 - minus_2 + error >= begin - error


def test_traces_of_one_worker_are_not_merged(tmp_path, capsys):
    path = tmp_path / "trace.json"
    timeline.write(path, timeline.names(0, ["step"]), {})
    with pytest.raises(SystemExit):
        timeline.main([str(path), str(path), "-o", str(tmp_path / "out.json")])
    assert "Received: worker=0" in capsys.readouterr().err
    path.write_text("[]")
    with pytest.raises(ValueError, match="Received: .*trace.json"):
        timeline.merge([path], tmp_path / "out.json")


@pytest.mark.slow
def test_votes_of_two_workers_are_those_of_numpy(pools):
    answers, _ = pools(WORKERS).run(cases.case_votes)
    weights, steps = cases.START.astype(float), []
    for _ in range(3):
        signs = np.sign([gradient(weights, rank) for rank in range(WORKERS)])
        net = signs.sum(0)
        steps.append((np.mean(net == 0), np.mean(np.abs(net)) / WORKERS))
        weights = weights - cases.RATE * np.sign(net).reshape(weights.shape)
    for history in answers:
        found = [history[f"compression/{n}"] for n in ("tie_rate", "vote_margin")]
        # The second epoch has no sample, and repeats the first.
        want = np.transpose([steps[0], steps[0], steps[2]])
        np.testing.assert_allclose(found, want, rtol=1e-6)
        assert "compression/quantization_error" not in history


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all at once", *sorted(cases.METHODS)])
def test_no_bit_changes_on_two_workers(pools, name, tmp_path):
    answers, _ = pools(WORKERS).run(cases.case_bits, name, str(tmp_path))
    for answer in answers:
        assert answer["found"] == answer["expected"]
        assert answer["figures"]


# Without workers.


def clocks_of(graph):
    """The operations of a graph that read the clock."""
    calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    return [call for call in calls if "read_clock" in call.get_attr("f").name]


def steps_of(optimizer, variables, observer=None):
    """Takes two steps in a graph; returns the weights' bits, and its clocks."""
    optimizer.build(variables)
    if observer:
        optimizer.stepper.observers["test"] = observer(optimizer)

    def take(gradients):
        optimizer.apply(gradients, variables)

    step = tf.function(take, autograph=False)
    rng = np.random.default_rng(2)
    for _ in range(2):
        step([tf.constant(rng.normal(size=s), tf.float32) for s in SHAPES])
    (graph,) = {concrete.graph for concrete in step._list_all_concrete_functions()}
    return [bits(v.numpy()) for v in variables], clocks_of(graph)


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("TernGrad", keras.optimizers.SGD),
        pytest.param("Signum", keras.optimizers.SGD, marks=pytest.mark.slow),
        pytest.param("ORQ", keras.optimizers.Adam, marks=pytest.mark.slow),
    ],
)
def test_an_observed_step_has_the_same_bits_and_a_plain_step_no_clocks(
    name, inner, monkeypatch
):
    warnings = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda *args: warnings.append(args))

    def run(observer=None):
        keras.backend.clear_session()
        optimizer = getattr(tfgradcomp, name)(inner(0.1), min_size=1)
        return steps_of(optimizer, make_variables(SHAPES), observer)

    plain, clocks = run()
    assert clocks == []
    # AutoGraph could convert the methods of observers that ignore everything.
    assert not [args for args in warnings if "AutoGraph" in args[0]]
    observed, clocks = run(lambda optimizer: Figures(optimizer, 1, []))
    assert observed == plain
    # A clock waits for the tensors that it times, not for another clock.
    assert len(clocks) > 4
    before = [op for clock in clocks for op in clock.control_inputs]
    assert before
    assert not {*map(id, before)} & {*map(id, clocks)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("delay", [0, 1])
def test_the_sampled_gradient_of_local_steps_is_the_change_of_the_weights(
    monkeypatch, delay
):
    monkeypatch.setattr(cases, "scope", contextlib.nullcontext)

    def run(callbacks):
        outer = tfgradcomp.DistEFBlockSGD(cases.SGD(1.0), min_size=1)
        inner = cases.SGD(cases.RATE)
        optimizer = tfgradcomp.LocalSteps(inner, outer, 2, delay=delay)
        model = cases.regression(lambda: optimizer)
        history = cases.fit_regression(model, 2, callbacks, batch_size=4)
        return history, model.get_weights()[0]

    monitor = CompressionMonitor(every=1)
    history, weights = run([monitor, Timeline("/dev/null", steps=(0, 2))])
    assert bits(weights) == bits(run([])[1])
    start = cases.START.astype(float)
    expected = start.copy()
    for begin in (0, 4):
        x, y = cases.X[begin : begin + 4], cases.Y[begin : begin + 4]
        expected -= cases.RATE * 2 / y.size * x.T @ (x @ expected - y)
    found = history["compression/gradient_density"][0]
    change = (start - expected).ravel()
    np.testing.assert_allclose(found, density(change), rtol=1e-4)


def test_a_model_without_a_wrapper_raises(monkeypatch):
    monkeypatch.setattr(cases, "scope", contextlib.nullcontext)
    for callback in (CompressionMonitor(), Timeline("trace.json")):
        with pytest.raises(ValueError, match=r"Received: optimizers=\[\]"):
            cases.fit_regression(cases.regression(cases.SGD), 1, [callback])


@pytest.mark.parametrize(
    ("make", "received"),
    [
        (lambda: CompressionMonitor(every=0), "every=0"),
        (lambda: CompressionMonitor(prometheus_port=-1), "prometheus_port=-1"),
        (lambda: CompressionMonitor(histograms="kernel"), "histograms='kernel'"),
        (lambda: Timeline("trace.json", steps=(3, 3)), r"steps=\(3, 3\)"),
    ],
)
def test_arguments_out_of_range_raise(make, received):
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        make()
