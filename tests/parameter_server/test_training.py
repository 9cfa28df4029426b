"""Training with parameter servers, in processes of their own."""

from pathlib import Path

import numpy as np
import pytest

from tests.cluster import run_workers

HERE = Path(__file__).parent
METHODS = ("TernGrad", "Signum", "DistEF", "ORQ")
FREE = ("TernGrad", "DistEF")
STEPS, PUSHES = 10, 40

pytestmark = pytest.mark.timeout(560)


def train(folder, workers, servers, *methods):
    script = HERE / "train_worker.py"
    answers, output = run_workers(script, workers, folder, *methods, servers=servers)
    return answers, output


@pytest.fixture(scope="module")
def with_servers(tmp_path_factory):
    """Two workers and two servers."""
    methods = [*METHODS, "skipping", "resuming", "errors"]
    methods += [f"{name} async" for name in (*FREE, "skipping")]
    folder = tmp_path_factory.mktemp("servers")
    (answers,), output = train(folder, 2, 2, *methods)
    return answers, output


@pytest.fixture(scope="module")
def with_collectives(tmp_path_factory):
    """The same under MultiWorkerMirroredStrategy, transport="all_gather"."""
    answers, _ = train(tmp_path_factory.mktemp("collectives"), 2, 0, *METHODS)
    return answers


@pytest.mark.parametrize("method", METHODS)
def test_rounds_give_the_bits_of_collectives(with_servers, with_collectives, method):
    found, expected = with_servers[0][method], with_collectives[0][method]
    assert len({answer[method]["weights"] for answer in with_collectives}) == 1
    assert found["workers"] == 2 * [expected["weights"]]
    assert found["chief"] == expected["weights"]
    assert found["iterations"] == STEPS
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(
            found["history"][name], expected["history"][name], rtol=1e-6
        )
    assert len(found["history"]["val_loss"]) == 2


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 2), (4, 1)])
def test_bits_do_not_depend_on_the_number_of_servers(tmp_path, workers, servers):
    names = ["DistEF", "TernGrad async"]
    (found,), _ = train(tmp_path / "servers", workers, servers, *names)
    expected, *_ = train(tmp_path / "collectives", workers, 0, "DistEF")[0]
    assert found["DistEF"]["workers"] == workers * [expected["DistEF"]["weights"]]
    free = found["TernGrad async"]
    assert len({*free["workers"], free["chief"]}) == 1
    assert free["iterations"] == PUSHES


@pytest.mark.parametrize("method", FREE)
def test_without_a_barrier_all_workers_apply_all_pushes(with_servers, method):
    found = with_servers[0][f"{method} async"]
    # Both have applied the same log, and all of it.
    assert len({*found["workers"], found["chief"]}) == 1
    assert found["iterations"] == PUSHES
    assert np.isfinite(found["history"]["loss"]).all()
    # Two workers at once: about one push of the other comes before each.
    assert all(0 < stale < 4 for stale in found["history"]["staleness"])


@pytest.mark.parametrize(("mode", "steps"), [("", STEPS), (" async", PUSHES)])
def test_nonfinite_gradients_are_skipped_on_all_workers(with_servers, mode, steps):
    found = with_servers[0][f"skipping{mode}"]
    assert len({*found["workers"], found["chief"]}) == 1
    assert found["skipped"] > 0
    if not mode:
        assert found["skipped"] == 2  # The second of five batches, over and over.
    assert found["iterations"] + found["skipped"] == steps
    assert np.isfinite(found["history"]["val_loss"]).all()


def test_saved_state_has_the_residuals_of_all_workers(with_servers):
    digests = with_servers[0]["resuming"]
    assert len(digests) == 3 and len({*digests}) == 1


def test_untrainable_models_and_datasets_raise(with_servers):
    ended, same, scaled = with_servers[0]["errors"]
    assert "A worker's dataset has ended. Append .repeat()" in ended
    assert "make_model must return a new model" in same
    assert "instead of 'mixed_float16'" in scaled
