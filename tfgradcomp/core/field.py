"""One thing that travels between workers and servers."""

from __future__ import annotations

from typing import NamedTuple

from tfgradcomp.core.word_format import words_for


class Field(NamedTuple):
    """Declares one tensor of a message: codes in packed words, or numbers.

    Attributes:
        count: Number of elements.
        base: For integer codes in `[0, base)`. A payload holds them in
            `length` int32 words (`tfgradcomp.ops.pack_codes`). None for numbers of type
            `dtype`.
        dtype: The type on the wire where `base` is None.
        per: `"element"` or `"block"`: there is one for each of them, in their order,
            so that a part of the vector has a part of the field. `"sum"`: float64
            sums over parts of blocks, which add up to one for each block
            (`tfgradcomp.ops.block_sums`). None: none of these.
        items_per_block: Number of items for each element or block, one after the
            other.
        variable_length: Whether the number of items differs from step to step; `count`
            is then the greatest possible. Only the last field of a method may have a
            variable length; its type is int32, and -1 stands for nothing, because
            messages are padded with it.
    """

    count: int  # type: ignore[assignment]  # It hides tuple.count.
    base: int | None = None
    dtype: str = "float32"
    per: str | None = None
    items_per_block: int = 1
    variable_length: bool = False

    @property
    def length(self) -> int:
        """Items of the tensor: numbers, or the 32-bit words that hold the codes."""
        return self.count if self.base is None else words_for(self.count, self.base)
