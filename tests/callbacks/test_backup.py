"""BackupAndRestore and reshard, on real workers that stop one epoch apart."""

import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.callbacks import backup_cases
from tests.cluster import run_workers
from tfgradcomp.checkpoint import backups

CASES = Path(backup_cases.__file__)


@pytest.fixture(scope="module")
def interrupted(pools, tmp_path_factory):
    """A backup whose workers were stopped, one before and one after its third epoch."""
    folder = tmp_path_factory.mktemp("interrupted")
    answers, _ = pools(2).run(backup_cases.train, folder, "interrupt")
    assert [answer["epochs"] for answer in answers] == ["interrupted"] * 2
    assert answers[0]["left"] == ["epoch-000002", "epoch-000003"]
    assert answers[1]["left"] == ["epoch-000001", "epoch-000002"]
    return folder


@pytest.fixture
def again(interrupted, tmp_path):
    """A copy of it that a test may go on from."""
    shutil.copytree(interrupted / "backup", tmp_path / "backup")
    return tmp_path


def test_a_resumed_run_ends_in_the_same_bits(again, pools):
    straight, _ = pools(2).run(backup_cases.train, again, "uninterrupted")
    # In processes of its own, as after a crash.
    resumed, _ = run_workers(CASES, 2, again, "resume")
    for mine, theirs in zip(resumed, straight, strict=True):
        # Both have the second epoch whole, only one of them the third.
        assert mine["epochs"] == [2, 3, 4]
        assert mine["digest"] == theirs["digest"]
        assert mine["residual"] == theirs["residual"]
        assert mine["left"] == []
    assert resumed[0]["residual"] != resumed[1]["residual"]


def test_another_number_of_workers_is_refused_by_all(again, pools):
    answers, _ = pools(3).run(backup_cases.train, again, "resume")
    for answer in answers:
        assert "is of 2 workers, this training has 3" in answer["error"]
        assert "tfgradcomp.reshard" in answer["error"]


def test_a_missing_folder_is_refused_by_all(again, pools):
    shutil.rmtree(again / "backup" / "worker-1")
    answers, _ = pools(2).run(backup_cases.train, again, "resume")
    for answer in answers:
        assert "No epoch is whole on every worker" in answer["error"]
        assert "{0: [2, 3], 1: []}" in answer["error"]


def reshard(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tfgradcomp.reshard", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def read(directory, rank, name):
    epoch = backups.epochs_in(directory / f"worker-{rank}")[-1]
    with h5py.File(
        directory / f"worker-{rank}" / f"epoch-{epoch:06d}" / "state.weights.h5"
    ) as file:
        return file[name][...].astype(np.float64)


RESIDUAL = "optimizer/vars/compressed.worker.residual"
MOMENTUM = "optimizer/vars/compressed.worker.momentum"
SERVER = "optimizer/vars/compressed.server.residual"
KERNEL = "layers/dense/vars/0"


def test_reshard_conserves_what_is_owed(again, pools):
    old, new = again / "backup", again / "three"
    # Both workers' last common epoch, which is what reshard takes.
    shutil.rmtree(old / "worker-0" / "epoch-000003")
    done = reshard(old, "--workers", 3, "--out", new)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{new}: epoch 2 for 3 workers\n"
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
    moved = again / "go-on"
    moved.mkdir()
    new.rename(moved / "backup")
    answers, output = pools(3).run(backup_cases.train, moved, "resume")
    assert [answer["epochs"] for answer in answers] == [[2, 3, 4]] * 3
    assert len({answer["digest"] for answer in answers}) == 1
    assert "residuals and momenta are those" not in output
