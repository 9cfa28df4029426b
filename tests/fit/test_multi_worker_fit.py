"""`model.fit` on real processes under MultiWorkerMirroredStrategy."""

import functools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.fit import fit_cases, saving_cases
from tests.fit.fit_models import X, Y, assert_close, fit, sequential, two_layers
from tfgradcomp.collectives import Loopback
from tfgradcomp.per_example.second_moments import step_of
from tfgradcomp.transports.all_gather import AllGather

# A loaded machine takes minutes to trace the largest graphs.
pytestmark = pytest.mark.timeout(600)

CLUSTERS = {"two": (2,), "three": (3,), "mirrored": (2, "mirrored")}


def quick(*names, of=tuple(fit_cases.METHODS)):
    """The names of methods; those that are not listed are marked as slow.

    The slow ones send the same fields by the same collectives as a listed method.
    `tests/transports` has the bits of all, exchanged between threads.
    """
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in names else slow) for name in of]


def on(cluster, methods):
    return [pytest.param(cluster, *one.values, marks=one.marks) for one in methods]


# Shared scales; two residuals; tables of levels.
FIXED = ("terngrad", "dist_ef_block_sgdm", "orq")
# Sizes that vary: with moments, with a threshold, with both.
VARYING = ("variance_based", "strom", "hybrid")
# Call sites of other exchanges: at the start, and at the end of epochs.
BESIDES = (
    "carrier",
    "compare/",
    "fingerprint",
    "fit/frozen",
    "gradients/",
    "restore/status",
    "settings",
    "vote on the carrier",
    "watch",
)
# The cases that write into a folder.
FILES = ("checkpoint_callback", "file_of_worker_0", "shared_paths", "state")
TWO_OR_THREE = ["two", pytest.param("three", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def ask(pools, tmp_path_factory):
    """Runs a case on a cluster, only once, for its results: `ask("two", "stock")`."""
    cases = {**vars(fit_cases), **vars(saving_cases)}

    @functools.cache
    def outcome(cluster, case, *arguments):
        if case in FILES:
            arguments = [str(tmp_path_factory.mktemp(f"{cluster}-{case}"))]
        function = cases[f"case_{case}"]
        try:
            return pools(*CLUSTERS[cluster]).run(function, *arguments), None
        except AssertionError as error:
            # Errors are kept too, since a new attempt would start the cluster again.
            return None, error

    def results(*question):
        results, error = outcome(*question)
        if error:
            raise error
        return results

    return results


def answers(ask, cluster, case, *arguments):
    return ask(cluster, case, *arguments).answers


# Methods whose sizes vary are in another test, below.
@pytest.mark.parametrize("method", quick("terngrad"))
def test_two_devices_of_one_process_are_two_workers(ask, method):
    (one,) = answers(ask, "mirrored", "method", method)
    two = answers(ask, "two", "method", method)[0]
    assert one["digest"] == two["digest"]
    assert_same_training(one, one["weights"], two["history"])


@pytest.mark.slow  # Eagerly and with one method of each kind they are compared quickly.
@pytest.mark.parametrize("case", ["steps_per_execution", "keras_rules"])
def test_two_devices_follow_two_workers_in_all_ways(ask, case):
    (mirrored,) = answers(ask, "mirrored", case)
    two = answers(ask, "two", case)[0]
    for name, run in mirrored.items():
        assert run["digest"] == two[name]["digest"], name


@pytest.mark.slow  # The graph's bits are those of two workers, in the tests around.
def test_two_devices_train_eagerly(ask):
    (eagerly,) = answers(ask, "mirrored", "eagerly")
    two = answers(ask, "two", "method", "terngrad")[0]
    assert eagerly["digest"] == two["digest"]


@pytest.mark.slow
def test_one_overflow_skips_and_halves_on_both_devices(ask):
    assert answers(ask, "mirrored", "overflow") == answers(ask, "two", "overflow")[:1]


def test_a_nan_on_one_device_changes_nothing(ask):
    (nonfinite,) = answers(ask, "mirrored", "nonfinite")
    assert nonfinite["unchanged"]
    assert "on worker 1; " in nonfinite["error"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("cluster", "method"),
    on("two", quick(*FIXED, "hybrid")) + on("three", quick()),
)
def test_weights_and_logs_are_the_same_on_all_workers(ask, cluster, method):
    first, *others = answers(ask, cluster, "method", method)
    for other in others:
        assert other["digest"] == first["digest"]
        assert other["history"] == first["history"]
    assert first["iterations"] == 10
    assert first["history"]["loss"][1] < first["history"]["loss"][0]
    logs = {"loss", "mae"}
    if method in fit_cases.VALIDATED:
        logs |= {"val_loss", "val_mae"}
    assert set(first["history"]) == logs


def test_several_steps_per_execution_change_nothing(ask):
    one = answers(ask, "two", "method", "terngrad")
    four = answers(ask, "two", "steps_per_execution")
    assert [run["4"]["digest"] for run in four] == [run["digest"] for run in one]


def test_identity_compressor_is_plain_keras(ask):
    first, second = answers(ask, "two", "stock")
    runs = first["identity"]["weights"], first["plain"]["weights"]
    assert_close(*runs, rtol=2e-5, atol=1e-6)
    assert first["plain"]["digest"] == second["plain"]["digest"]


def one_process(**rule):
    """Weights and history of plain Keras on the global batches."""
    model = sequential(two_layers)
    model.compile(keras.optimizers.SGD(0.05, **rule), "mse", metrics=["mae"])
    history = fit(model)
    return model.get_weights(), history


def assert_same_training(run, weights, history):
    assert_close(run["weights"], weights)
    for name, values in history.items():
        np.testing.assert_allclose(run["history"][name], values, rtol=1e-4)


def test_stock_fit_is_that_of_one_process_on_the_global_batch(ask):
    first, _ = answers(ask, "two", "stock")
    assert_same_training(first["plain"], *one_process())


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", ["49", "13"])
def test_predict_and_evaluate_see_every_row_in_order(ask, size):
    for answer in answers(ask, "two", "predict"):
        got = answer[size]
        assert got["predict"] < 1e-4
        assert got["mae"][0] == pytest.approx(got["mae"][1], rel=1e-4)
        assert got["loss"][0] == pytest.approx(got["loss"][1], rel=1e-4)


def test_a_worker_without_rows_evaluates_and_predicts(ask):
    for answer in answers(ask, "two", "empty_share"):
        for got, want in answer.values():
            np.testing.assert_allclose(got, want, rtol=1e-4)


def test_dict_inputs(ask):
    first, second = answers(ask, "two", "dict_inputs")
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    ],
    ids=["accumulation", "ema"],
)
def test_rules_of_the_inner_optimizer_are_those_of_one_process(ask, rule, request):
    name = request.node.callspec.id
    first, second = (answer[name] for answer in answers(ask, "two", "keras_rules"))
    assert first["digest"] == second["digest"]
    assert_same_training(first, *one_process(**rule))


