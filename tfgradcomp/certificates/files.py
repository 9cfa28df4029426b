"""Names of the files of a folder, and how they are read and written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

CA, CERTIFICATE, KEY, CA_KEY = "ca.pem", "cert.pem", "key.pem", "ca-key.pem"


def read(path: Path) -> bytes:
    """Returns the bytes of a file; raises a ValueError if there is none."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read. Copy it from the machine where it was made, or "
            f"name another folder. Received: {error.strerror}"
        ) from None


def write(path: Path, data: bytes) -> None:
    """Replaces a file by one that the owner alone can read, at once."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(data)
    new.replace(path)


def parsed(path: Path, load: Callable, *arguments: object) -> Any:
    """Returns what `load` makes of a file; raises a ValueError if it cannot."""
    data = read(path)
    try:
        return load(data, *arguments)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read as a file in the PEM format without a password. "
            f"Copy it again. Received: {error}"
        ) from None
