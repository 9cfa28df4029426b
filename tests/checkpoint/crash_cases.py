"""Writes a backup again and again, each time with a fault at the next system call.

A separate script, because the faults come from a preloaded library. Prints a line of
JSON for each call that failed: the fault, the call's number, the end of the process,
and the epochs that can be read afterwards.
"""

import ctypes
import json
import os
import shutil
import sys
from pathlib import Path

import h5py
import numpy as np

from tfgradcomp.checkpoint import backups
from tfgradcomp.checkpoint.backups import Origin, Point

FAULTS = {"killed": 1, "full": 2, "broken": 3, "torn": 4}
CALLS = 60


def write(folder, epoch):
    def save(unfinished):
        with h5py.File(unfinished / backups.WEIGHTS, "w") as file:
            file["first"] = np.full(5000, epoch, np.float32)
            file.create_group("group")["second"] = np.full(30000, epoch, np.float32)
        (unfinished / backups.DIGEST).write_text(str(epoch))
        np.savez(unfinished / "random.npz", seeds=np.full(10, epoch))

    backups.write(folder, Point(epoch), Origin(0, 1), save)
    backups.drop_old(folder)


def readable(folder):
    """Returns the complete epochs; raises if an epoch has wrong numbers."""
    found = []
    for point in backups.points_in(folder):
        source = backups.point_folder(folder, point)
        with h5py.File(backups.weights_file(folder, point)) as file:
            values = [file["first"][()], file["group/second"][()]]
        with np.load(source / "random.npz") as saved:
            values.append(saved["seeds"])
        if not all((value == point.epoch).all() for value in values):
            raise ValueError(f"wrong numbers in {source}")
        found.append(point.epoch)
    return found


def attempt(library, folder, kind, call):
    """Writes epoch 3 in a new process; returns its end and the number of its calls."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        library.faults_arm(os.fsencode(folder), kind, ctypes.c_long(call))
        end = "written"
        try:
            write(folder, 3)
        except (OSError, RuntimeError):
            end = "raised"
        calls = library.faults_count()
        library.faults_arm(b"", 0, ctypes.c_long(0))
        if end == "raised":
            # Training goes on, and the disk has room again.
            write(folder, 4)
        os.write(writer, json.dumps([end, calls]).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as answer:
        return json.loads(answer.read() or '["killed", 0]')


def main():
    library, root = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2])
    for name, kind in FAULTS.items():
        for call in range(1, CALLS):
            folder = root / f"{name}-{call}" / "worker-0"
            for epoch in (1, 2):
                write(folder, epoch)
            end, calls = attempt(library, folder, kind, call)
            if end == "written" and calls < call:
                break
            print(json.dumps([name, call, end, readable(folder)]), flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