def test_each_worker_clips_its_own_gradient(ask):
    first, second = (
        answer["clipnorm"] for answer in answers(ask, "two", "keras_rules")
    )
    assert first["digest"] == second["digest"]
    unclipped = answers(ask, "two", "stock")[0]["identity"]
    assert first["digest"] != unclipped["digest"]
    # Ten steps of at most 0.05 * 0.1 for each tensor.
    start = sequential(two_layers).get_weights()
    for got, want in zip(first["weights"], start, strict=True):
        assert 0 < np.linalg.norm(np.array(got) - want) < 10 * 0.05 * 0.1 * 1.001


@pytest.mark.parametrize("cluster", TWO_OR_THREE)
def test_one_overflow_skips_and_halves_everywhere(ask, cluster):
    results = answers(ask, cluster, "overflow")
    assert all(result == results[0] for result in results)
    assert results[0]["finite"]
    # Five batches, one of them skipped once or more until the scale fits.
    assert results[0]["iterations"] < 5
    assert results[0]["scale"] == 2.0**15 * 0.5 ** (5 - results[0]["iterations"])


@pytest.mark.parametrize("cluster", TWO_OR_THREE)
def test_a_nan_on_one_worker_changes_nothing_anywhere(ask, cluster):
    results = answers(ask, cluster, "nonfinite")
    skipping = answers(ask, cluster, "skipping")
    # Twelve rows a batch: row 8 is in the share of the second worker, or the third.
    culprit = 8 // (12 // len(results))
    for result in results:
        assert "first/kernel" in result["error"]
        assert f"on worker {culprit}; " in result["error"]
        assert "nonfinite=" in result["error"]
        assert result["unchanged"]
    for result in skipping:
        assert result["skip"]["skipped"] == 1
        assert result["skip"]["iterations"] == 4
        # Four steps of half a window each; the window with the NaN is dropped whole.
        assert result["window"]["skipped"] == 1
        assert result["window"]["iterations"] == 1
        assert result["skip"]["digest"] == skipping[0]["skip"]["digest"]


