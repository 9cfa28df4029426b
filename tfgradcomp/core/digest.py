"""Hashes that are the same in all processes."""

from __future__ import annotations

import hashlib


def digest64(content: bytes) -> int:
    """Returns 64 bits of a hash, as the integer that an int64 tensor takes."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
