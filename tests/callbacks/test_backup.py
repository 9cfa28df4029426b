"""BackupAndRestore and reshard, on real workers that stop or fail."""

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.callbacks import backup_cases as cases
from tests.cluster import run_workers
from tfgradcomp.callbacks.backup import PREEMPTED
from tfgradcomp.checkpoint import backups

pytestmark = pytest.mark.timeout(600)
LAST = "epoch-000002-batch-000001"


@pytest.fixture(scope="module")
def train(pools):
    """Runs `cases.train` on workers; returns their answers and their output."""

    def run(*args, workers=2, **options):
        return pools(workers).run(functools.partial(cases.train, *args, **options))

    return run


@pytest.fixture(scope="module")
def straight(train, tmp_path_factory):
    """The answers of workers that were never interrupted."""
    return train(tmp_path_factory.mktemp("straight"), "uninterrupted").answers


@pytest.fixture(scope="module")
def interrupted(train, tmp_path_factory):
    """A backup whose third epoch is on worker 0 alone."""
    folder = tmp_path_factory.mktemp("interrupted")
    for answer in train(folder, "interrupt").answers:
        assert answer["epochs"] == "interrupted"
        assert answer["left"] == ["epoch-000002", "epoch-000003"]
    shutil.rmtree(folder / "backup" / "worker-1" / "epoch-000003")
    return folder


@pytest.fixture
def again(interrupted, tmp_path):
    """A copy of the interrupted backup, from which a test may resume."""
    shutil.copytree(interrupted / "backup", tmp_path / "backup")
    return tmp_path


def check_same(resumed, straight, first_epoch):
    for mine, theirs in zip(resumed, straight, strict=True):
        assert "error" not in mine, mine["error"]
        assert mine["epochs"] == [*range(first_epoch, cases.EPOCHS)]
        for name in ("digest", "residual"):
            assert mine[name] == theirs[name], name
        for name in ("loss", "mae"):
            assert mine[name] == theirs[name][first_epoch:], name
        assert mine["left"] == []
    assert resumed[0]["residual"] != resumed[1]["residual"]


@pytest.mark.slow  # A quick test resumes within an epoch, in the same processes.
def test_a_resumed_run_ends_in_the_same_bits(again, train, straight):
    # Both workers have the second epoch whole, one of them the third.
    check_same(train(again, "resume").answers, straight, 2)


@pytest.mark.slow
def test_save_freq_resumes_within_an_epoch_in_the_same_bits(train, straight, tmp_path):
    for answer in train(tmp_path, "interrupt in an epoch", save_freq=3).answers:
        # Batches 3, 6 and 9 of epochs of four.
        assert answer["left"] == ["epoch-000001-batch-000002", LAST]
    # The backup before is of another epoch, whose first batches are skipped.
    shutil.rmtree(tmp_path / "backup" / "worker-1" / LAST)
    check_same(train(tmp_path, "resume", save_freq=3).answers, straight, 1)


@pytest.mark.slow  # Three trainings.
@pytest.mark.parametrize(("every", "delay"), [(3, 0), (2, 1)])
def test_local_steps_resume_between_two_exchanges_in_the_same_bits(
    train, tmp_path, every, delay
):
    def run(folder, mode):
        options = {"save_freq": 3, "validate": True, "every": every, "delay": delay}
        return train(tmp_path / folder, mode, **options).answers

    straight = run("straight", "uninterrupted")
    assert straight[0]["digest"] == straight[1]["digest"]
    run("backup", "interrupt in an epoch")
    # Two steps after an exchange; with a delay, its snapshots are waiting.
    shutil.rmtree(tmp_path / "backup" / "backup" / "worker-1" / LAST)
    check_same(run("backup", "resume"), straight, 1)


@pytest.mark.parametrize(
    ("mode", "newest"),
    [
        ("SIGTERM in a step", "epoch-000002-batch-000003"),
        pytest.param("SIGTERM at an end", "epoch-000002", marks=pytest.mark.slow),
        pytest.param("SIGTERM in validation", "epoch-000002", marks=pytest.mark.slow),
    ],
)
def test_sigterm_to_one_worker_makes_all_save_and_end(
    mode, newest, train, straight, tmp_path
):
    validate = mode == "SIGTERM in validation"
    answers, output = train(tmp_path, mode, validate=validate)
    for answer in answers:
        assert answer["epochs"] == f"exit code {PREEMPTED}"
        assert answer["left"][-1] == newest
    rank = 0 if validate else 1
    assert f"SIGTERM has come to workers [{rank}]: all end with code 79" in output
    check_same(train(tmp_path, "resume", validate=validate).answers, straight, 2)