@pytest.mark.parametrize("method", quick(*FIXED, "hybrid"))
def test_traffic_is_what_the_collectives_are_given(ask, method):
    answer, second = answers(ask, "two", "method", method)
    traffic = answer["traffic"]
    words = 0.0
    for site, size, dtype in answer["seen"]:
        if site.startswith(BESIDES):
            continue
        bytes_each = {"int32": 4, "float32": 4, "bfloat16": 2}[dtype]
        # Two workers: a gather sends the vector once, a ring's reduce sends it once.
        words += -(-size * bytes_each // 4)
    if method in VARYING:
        # Ten steps, each with a size of its own that is the same on both workers.
        sizes = answer["varying"]
        assert len(sizes) == 10 and sizes == second["varying"]
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


@pytest.mark.slow  # `tests/checkpoint/test_restore.py` resumes on workers, too.
@pytest.mark.parametrize("cluster", ["two", "mirrored"])
def test_resumed_runs_are_bit_identical(ask, cluster):
    for state in answers(ask, cluster, "state"):
        for way in ("keras", "weights", "checkpoint"):
            assert state[way] == state["uninterrupted"], way


def test_a_file_of_one_worker_loads_everywhere_with_one_notice(ask):
    (first, second), output = ask("two", "file_of_worker_0")
    assert first["loaded"] == second["loaded"]
    assert first["loaded"] == first["at_save"]
    name = "compressed.worker.residual"
    assert first["at_save"][1][name] != second["at_save"][1][name]
    assert output.count("residuals and momenta are those of worker 0 of 2") == 1


def test_model_checkpoint(ask):
    assert all(a["equal"] for a in answers(ask, "two", "checkpoint_callback"))


@pytest.mark.slow
def test_workers_that_share_paths_do_not_spoil_files(ask):
    for shared in answers(ask, "two", "shared_paths"):
        assert shared["resumed"] == shared["straight"]
        assert shared["checkpoint"]
        assert shared["files"] == ["1.weights.h5", "2.weights.h5", "whole.keras"]


def test_building_a_model_opens_no_iterator(ask):
    for cluster in ("mirrored", "two"):
        for answer in answers(ask, cluster, "no_iterator_to_build"):
            # Two epochs; an iterator opened only to build would make it three.
            assert answer["passes"] == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("models", "The models of workers [1] differ"),
        ("weights", "The weights or the step counts of workers [1]"),
    ],
)
def test_models_that_differ_are_refused_by_all(ask, what, message):
    errors = answers(ask, "two", "different", what)
    names = ("second", "other") if what == "models" else ("", "")
    for error, name in zip(errors, names, strict=True):
        assert message in error
        assert not name or f"{name}/kernel" in error


