"""Training with parameter servers in separate processes."""

from pathlib import Path

import numpy as np
import pytest

from tests.cluster import run_workers
from tests.parameter_server import train_worker

SCRIPT = Path(train_worker.__file__)
# A state of workers and servers; a first round.
METHODS = ("DistEFBlockSGDM", "TernGrad")
# Second moments, residuals and messages of variable length; two batches per update.
SPARSE = "VarianceBased+2"
STEPS, PUSHES = 10, 40

# `test_transport`, `test_push_log` and `test_push_rounds` see in one process what
# servers do; these start clusters, for half a minute each.
pytestmark = [pytest.mark.timeout(560), pytest.mark.slow]


@pytest.fixture(scope="module")
def with_servers(tmp_path_factory):
    """Answers of two workers and two servers, by case; groups of cases run once."""
    one = ["resuming", "errors"]
    answers = {}

    def answer_of(case):
        if case not in answers:
            cases = [SPARSE, f"{SPARSE}/async", "resuming what waits"]
            if case not in cases:
                others = [*METHODS, f"{METHODS[0]}/async", "skipping", "skipping/async"]
                cases = one if case in one else others
            folder = tmp_path_factory.mktemp("servers")
            (found,), _ = run_workers(SCRIPT, 2, folder, *cases, servers=2)
            answers.update(found)
        return answers[case]

    return answer_of


@pytest.mark.parametrize("method", [*METHODS, SPARSE])
def test_rounds_give_the_bits_of_collectives(with_servers, pools, method):
    found = with_servers(method)
    alike = pools(2).run(train_worker.with_collectives, [method]).answers
    expected = alike[0][method]
    assert len({answer[method]["weights"] for answer in alike}) == 1
    assert found["workers"] == 2 * [expected["weights"]]
    assert found["chief"] == expected["weights"]
    assert found["iterations"] == STEPS
    assert found["elements_sent"] == expected["elements_sent"] > 0
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(
            found["history"][name], expected["history"][name], rtol=1e-6
        )
    assert len(found["history"]["val_loss"]) == 2


def test_bits_do_not_depend_on_the_number_of_servers(pools, tmp_path):
    name = "DistEFBlockSGDM"
    (found,), _ = run_workers(SCRIPT, 3, tmp_path, name, servers=1)
    expected = pools(3).run(train_worker.with_collectives, [name]).answers[0]
    assert found[name]["workers"] == 3 * [expected[name]["weights"]]


@pytest.mark.parametrize(
    ("method", "pushes"), [(METHODS[0], PUSHES), (SPARSE, PUSHES // 2)]
)
def test_without_a_barrier_all_workers_apply_all_pushes(with_servers, method, pushes):
    found = with_servers(f"{method}/async")
    # Both workers have applied the whole log.
    assert len({*found["workers"], found["chief"]}) == 1
    assert found["iterations"] == pushes
    assert np.isfinite(found["history"]["loss"]).all()
    # With two workers, about one push of the other comes before each push.
    assert all(0 < stale < 4 for stale in found["history"]["staleness"])


@pytest.mark.parametrize(("mode", "steps"), [("", STEPS), ("/async", PUSHES)])
def test_nonfinite_gradients_are_skipped_on_all_workers(with_servers, mode, steps):
    found = with_servers(f"skipping{mode}")
    assert len({*found["workers"], found["chief"]}) == 1
    assert found["skipped"] > 0
    if not mode:
        assert found["skipped"] == 2  # The second of five batches, over and over.
    assert found["iterations"] + found["skipped"] == steps
    assert np.isfinite(found["history"]["val_loss"]).all()


@pytest.mark.parametrize("case", ["resuming", "resuming what waits"])
def test_saved_state_has_the_residuals_of_all_workers(with_servers, case):
    digests = with_servers(case)
    assert len(digests) == 3 and len({*digests}) == 1


def test_untrainable_models_and_datasets_raise(with_servers):
    ended, same, scaled = with_servers("errors")
    assert "A worker's dataset has ended. Append .repeat()" in ended
    assert "make_model must return a new model" in same
    assert "Received: dtype_policy='mixed_float16'" in scaled
