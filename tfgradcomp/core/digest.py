"""Hashes that are the same in all processes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def digest64(content: bytes | np.ndarray) -> int:
    """Returns 64 bits of a hash, as the integer that an int64 tensor takes.

    Args:
        content: Bytes, or an array, which is not copied.
    """
    data: Any = content
    if isinstance(content, np.ndarray):
        data = np.ravel(content).view(np.uint8)
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