def test_a_full_disk_of_one_worker_is_a_warning_on_all(train, straight, tmp_path):
    answers, output = train(tmp_path, "resume", fault="full")
    for rank, (mine, theirs) in enumerate(zip(answers, straight, strict=True)):
        assert mine["digest"] == theirs["digest"]
        # No worker keeps the third epoch.
        assert mine["left"] == ["epoch-000004", "epoch-000005"]
        assert (
            f"[{rank}] tfgradcomp: The backup of epoch 3 is not written, because of "
            "worker 1: OSError: [Errno 28] No space left on device. Training goes on; "
            "the newest backup is that of epoch 2." in output
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param("bug", "1: TypeError: no such layer", marks=pytest.mark.slow),
        ("metadata", "cannot be read on every worker. .*worker 1: KeyError: 'rank'"),
        ("all weights", "can be restored on every worker. .*worker 1: .*Errno 5"),
    ],
)
def test_an_error_of_one_worker_is_raised_by_all(fault, expected, train, again):
    for answer in train(again, "resume", fault=fault).answers:
        assert re.search(expected, answer["error"])


@pytest.mark.slow
def test_a_file_that_one_worker_cannot_read_makes_all_go_back(
    train, straight, tmp_path
):
    train(tmp_path, "interrupt")
    answers, output = train(tmp_path, "resume", fault="weights")
    for rank, (mine, theirs) in enumerate(zip(answers, straight, strict=True)):
        assert mine["epochs"] == [2, 3, 4]
        assert mine["digest"] == theirs["digest"]
        assert (
            f"[{rank}] tfgradcomp: The backup of epoch 3 cannot be restored, because "
            "of worker 1: OSError: [Errno 5] Input/output error." in output
        )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["SIGTERM in a step", "killed in a step"])
def test_the_launcher_restarts_preempted_workers(mode, straight, tmp_path):
    # In new processes, as after a crash.
    script, options = Path(cases.__file__), ("--max-restarts", "1")
    resumed, output = run_workers(script, 2, tmp_path, mode, "3", options=options)
    check_same(resumed, straight, 2 if mode == "SIGTERM in a step" else 1)
    assert "restart 1 of 1" in output


@pytest.mark.slow  # Three workers; the next test raises in the same place.
def test_another_number_of_workers_raises_on_all(again, train):
    for answer in train(again, "resume", workers=3).answers:
        assert "is of 2 workers, this training has 3" in answer["error"]
        assert "tfgradcomp.reshard" in answer["error"]


def test_a_missing_folder_raises_on_all(again, train):
    shutil.rmtree(again / "backup" / "worker-1")
    for answer in train(again, "resume").answers:
        assert "No backup is whole on every worker" in answer["error"]
        assert "{0: ['epoch 2', 'epoch 3'], 1: []}" in answer["error"]


def read(directory, rank, name):
    folder = backups.worker_folder(directory, rank)
    *_, point = backups.points_in(folder)
    with h5py.File(backups.weights_file(folder, point)) as file:
        return file[name][...].astype(np.float64)


RESIDUAL = "optimizer/vars/compressed.worker.residual"
MOMENTUM = "optimizer/vars/compressed.worker.momentum"
SERVER = "optimizer/vars/compressed.server.residual"
KERNEL = "layers/dense/vars/0"


def for_three_workers(again):
    old, new = again / "backup", again / "three"
    # `reshard` takes the last epoch that both workers have.
    shutil.rmtree(old / "worker-0" / "epoch-000003")
    command = [sys.executable, "-m", "tfgradcomp.reshard", old, "--workers", "3"]
    command += ["--out", new]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{new}: epoch 2 for 3 workers\n"
    return old, new


def test_reshard_conserves_the_mean_residual(again):
    old, new = for_three_workers(again)
    for name in (RESIDUAL, MOMENTUM):
        before = [read(old, rank, name) for rank in range(2)]
        after = [read(new, rank, name) for rank in range(3)]
        assert not np.array_equal(*before)
        np.testing.assert_allclose(np.mean(after, 0), np.mean(before, 0), rtol=1e-6)
    parts = [read(old, rank, SERVER) for rank in range(2)]
    assert all(part.any() for part in parts)
    assert not (parts[0] * parts[1]).any()
    for rank in range(3):
        np.testing.assert_array_equal(read(new, rank, SERVER), sum(parts))
        np.testing.assert_array_equal(read(new, rank, KERNEL), read(old, 0, KERNEL))


@pytest.mark.slow  # `test_buckets` resumes from a resharded state, in one process.
def test_a_resharded_backup_resumes(again, train):
    _, new = for_three_workers(again)
    moved = again / "go-on"
    moved.mkdir()
    new.rename(moved / "backup")
    answers, output = train(moved, "resume", workers=3)
    assert [answer["epochs"] for answer in answers] == [[2, 3, 4]] * 3
    assert len({answer["digest"] for answer in answers}) == 1
    assert "residuals and momenta are those" not in output
