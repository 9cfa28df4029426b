"""The word format: how many codes sit in a 32-bit word.

A word on the wire is int32. It holds `digits_per_word(s)` = k codes of base s, least
significant digit first: element j is digit j mod k of word j // k. k is the largest
number with s**k <= 2**32; unused digits are 0. For s = 2, element j is bit j mod 32.

A sparse word is one element: its sign (the top bit), three bits d for a magnitude of
2^-d times a scale, and its index in the lowest `INDEX_BITS`.
"""

from __future__ import annotations

INDEX_BITS = 28
NOTHING = -1  # A sparse word that stands for no element and fills up rows of words.
CHUNK = 512  # Elements whose sum is a leaf of the tree that sums up a block.


def digits_per_word(base: int) -> int:
    """Returns how many codes of a base fit into one 32-bit word.

    Raises:
        ValueError: If `base` is not in [2, 2**32].
    """
    if not 2 <= base <= 2**32:
        raise ValueError(f"base must be in [2, 2**32]. Received: base={base}")
    digits = 1
    while base ** (digits + 1) <= 2**32:
        digits += 1
    return digits


def words_for(count: int, base: int) -> int:
    """Returns the number of words that `count` codes of a base take.

    If the count is a tensor, so is the result.
    """
    return -(-count // digits_per_word(base))
