"""Hashes that are the same in all processes."""

from __future__ import annotations

import hashlib


def digest64(*contents: bytes) -> int:
    """Returns 64 bits of a hash, as the integer that an int64 tensor takes."""
    digest = hashlib.blake2b(digest_size=8)
    for content in contents:
        digest.update(content)
    return int.from_bytes(digest.digest(), "little", signed=True)
