"""BackupAndRestore and reshard, on real workers that stop or fail."""

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

CASES = Path(cases.__file__)


pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def straight(pools, tmp_path_factory):
    """The answers of workers that were never interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    return pools(2).run(cases.train, folder, "uninterrupted")[0]


@pytest.fixture(scope="module")
def interrupted(pools, tmp_path_factory):
    """A backup of which only worker 0 has the third epoch."""
    folder = tmp_path_factory.mktemp("interrupted")
    answers, _ = pools(2).run(cases.train, folder, "interrupt")
    for answer in answers:
        assert answer["epochs"] == "interrupted"
        assert answer["left"] == ["epoch-000002", "epoch-000003"]
    shutil.rmtree(folder / "backup" / "worker-1" / "epoch-000003")
    return folder


@pytest.fixture
def again(interrupted, tmp_path):
    """A copy of it that a test may go on from."""
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


@pytest.mark.slow  # Within an epoch, and in the same processes, a quick test resumes.
def test_a_resumed_run_ends_in_the_same_bits(again, pools, straight):
    # Both have the second epoch whole, only one of them the third.
    check_same(pools(2).run(cases.train, again, "resume")[0], straight, 2)


def test_save_freq_resumes_within_an_epoch_in_the_same_bits(pools, straight, tmp_path):
    answers, _ = pools(2).run(cases.train, tmp_path, "interrupt in an epoch", 3)
    for answer in answers:
        # Batches 3, 6 and 9 of epochs of four.
        assert answer["left"] == ["epoch-000001-batch-000002", LAST]
    # Going back one leads to another epoch, whose first batches are skipped.
    shutil.rmtree(tmp_path / "backup" / "worker-1" / LAST)
    check_same(pools(2).run(cases.train, tmp_path, "resume", 3)[0], straight, 1)


@pytest.mark.slow  # Three trainings.
def test_local_steps_resume_between_two_exchanges_in_the_same_bits(pools, tmp_path):
    def run(folder, mode):
        answers, _ = pools(2).run(
            cases.train, tmp_path / folder, mode, 3, True, None, 3
        )
        return answers

    straight = run("straight", "uninterrupted")
    assert straight[0]["digest"] == straight[1]["digest"]
    run("backup", "interrupt in an epoch")
    # Two steps after an exchange.
    shutil.rmtree(tmp_path / "backup" / "backup" / "worker-1" / LAST)
    check_same(run("backup", "resume"), straight, 1)


LAST = "epoch-000002-batch-000001"


@pytest.mark.parametrize(
    ("mode", "newest", "first_epoch"),
    [
        ("told in a step", "epoch-000002-batch-000003", 2),
        pytest.param("told at an end", "epoch-000002", 2, marks=pytest.mark.slow),
        pytest.param(
            *("told in validation", "epoch-000002", 2), marks=pytest.mark.slow
        ),
    ],
)
def test_sigterm_to_one_worker_makes_all_save_and_end(
    mode, newest, first_epoch, pools, straight, tmp_path
):
    validate = mode == "told in validation"
    answers, output = pools(2).run(cases.train, tmp_path, mode, "epoch", validate)
    for answer in answers:
        assert answer["epochs"] == f"exit code {PREEMPTED}"
        assert answer["left"][-1] == newest
    rank = 0 if mode == "told in validation" else 1
    assert f"SIGTERM has come to workers [{rank}]: all end with code 79" in output
    resumed, _ = pools(2).run(cases.train, tmp_path, "resume", "epoch", validate)
    check_same(resumed, straight, first_epoch)


def test_a_full_disk_of_one_worker_is_a_warning_on_all(pools, straight, tmp_path):
    arguments = cases.train, tmp_path, "resume", "epoch", False
    answers, output = pools(2).run(*arguments, "full")
    for rank, (mine, theirs) in enumerate(zip(answers, straight, strict=True)):
        assert mine["digest"] == theirs["digest"]
        # Nothing of the third epoch is left on anyone.
        assert mine["left"] == ["epoch-000004", "epoch-000005"]
        assert (
            f"[{rank}] tfgradcomp: The backup of epoch 3 is not written, because of "
            "worker 1: OSError: [Errno 28] No space left on device. Training goes on; "
            "the newest backup is that of epoch 2." in output
        )


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(
            *("bug", "worker 1: TypeError: no such layer"), marks=pytest.mark.slow
        ),
        ("metadata", "cannot be read on every worker. .*worker 1: KeyError: 'rank'"),
        ("all weights", "can be restored on every worker. .*worker 1: .*Errno 5"),
    ],
)
def test_an_error_of_one_worker_is_raised_by_all(fault, expected, pools, again):
    answers, _ = pools(2).run(cases.train, again, "resume", "epoch", False, fault)
    for answer in answers:
        assert re.search(expected, answer["error"])


@pytest.mark.slow
def test_what_one_worker_cannot_read_makes_all_go_back(pools, straight, tmp_path):
    pools(2).run(cases.train, tmp_path, "interrupt")
    arguments = cases.train, tmp_path, "resume", "epoch", False, "weights"
    answers, output = pools(2).run(*arguments)
    for rank, (mine, theirs) in enumerate(zip(answers, straight, strict=True)):
        assert mine["epochs"] == [2, 3, 4]
        assert mine["digest"] == theirs["digest"]
        assert (
            f"[{rank}] tfgradcomp: The backup of epoch 3 cannot be restored, because "
            "of worker 1: OSError: [Errno 5] Input/output error." in output
        )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["told in a step", "killed in a step"])
def test_the_launcher_starts_workers_again_that_were_told_to_end(
    mode, straight, tmp_path
):
    # In processes of their own, as after a crash.
    resumed, output = run_workers(
        CASES, 2, tmp_path, mode, "3", options=("--max-restarts", "1")
    )
    check_same(resumed, straight, 2 if mode == "told in a step" else 1)
    assert "restart 1 of 1" in output


@pytest.mark.slow  # Three workers; the folders below are refused in the same place.
def test_another_number_of_workers_is_refused_by_all(again, pools):
    answers, _ = pools(3).run(cases.train, again, "resume")
    for answer in answers:
        assert "is of 2 workers, this training has 3" in answer["error"]
        assert "tfgradcomp.reshard" in answer["error"]


def test_a_missing_folder_is_refused_by_all(again, pools):
    shutil.rmtree(again / "backup" / "worker-1")
    answers, _ = pools(2).run(cases.train, again, "resume")
    for answer in answers:
        assert "No backup is whole on every worker" in answer["error"]
        assert "{0: ['epoch 2', 'epoch 3'], 1: []}" in answer["error"]


def reshard(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tfgradcomp.reshard", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def read(directory, rank, name):
    folder = backups.worker_folder(directory, rank)
    point = backups.points_in(folder)[-1]
    with h5py.File(backups.point_folder(folder, point) / backups.WEIGHTS) as file:
        return file[name][...].astype(np.float64)


RESIDUAL = "optimizer/vars/compressed.worker.residual"
MOMENTUM = "optimizer/vars/compressed.worker.momentum"
SERVER = "optimizer/vars/compressed.server.residual"
KERNEL = "layers/dense/vars/0"


def for_three_workers(again):
    old, new = again / "backup", again / "three"
    # Both workers' last common epoch, which is what reshard takes.
    shutil.rmtree(old / "worker-0" / "epoch-000003")
    done = reshard(old, "--workers", 3, "--out", new)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{new}: epoch 2 for 3 workers\n"
    return old, new


def test_reshard_conserves_what_is_owed(again):
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


@pytest.mark.slow  # `test_buckets` goes on with what is resharded, in one process.
def test_a_resharded_backup_goes_on(again, pools):
    _, new = for_three_workers(again)
    moved = again / "go-on"
    moved.mkdir()
    new.rename(moved / "backup")
    answers, output = pools(3).run(cases.train, moved, "resume")
    assert [answer["epochs"] for answer in answers] == [[2, 3, 4]] * 3
    assert len({answer["digest"] for answer in answers}) == 1
    assert "residuals and momenta are those" not in output
