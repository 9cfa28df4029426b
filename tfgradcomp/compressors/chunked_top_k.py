"""Sparsification by chunks: positions near their entropy, values of a few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors.base import Compressed, Compressor, all_finite
from tfgradcomp.core import Field, Layout
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.ops.reference import chunks


@dataclass(frozen=True)
class ChunkedTopK(Compressor):
    r"""Sends the k largest of each chunk of elements: where they are, and a few bits.

    A chunk is a block of the layout, or a part of at most `chunk` elements of one; a
    shorter chunk of w elements sends \( \lceil k w / \mathrm{chunk} \rceil \). Of equal
    magnitudes the first are taken.

    **Values.** The magnitudes of a chunk are split at their mean, and with 3 bits both
    parts at theirs. A magnitude becomes the mean of its part, so the error of what is
    sent is its deviation from these means, and the compressor contracts. A value takes
    its part and its sign, and a chunk \( 2^{\mathrm{bits} - 1} \) means in bfloat16.

    **Positions** take the code of Elias and Fano: the lower \( l = \lfloor\log_2
    (\mathrm{chunk} / k)\rfloor \) bits of each position, and the upper parts in unary.
    It has a fixed length, of about l + 2 bits a position. 64 of 4,096 elements take 511
    bits, where \( \log_2 \binom{4096}{64} = 471 \) and indices take 768.

    With the defaults an element takes 0.164 bits: 0.125 for positions, 0.031 for
    values, 0.008 for means.

    Attributes:
        k: The most elements that a chunk sends.
        chunk: Elements of a chunk, at most 65,536. Transports can cut a vector whose
            blocks have at most as many.
        bits: Bits of a value, its sign included: 1 to 3.

    Example:
        ```python
        inner, c = keras.optimizers.SGD(1.0), ChunkedTopK(64, 4096)
        optimizer = CompressedOptimizer(
            inner, ErrorFeedback(c, decay=0.95), Recompress(c, decay=0.95)
        )
        ```

    References:
        Sarfi, Thérien, Lidin, Belilovsky, Communication Efficient LLM Pre-training with
        SparseLoCo, 2025, Section 3. Elias, Efficient Storage and Retrieval by Content
        and Address of Static Files, 1974.
    """

    short_name: ClassVar[str | None] = "chunked_top_k"
    contracts: ClassVar[bool] = True
    needs_whole_blocks: ClassVar[bool] = True
    # The bits of all words are counted in int32.
    most_elements: ClassVar[int | None] = 2**30

    k: int = 64
    chunk: int = 4096
    bits: int = 2

    def __post_init__(self):
        check_integer("chunk", self.chunk, 1, chunks.MOST_IN_CHUNK + 1)
        check_integer("k", self.k, 1, self.chunk + 1)
        check_integer("bits", self.bits, 1, 4)

    @property
    def _format(self):
        return chunks.ChunkFormat(self.k, self.chunk, self.bits)

    def _chunks(self, layout: Layout) -> Layout:
        # A table's touched rows have the blocks of the table, none of which is longer.
        is_cut = tf.is_tensor(layout.row_splits) or (
            np.diff(layout.row_splits).max(initial=0) <= self.chunk
        )
        return layout if is_cut else layout.cut(self.chunk)

    @override
    def fields(self, layout):
        parts = self._chunks(layout)
        words, levels = self._format.words, self._format.levels
        per = "block" if parts.row_splits is layout.row_splits else None
        return {
            "words": Field(
                parts.num_blocks * words,
                dtype="int32",
                per=per,
                items_per_block=words,
            ),
            "levels": Field(
                parts.num_blocks * levels,
                dtype="bfloat16",
                per=per,
                items_per_block=levels,
            ),
        }

    @override
    def compress(self, x, state, layout, context):
        splits = self._chunks(layout).row_splits
        words, levels, nonfinite = ops.pack_largest(
            x, splits, self.k, self.chunk, self.bits
        )
        levels = tf.reshape(tf.cast(levels, tf.bfloat16), [-1])
        is_finite = tf.equal(nonfinite, 0) & all_finite([levels])
        return Compressed({"words": words, "levels": levels}, state, is_finite)

    @override
    def elements_sent(self, payload, layout):
        shares = self._format.share(ops.widths(self._chunks(layout).row_splits))
        return tf.reduce_sum(tf.cast(shares, tf.int32))

    @override
    def decompress(self, payload, layout):
        return self.mean({name: v[tf.newaxis] for name, v in payload.items()}, layout)

    @override
    def mean(self, payloads, layout):
        parts = self._chunks(layout)
        levels = tf.cast(payloads["levels"], tf.float32)
        shape = [levels.shape[0], parts.num_blocks, self._format.levels]
        return ops.mean_of_largest(
            payloads["words"],
            tf.reshape(levels, shape),
            parts.row_splits,
            self.k,
            self.chunk,
            self.bits,
            layout.sizes,
        )
