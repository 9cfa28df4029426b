"""`model.fit` on real processes under MultiWorkerMirroredStrategy."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.cluster import run_workers
from tfgradcomp.per_example.second_moments import step_of
from tfgradcomp.transports import Loopback
from tfgradcomp.transports.all_gather import AllGather

# A fixture trains in many ways, which a loaded machine takes minutes for.
pytestmark = pytest.mark.timeout(600)

WORKER = Path(__file__).with_name("fit_worker.py")
CASES = (
    "methods",
    "steps_per_execution",
    "stock",
    "predict",
    "empty_share",
    "dict_inputs",
    "keras_rules",
    "overflow",
    "nonfinite",
    "state",
    "checkpoint_callback",
    "shared_paths",
    "no_iterator_to_build",
    "different_models",
    "different_arguments",
    "different_weights",
    "transports_under_conditions",
    "varying",
    "auto",
)
METHODS = (
    "terngrad",
    "terngrad_own_scale",
    "signsgd",
    "signum",
    "dist_ef_sgd",
    "dist_ef_block_sgd",
    "dist_ef_block_sgdm",
    "half_precision",
    "orq",
    "variance_based",
    "strom",
    "hybrid",
)
VARYING = METHODS[-3:]
# Of each kind one, for clusters that do what two workers do with every method.
SOME = ("terngrad", "signum", "dist_ef_block_sgdm", *VARYING)
SOME_METHODS = f"methods={','.join(SOME)}"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two workers answer to all cases, and what they print."""
    return run_workers(WORKER, 2, tmp_path_factory.mktemp("two"), *CASES, timeout=580)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """What three workers answer to some cases."""
    folder = tmp_path_factory.mktemp("three")
    cases = (SOME_METHODS, "nonfinite", "overflow", "transports")
    answers, _ = run_workers(WORKER, 3, folder, *cases, timeout=580)
    return answers


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """What one process with two devices under MirroredStrategy answers."""
    folder = tmp_path_factory.mktemp("mirrored")
    cases = (
        *(SOME_METHODS, "steps_per_execution", "eagerly", "keras_rules", "overflow"),
        *("nonfinite", "state", "no_iterator_to_build", "varying"),
    )
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder), *cases],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "answer-0.json").read_text())


@pytest.mark.parametrize("method", SOME)
def test_two_devices_of_one_process_are_two_workers(mirrored, two, method):
    one = mirrored["methods"][method]
    assert one["digest"] == two[0][0]["methods"][method]["digest"]
    assert_same_training(one, one["weights"], two[0][0]["methods"][method]["history"])


def test_mirrored_strategy_in_every_manner(mirrored, two):
    answer = two[0][0]
    for case in ("steps_per_execution", "keras_rules"):
        for name, run in mirrored[case].items():
            assert run["digest"] == answer[case][name]["digest"], (case, name)
    assert mirrored["eagerly"]["digest"] == answer["steps_per_execution"]["1"]["digest"]
    assert mirrored["overflow"] == answer["overflow"]
    assert mirrored["nonfinite"]["unchanged"]
    assert "[on worker] [1]" in mirrored["nonfinite"]["error"]
    state = mirrored["state"]
    for way in ("keras", "weights", "checkpoint"):
        assert state[way] == state["uninterrupted"], way


@pytest.mark.parametrize(
    ("workers", "method"),
    [("two", method) for method in METHODS] + [("three", method) for method in SOME],
)
def test_weights_and_logs_are_the_same_on_all_workers(request, workers, method):
    answers = request.getfixturevalue(workers)
    answers = answers[0] if workers == "two" else answers
    first, *others = (answer["methods"][method] for answer in answers)
    for other in others:
        assert other["digest"] == first["digest"]
        assert other["history"] == first["history"]
    assert first["iterations"] == 10
    assert first["history"]["loss"][1] < first["history"]["loss"][0]
    assert set(first["history"]) == {"loss", "mae", "val_loss", "val_mae"}


