"""Folders of epochs are complete or ignored, and old ones are removed."""

import shutil

import pytest

from tfgradcomp.checkpoint import backups
from tfgradcomp.checkpoint.backups import Origin, Point


def write_whole(path):
    (path / "file").write_text("whole")


def test_unfinished_epoch_does_not_count(tmp_path):
    folder = backups.worker_folder(tmp_path, 0)

    def fail(unfinished):
        (unfinished / "file").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        backups.write(folder, Point(1), Origin(0, 1), fail)
    assert backups.points_in(folder) == []
    backups.write(folder, Point(1), Origin(0, 1), write_whole)
    assert backups.points_in(folder) == [Point(1)]
    assert (backups.point_folder(folder, Point(1)) / "file").read_text() == "whole"


@pytest.mark.parametrize("name", ["file", "metadata.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_an_epoch_that_has_lost_a_part_does_not_count(tmp_path, name, damage):
    folder = backups.worker_folder(tmp_path, 0)
    for epoch in (1, 2):
        backups.write(folder, Point(epoch), Origin(0, 1), write_whole)
    path = backups.point_folder(folder, Point(2)) / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    assert backups.points_in(folder) == [Point(1)]
    # The last two complete points stay; damaged points go when they are old.
    backups.write(folder, Point(3), Origin(0, 1), write_whole)
    backups.drop_old(folder)
    assert backups.points_in(folder) == [Point(1), Point(3)]
    for epoch in (4, 5):
        backups.write(folder, Point(epoch), Origin(0, 1), write_whole)
        backups.drop_old(folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["epoch-000004", "epoch-000005"]


def test_newest_points_are_kept_with_their_origin(tmp_path):
    folder = backups.worker_folder(tmp_path, 2)
    points = [Point(1), Point(1, 200), Point(2), Point(2, 30)]
    for point in points:
        backups.write(folder, point, Origin(2, 3), write_whole)
    assert backups.points_in(folder) == points
    backups.drop_old(folder)
    assert backups.points_in(folder) == points[2:]
    assert backups.read_origin(folder, Point(2, 30)) == (2, 3)


def test_a_disk_without_room_raises_before_anything_is_written(tmp_path, monkeypatch):
    folder = backups.worker_folder(tmp_path, 0)
    backups.write(folder, Point(1), Origin(0, 1), write_whole)
    usage = shutil.disk_usage(tmp_path)._replace(free=4)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="5 bytes are needed, 4 are free"):
        backups.write(folder, Point(2), Origin(0, 1), lambda _: pytest.fail("written"))
    assert [path.name for path in folder.iterdir()] == ["epoch-000001"]
