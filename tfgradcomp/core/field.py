"""The declaration of a tensor that travels between workers and servers."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfgradcomp.core.word_format import words_for

Fields = dict[str, tf.Tensor]
"""Tensors by the names of the fields that declare them."""


class Field(NamedTuple):
    """Declares one tensor of a message: codes in packed words, or numbers.

    Attributes:
        count: Number of elements.
        base: For integer codes in `[0, base)`: the base. A payload holds them in
            `length` int32 words (`tfgradcomp.ops.pack_codes`). None for numbers of type
            `dtype`.
        dtype: The type on the wire if `base` is None.
        per: `"element"` or `"block"`: the field has an item for each element or block,
            in order, so that a part of the vector has a part of the field. `"sum"`:
            float64 sums over parts of blocks, which add up to one sum a block
            (`tfgradcomp.ops.block_sums`). None: any other tensor.
        items_per_block: Number of consecutive items for each element or block.
        variable_length: Whether the number of items differs from step to step; `count`
            is then the maximum. Only the last field of a method may have a variable
            length. Its type is int32, and -1 means no item, because messages are padded
            with -1.
        shared: Whether all workers have the same tensor, because it follows from a
            first round or from shared random numbers. It does not travel where every
            worker is a server of the whole vector.
    """

    count: int  # type: ignore[assignment]  # It hides tuple.count.
    base: int | None = None
    dtype: str = "float32"
    per: str | None = None
    items_per_block: int = 1
    variable_length: bool = False
    shared: bool = False

    @property
    def length(self) -> int:
        """Items of the tensor: numbers, or the 32-bit words that hold the codes."""
        return self.count if self.base is None else words_for(self.count, self.base)
