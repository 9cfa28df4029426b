"""Folders of epochs: complete or absent, and the newest ones only."""

import pytest

from tfgradcomp.checkpoint import backups
from tfgradcomp.checkpoint.backups import Origin


def write_whole(path):
    (path / "file").write_text("whole")


def test_unfinished_epoch_does_not_count(tmp_path):
    folder = backups.worker_folder(tmp_path, 0)

    def fail(unfinished):
        (unfinished / "file").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        backups.write(folder, 1, Origin(0, 1), fail)
    assert backups.epochs_in(folder) == []
    backups.write(folder, 1, Origin(0, 1), write_whole)
    assert backups.epochs_in(folder) == [1]
    assert (backups.epoch_folder(folder, 1) / "file").read_text() == "whole"


@pytest.mark.parametrize("name", ["file", "metadata.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_an_epoch_that_has_lost_a_part_does_not_count(tmp_path, name, damage):
    folder = backups.worker_folder(tmp_path, 0)
    for epoch in (1, 2):
        backups.write(folder, epoch, Origin(0, 1), write_whole)
    path = backups.epoch_folder(folder, 2) / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    assert backups.epochs_in(folder) == [1]
    # The last two that are whole stay; what is damaged goes when it is old.
    backups.write(folder, 3, Origin(0, 1), write_whole)
    assert backups.epochs_in(folder) == [1, 3]
    for epoch in (4, 5):
        backups.write(folder, epoch, Origin(0, 1), write_whole)
    assert sorted(path.name for path in folder.iterdir()) == [
        "epoch-000004",
        "epoch-000005",
    ]


def test_newest_epochs_are_kept_with_their_origin(tmp_path):
    folder = backups.worker_folder(tmp_path, 2)
    for epoch in range(1, 5):
        backups.write(folder, epoch, Origin(2, 3), write_whole)
    assert backups.epochs_in(folder) == [3, 4]
    assert backups.read_origin(folder, 4) == (2, 3)