def test_methods_give_different_weights(ask):
    digests = [answers(ask, "two", "method", name)[0]["digest"] for name in FIXED]
    assert len({*digests}) == len(FIXED)


# With a first round and sums of codes. A state that the servers hold in shards is in
# `tests/engine/test_auto_on_workers.py`.
@pytest.mark.slow  # Quickly: inside of conditionals, and in `test_auto_on_workers`.
@pytest.mark.parametrize("method", fit_cases.TRANSPORTS)
def test_all_transports_and_buckets_give_the_same_weights(ask, method):
    digests, *others = answers(ask, "two", "transports", method)
    assert digests.keys() == {"one bucket", *fit_cases.TRANSPORTS[method]}
    assert len(digests) >= 3
    for other in others:
        assert other == digests
    assert len({*digests.values()}) == 1, digests


@pytest.mark.slow
def test_transports_work_inside_of_conditionals(ask):
    first, second = answers(ask, "two", "transports_under_conditions")
    assert first["all_gather"] == first["sharded"]
    assert second == first


@pytest.mark.slow
@pytest.mark.parametrize("method", quick("hybrid", of=["variance_based", "hybrid"]))
def test_sizes_that_vary_within_nested_graphs(ask, method):
    """In loops and conditionals, with a loss scale, in many buckets: equal weights."""
    first, second = answers(ask, "two", "varying", method)
    (mirrored,) = answers(ask, "mirrored", "varying", method)
    assert second["digest"] == first["digest"]
    assert mirrored["digest"] == first["digest"]
    assert first["iterations"] == 10
    loss = first["history"]["loss"]
    assert loss[-1] < loss[0]


@pytest.mark.parametrize(
    ("cluster", "method"),
    on("two", quick("hybrid", of=VARYING)) + on("three", quick(of=VARYING)),
)
def test_fit_does_what_workers_in_one_process_do(ask, cluster, method):
    """Gradients and moments of each worker's share, exchanged over a `Loopback`."""
    trained, *others = answers(ask, cluster, "method", method)
    count = 1 + len(others)
    arguments = {
        "variance_based": (tfgradcomp.VarianceBased, 0.01, 0.9, {}),
        "strom": (tfgradcomp.Strom, 0.05, 0.0, {"threshold": 0.02}),
        "hybrid": (tfgradcomp.Hybrid, 0.05, 0.0, {"threshold": 0.01, "alpha": 1.3}),
    }
    kind, rate, momentum, own = arguments[method]
    model = sequential(two_layers)
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
                done = step_of(model, tf.constant(X[rows]), tf.constant(Y[rows]))
            given = {}
            if optimizer.needs_second_moments:
                given["second_moments"] = [m / count**2 for m in done.moments]
            optimizer.apply([g / count for g in done.gradients], variables, **given)
        return [np.array(v) for v in variables]

    lock = threading.Lock()
    for weights in Loopback(count, timeout=60).run(worker):
        assert_close(trained["weights"], weights, rtol=0)


@pytest.mark.slow  # `tests/optimizers` has every choice, and the fallback.
def test_all_workers_take_the_transport_that_one_chose(ask):
    (first, second), output = ask("two", "auto")
    assert first == second
    # The costs of words change the transport, but no bit of the weights.
    kept = [first[name] for name in ("measured", "slow", "idle")]
    assert {one["compressor"] for one in kept} == {"_MomentumSign"}
    assert len({one["digest"] for one in kept}) == 1
    # Only with a fallback, a quicker exchange without compression is used.
    fallback = first["idle, fallback"]
    assert (fallback["compressor"], fallback["route"]) == ("Momentum", "AllReduceRoute")
    assert fallback["digest"] != kept[0]["digest"]
    lines = [line for line in output.splitlines() if "transport='auto'" in line]
    assert len(lines) == 4
    assert all(line.startswith("[0] tfgradcomp: ") for line in lines), output
    assert "[0] tfgradcomp: float32 would be quicker" in output
