"""The folder in which a hub or a client keeps its state.

Each state is written completely or not at all (`tfgradcomp.checkpoint.backups`). A lock
keeps two programs from using one folder.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tfgradcomp.checkpoint import backups

_VALUES, _ARRAYS = "state.json", "state.npz"


class Store:
    """A folder with the newest states of one program.

    Args:
        folder: The folder; it is made if it does not exist.

    Raises:
        BlockingIOError: If another program uses the folder.
    """

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self._folder / "lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise BlockingIOError(
                "Another program uses this folder: give each hub and each client a "
                f"folder of its own. Received: folder={str(folder)!r}"
            ) from error
        points = backups.points_in(self._folder)
        self._count = points[-1].epoch if points else 0

    def load(self) -> tuple[dict, dict[str, np.ndarray]] | None:
        """Returns what was saved last; None if there is nothing."""
        points = backups.points_in(self._folder)
        if not points:
            return None
        folder = backups.point_folder(self._folder, points[-1])
        with np.load(folder / _ARRAYS, allow_pickle=False) as file:
            arrays = dict(file)
        return json.loads((folder / _VALUES).read_text()), arrays

    def save(self, values: Mapping, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a state, and removes all but the two newest.

        Raises:
            OSError: If the disk does not take it; the state of before is still there.
        """

        def write(folder: Path) -> None:
            (folder / _VALUES).write_text(json.dumps(values))
            np.savez(folder / _ARRAYS, **{**arrays})  # type: ignore[arg-type]

        self._count += 1
        point = backups.Point(self._count)
        backups.write(self._folder, point, backups.Origin(0, 1), write)
        backups.drop_old(self._folder)

    def close(self) -> None:
        """Gives the folder free."""
        self._lock.close()