def test_several_steps_per_execution_change_nothing(two):
    for answer in two[0]:
        runs = answer["steps_per_execution"]
        assert runs["1"]["digest"] == runs["4"]["digest"]


def test_identity_compressor_is_plain_keras(two):
    runs = two[0][0]["stock"]
    for got, want in zip(
        runs["identity"]["weights"], runs["plain"]["weights"], strict=True
    ):
        # Up to the order of summation.
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    assert runs["plain"]["digest"] == two[0][1]["stock"]["plain"]["digest"]


def one_process_model():
    """The workers' model before training."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(40, activation="relu", name="first"),
            keras.layers.Dense(3, name="second"),
        ]
    )


def one_process(**rule):
    """Plain Keras on the global batches: what several workers should amount to."""
    random = np.random.default_rng(7)
    x = random.normal(size=(60, 64)).astype("float32")
    y = random.normal(size=(60, 3)).astype("float32")
    model = one_process_model()
    model.compile(keras.optimizers.SGD(0.05, **rule), "mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=12, epochs=2, verbose=0, shuffle=False).history
    return model.get_weights(), history


def assert_same_training(run, weights, history):
    for got, want in zip(run["weights"], weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    for name, values in history.items():
        np.testing.assert_allclose(run["history"][name], values, rtol=1e-4)


def test_stock_fit_is_that_of_one_process_on_the_global_batch(two):
    assert_same_training(two[0][0]["stock"]["plain"], *one_process())


@pytest.mark.parametrize("size", ["60", "49", "13"])
def test_predict_and_evaluate_see_every_row_in_order(two, size):
    for answer in two[0]:
        got = answer["predict"][size]
        assert got["predict"] < 1e-4
        assert got["mae"][0] == pytest.approx(got["mae"][1], rel=1e-4)
        assert got["loss"][0] == pytest.approx(got["loss"][1], rel=1e-4)


def test_a_worker_without_rows_sits_out_an_evaluation(two):
    for answer in two[0]:
        assert answer["empty_share"]["mae"] == pytest.approx(
            answer["empty_share"]["want"], rel=1e-4
        )


def test_dict_inputs(two):
    first, second = (answer["dict_inputs"] for answer in two[0])
    assert first == second


@pytest.mark.parametrize(
    "rule",
    [
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    ],
    ids=["accumulation", "ema"],
)
def test_rules_of_the_inner_optimizer_are_those_of_one_process(two, rule, request):
    name = request.node.callspec.id
    first, second = (answer["keras_rules"][name] for answer in two[0])
    assert first["digest"] == second["digest"]
    assert_same_training(first, *one_process(**rule))


def test_each_worker_clips_its_own_gradient(two):
    first, second = (answer["keras_rules"]["clipnorm"] for answer in two[0])
    assert first["digest"] == second["digest"]
    assert first["digest"] != two[0][0]["stock"]["identity"]["digest"]
    # Ten steps of at most 0.05 * 0.1 for each tensor.
    start = one_process_model().get_weights()
    for got, want in zip(first["weights"], start, strict=True):
        assert 0 < np.linalg.norm(np.array(got) - want) < 10 * 0.05 * 0.1 * 1.001


@pytest.mark.parametrize("workers", ["two", "three"])
def test_one_overflow_skips_and_halves_everywhere(request, workers):
    answers = request.getfixturevalue(workers)
    answers = answers[0] if workers == "two" else answers
    results = [answer["overflow"] for answer in answers]
    assert all(result == results[0] for result in results)
    assert results[0]["finite"]
    # Five batches, one of them skipped once or more until the scale fits.
    assert results[0]["iterations"] < 5
    assert results[0]["scale"] == 2.0**15 * 0.5 ** (5 - results[0]["iterations"])


@pytest.mark.parametrize("workers", ["two", "three"])
def test_a_nan_on_one_worker_changes_nothing_anywhere(request, workers):
    answers = request.getfixturevalue(workers)
    answers = answers[0] if workers == "two" else answers
    # Twelve rows a batch: row 8 is in the share of the second worker, or the third.
    culprit = 8 // (12 // len(answers))
    for answer in answers:
        result = answer["nonfinite"]
        assert "first/kernel" in result["error"]
        assert f"[on worker] [{culprit}]" in result["error"]
        assert "nonfinite=" in result["error"]
        assert result["unchanged"]
        assert result["skip"]["skipped"] == 1
        assert result["skip"]["iterations"] == 4
        # Four steps of half a window each; the window with the NaN is dropped whole.
        assert result["window"]["skipped"] == 1
        assert result["window"]["iterations"] == 1
        assert result["skip"]["digest"] == answers[0]["nonfinite"]["skip"]["digest"]


@pytest.mark.parametrize("method", METHODS)
def test_traffic_is_what_the_collectives_are_given(two, method):
    answer = two[0][0]["methods"][method]
    traffic = answer["traffic"]
    words = 0.0
    for site, size, dtype in answer["seen"]:
        if "fingerprint" in site:
            continue
        bytes_each = {"int32": 4, "float32": 4, "bfloat16": 2}[dtype]
        # Two workers: a gather sends the vector once, a ring's reduce sends it once.
        words += -(-size * bytes_each // 4)
    if method in VARYING:
        # Ten steps, each with a size of its own that is the same on both workers.
        sizes = answer["varying"]
        assert len(sizes) == 10 and sizes == two[0][1]["methods"][method]["varying"]
        assert traffic["sent"] == traffic["received"] == words + np.mean(sizes)
        assert traffic["ratio"] > 1.1 and len(set(sizes)) > 1
        return
    assert traffic["sent"] == traffic["received"] == words and not answer["varying"]
    limit = {"terngrad": 1.65, "half_precision": 16.0, "orq": 2.6}.get(
        method.split("_own")[0], 1.05
    )
    # 2560 compressed elements; the scale of the one block is 32 bits of them, five
    # levels of two blocks are 320.
    assert traffic["up"] <= limit


def test_resumed_runs_are_bit_identical(two):
    for answer in two[0]:
        state = answer["state"]
        for way in ("keras", "weights", "checkpoint"):
            assert state[way] == state["uninterrupted"], way


def test_a_file_of_one_worker_loads_everywhere_with_one_notice(two):
    answers, output = two
    first, second = (answer["state"] for answer in answers)
    weights, residuals = first["of_worker_0"]
    assert first["of_worker_0"] == second["of_worker_0"]
    assert [weights, residuals] == first["at_save"]
    name = "compressed.worker.residual"
    assert first["at_save"][1][name] != second["at_save"][1][name]
    assert output.count("residuals and momenta are those of worker 0 of 2") == 1


def test_model_checkpoint(two):
    assert all(answer["checkpoint_callback"]["equal"] for answer in two[0])


def test_workers_that_share_paths_do_not_spoil_files(two):
    for answer in two[0]:
        shared = answer["shared_paths"]
        assert shared["resumed"] == shared["straight"]
        assert shared["checkpoint"]
        assert shared["files"] == ["1.weights.h5", "2.weights.h5", "whole.keras"]


def test_building_a_model_opens_no_iterator(two, mirrored):
    assert mirrored["no_iterator_to_build"]["passes"] == 2
    # Two epochs; an iterator opened only to build would make it three.
    assert [a["no_iterator_to_build"]["passes"] for a in two[0]] == [2, 2]


def test_models_that_differ_are_refused_by_all(two):
    for answer in two[0]:
        error = answer["different_models"]["error"]
        assert "The models of workers [1] differ" in error
        assert "second/kernel" in error or "other/kernel" in error
        error = answer["different_arguments"]["error"]
        assert "The optimizer arguments of workers [1] differ" in error
        error = answer["different_weights"]["error"]
        assert "The weights or the step count of workers [1] differ" in error


def test_all_transports_and_buckets_give_the_same_weights(three):
    for method, digests in three[0]["transports"].items():
        assert len(digests) >= 3
        for answer in three:
            assert {*answer["transports"][method].values()} == {*digests.values()}
        assert len({*digests.values()}) == 1, (method, digests)
    digests = [min(d.values()) for d in three[0]["transports"].values()]
    assert len({*digests}) == len(digests)


def test_transports_work_inside_of_conditionals(two):
    (first, second), _ = two
    digests = first["transports_under_conditions"]
    assert digests["all_gather"] == digests["sharded"]
    assert second["transports_under_conditions"] == digests


def test_sizes_that_vary_in_the_depths_of_a_graph(two, mirrored):
    """In loops and conditionals, with a loss scale, in many buckets: equal weights."""
    first, second = (answer["varying"] for answer in two[0])
    for method in ("variance_based", "hybrid"):
        assert second[method]["digest"] == first[method]["digest"]
        assert mirrored["varying"][method]["digest"] == first[method]["digest"]
        assert first[method]["iterations"] == 10
        loss = first[method]["history"]["loss"]
        assert loss[-1] < loss[0]


@pytest.mark.parametrize("method", VARYING)
@pytest.mark.parametrize("workers", ["two", "three"])
def test_fit_does_what_workers_in_one_process_do(request, workers, method):
    """Gradients and moments of each worker's share, exchanged over a `Loopback`."""
    answers = request.getfixturevalue(workers)
    answers = answers[0] if workers == "two" else answers
    count = len(answers)
    random = np.random.default_rng(7)
    x = random.normal(size=(60, 64)).astype("float32")
    y = random.normal(size=(60, 3)).astype("float32")
    arguments = {
        "variance_based": (tfgradcomp.VarianceBased, 0.01, 0.9, {}),
        "strom": (tfgradcomp.Strom, 0.05, 0.0, {"threshold": 0.02}),
        "hybrid": (tfgradcomp.Hybrid, 0.05, 0.0, {"threshold": 0.01, "alpha": 1.3}),
    }
    kind, rate, momentum, own = arguments[method]
    model = one_process_model()
    model.compile("sgd", "mse")
    start = model.get_weights()

    def worker(rank, collectives):
        variables = [keras.Variable(w) for w in start]
        optimizer = kind(
            keras.optimizers.SGD(rate, momentum),
            transport=AllGather(collectives),
            **own,
        )
        for step in range(10):
            begin = 12 * (step % 5) + 12 // count * rank
            rows = slice(begin, begin + 12 // count)
            with lock:
                model.set_weights([np.array(v) for v in variables])
                done = step_of(model, tf.constant(x[rows]), tf.constant(y[rows]))
            given = {}
            if optimizer.needs_second_moments:
                given["second_moments"] = [m / count**2 for m in done.moments]
            optimizer.apply([g / count for g in done.gradients], variables, **given)
        return [np.array(v) for v in variables]

    lock = threading.Lock()
    for weights in Loopback(count, timeout=60).run(worker):
        for got, want in zip(
            answers[0]["methods"][method]["weights"], weights, strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_all_workers_take_the_transport_that_one_chose(two):
    (first, second), output = two
    assert first["auto"] == second["auto"]
    # Where words cost much, one bit is better than 32; where they cost nothing, nothing
    # is worth the work.
    assert first["auto"]["slow"]["compressor"] == "_MomentumSign"
    assert first["auto"]["idle"]["compressor"] == "Momentum"
    assert first["auto"]["idle"]["transport"] == "AllReduce"
    lines = [line for line in output.splitlines() if "transport='auto'" in line]
    assert len(lines) == 3
    assert all(line.startswith("[0] tfgradcomp: ") for line in lines)
    assert "float32" in lines[-1]
