"""What a compressor is: fields, layouts, the context of a step, the contract."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.ops import Parts

State = Any
"""A nest (tuple, dict) of float32 tensors; `()` where there is none."""


class Field(NamedTuple):
    """One thing that travels: codes in words, or numbers.

    Attributes:
        count: Number of elements.
        base: For integer codes in `[0, base)`. A payload holds them in
            `words_for(count, base)` int32 words (`tfgradcomp.ops.pack_codes`). None
            for numbers of type `dtype`.
        dtype: The type on the wire where `base` is None.
        per: `"element"` or `"block"`: there is one for each of them, in their order,
            so that a part of the vector has a part of the field. `"sum"`: float64
            sums over parts of blocks, which add up to one for each block
            (`tfgradcomp.ops.block_sums`). None: none of these.
        each: How many there are for each element or block, one after the other.
        varies: As many travel as there are in a step; `count` is the most. A method's
            last field may vary, of type int32, where -1 stands for nothing: messages
            are padded with it.
    """

    count: int
    base: int | None = None
    dtype: str = "float32"
    per: str | None = None
    each: int = 1
    varies: bool = False


@dataclass(frozen=True)
class Layout:
    """How a flat vector is cut into blocks.

    Block `b` is the range `[row_splits[b], row_splits[b + 1])`. No block is empty and
    nothing is padded, so padding can enter no scale, no level and no residual.

    Attributes:
        row_splits: `num_blocks + 1` increasing offsets, the first 0.
        sizes: Elements of each of the tensors that the vector is made of; decoded
            vectors are then `tfgradcomp.ops.Parts` of these sizes, where a compressor
            can write them so. None where that is not known or does not matter.
    """

    row_splits: tuple[int, ...]
    sizes: tuple[int, ...] | None = None

    @classmethod
    def from_sizes(cls, sizes: list[int], block_size: int | str | None = None):
        """Cuts the concatenation of tensors into blocks.

        Args:
            sizes: Elements of each tensor.
            block_size: None: a block is a tensor. An integer: blocks of that many
                elements of the flat vector, the last may be short. `"model"`: one
                block.
        """
        total = sum(sizes)
        if block_size is None:
            splits = np.cumsum([0, *sizes])
        else:
            step = max(total, 1) if block_size == "model" else block_size
            splits = [*range(0, total, step), total]
        own = tuple(int(size) for size in sizes)
        return cls(tuple(int(s) for s in splits), own or None)

    @property
    def size(self) -> int:
        """Elements of the flat vector."""
        return self.row_splits[-1]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.row_splits) - 1

    def blocks_in(self, begin: int, end: int) -> range:
        """Returns the indices of the blocks that reach into elements [begin, end)."""
        first = bisect.bisect_right(self.row_splits, begin) - 1
        return range(first, bisect.bisect_left(self.row_splits, end))

    def cut(self, most: int) -> Layout:
        """Returns the layout with longer blocks cut to `most` elements."""
        pieces = [
            range(begin, end, most)
            for begin, end in itertools.pairwise(self.row_splits)
        ]
        return replace(self, row_splits=(*itertools.chain(*pieces), self.size))

    def part(self, begin: int, end: int) -> Layout:
        """Returns the layout of elements [begin, end), its blocks cut off there."""
        if begin == end:
            return Layout((0,))
        inside = self.blocks_in(begin, end)
        cuts = self.row_splits[inside.start + 1 : inside.stop]
        return Layout(tuple(split - begin for split in (begin, *cuts, end)))


class Context(NamedTuple):
    """What a method may know about the step, besides its input.

    Attributes:
        step: int64 scalar, the number of updates applied so far.
        seed: int64 scalar.
        rank: This worker's index.
        num_workers: Python integer N.
        learning_rate: float32 scalar, the step size of this step.
        previous_learning_rate: float32 scalar, the last non-zero step size before it.
        max: Element-wise maximum of a float32 vector over all workers.
        offset: Index of the vector's first element in the whole vector, a multiple of
            4.
        second_moments: Of a vector that is a sum over examples, the sums of the
            squares of its terms, element by element; None where they are not known.
    """

    step: tf.Tensor
    seed: tf.Tensor
    rank: int
    num_workers: int
    learning_rate: tf.Tensor
    previous_learning_rate: tf.Tensor
    max: Callable[[tf.Tensor], tf.Tensor]
    offset: int = 0
    second_moments: tf.Tensor | Parts | None = None

    @property
    def learning_rate_ratio(self) -> tf.Tensor:
        """Previous step size over this one; 0 where this one is 0."""
        return tf.math.divide_no_nan(self.previous_learning_rate, self.learning_rate)

    def at_server(self) -> Context:
        """The same step as the server sees it: the same wherever the server is."""
        return self._replace(rank=-1, max=tf.identity)

    def if_moving(self, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
        """`new`, or `old` in a step whose learning rate is 0.

        Residuals are counted in units of the last non-zero learning rate: a step
        that moves no weight must neither add to what is owed nor forget it.
        """
        return tf.where(self.learning_rate > 0, new, old)

    def random_stream(self, stream: int = 0, shared: bool = False) -> tf.Tensor:
        """A stream of random words, a pure function of what is named below.

        The key is `seed`, the high half of the counter
        `step * 2**24 + (rank + 1) * 2**4 + stream`, with 0 for `rank + 1` where the
        words are `shared` by all workers. An element draws the same word in a part of
        the vector as in the whole. `tfgradcomp.ops.random_bits` has the words.

        Args:
            stream: 0 to 15, distinct for distinct uses within one step.
            shared: Whether all workers draw the same words.

        Returns:
            int64 `[3]`: key, high half of the counter, and its low half at element 0.
        """
        worker = 0 if shared else tf.cast(self.rank, tf.int64) + 1
        high = tf.cast(self.step, tf.int64) * 2**24 + worker * 2**4 + stream
        first = tf.constant(self.offset // 4, tf.int64)
        return tf.stack([tf.cast(self.seed, tf.int64), high, first])


@dataclass(frozen=True)
class Component:
    """A frozen dataclass that Keras can save: compressors, servers, local terms.

    Subclasses are registered with Keras under the name of their package.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        package = cls.__module__.rpartition(".")[0] or cls.__module__
        keras.saving.register_keras_serializable(package)(cls)

    def get_config(self) -> dict:
        """Returns the arguments, serialized by Keras."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: keras.saving.serialize_keras_object(v) for k, v in values.items()}

    @classmethod
    def from_config(cls, config: dict):
        """Returns the component that `get_config` describes."""
        return cls(
            **{k: keras.saving.deserialize_keras_object(v) for k, v in config.items()}
        )


@dataclass(frozen=True)
class Compressor(Component):
    """The worker's half of a method: pure functions over flat float32 vectors.

    A vector may be given, and may be returned, as the `tfgradcomp.ops.Parts` of one.

    A compressor is a frozen dataclass: equal arguments, equal behaviour. It creates
    no variable; what it must remember goes through its `State`. Compressors compose
    by wrapping: `ErrorFeedback(ScaledSign())`.

    Attributes:
        is_scaled: Whether decoded values have the scale of what was compressed; signs
            alone have not.
        is_blockwise: Whether each block is compressed by itself.
        needs_second_moments: Whether `context.second_moments` must be given.
        most_elements: Elements of the longest vector that can be compressed; None for
            any.
    """

    is_scaled: ClassVar[bool] = True
    is_blockwise: ClassVar[bool] = True
    needs_second_moments: ClassVar[bool] = False
    most_elements: ClassVar[int | None] = None

    def fields(self, layout: Layout) -> dict[str, Field]:
        """Declares what a payload is made of: the only statement of its size."""
        raise NotImplementedError

    def agreed(self, layout: Layout) -> dict[str, Field]:
        """Declares what workers agree on, by `context.max`, before they compress."""
        return {}

    def init(self, layout: Layout) -> State:
        """Returns the state before the first step."""
        return ()

    def compress(
        self, x: tf.Tensor | Parts, state: State, layout: Layout, context: Context
    ):
        """Returns the payload (a tensor for each field) of `x`, and the new state."""
        raise NotImplementedError

    def compress_checked(
        self, x: tf.Tensor | Parts, state: State, layout: Layout, context: Context
    ):
        """Returns what `compress` does, and whether all is finite.

        Overridden where the arithmetic tells that without another pass over `x`.

        Returns:
            The payload, the new state and a boolean scalar: no element of `x` and no
            number of the payload is infinite or NaN.
        """
        payload, state = self.compress(x, state, layout, context)
        tensors = list(x) if isinstance(x, Parts) else [x]
        numbers = [value for value in payload.values() if value.dtype.is_floating]
        return payload, state, all_finite([*tensors, *numbers])

    def elements_sent(
        self, payload: dict[str, tf.Tensor], layout: Layout
    ) -> tf.Tensor | int:
        """Returns the number of elements that a payload has a value for."""
        return layout.size

    def decompress(
        self, payload: dict[str, tf.Tensor], layout: Layout
    ) -> tf.Tensor | Parts:
        """Returns the float32 vector of `layout.size` that a payload stands for."""
        raise NotImplementedError

    def mean(self, payloads: dict[str, tf.Tensor], layout: Layout) -> tf.Tensor | Parts:
        """Returns the mean of N decoded payloads, added in the order of ranks.

        Args:
            payloads: The fields, with a leading axis of workers.
            layout: The blocks of the flat vector.
        """
        workers = tf.nest.map_structure(tf.unstack, payloads)
        total = 0.0
        for values in zip(*workers.values(), strict=True):
            payload = dict(zip(workers, values, strict=True))
            total += self.decompress(payload, layout)
        # Not `/`: a graph would multiply by the reciprocal instead.
        return tf.math.divide_no_nan(total, len(next(iter(workers.values()))))

    def uncompressed(self) -> Compressor:
        """Returns the same method with nothing lost, for what is not compressed."""
        from tfgradcomp.compressors.identity import Identity

        return Identity()


@dataclass(frozen=True)
class Wrapper(Compressor):
    """A compressor that changes the input of another one.

    Attributes:
        compressor: The wrapped compressor.
    """

    compressor: Compressor

    @property
    def is_blockwise(self):
        """See `Compressor`."""
        return self.compressor.is_blockwise

    @property
    def most_elements(self):
        """See `Compressor`."""
        return self.compressor.most_elements

    def fields(self, layout):
        """See `Compressor.fields`."""
        return self.compressor.fields(layout)

    def agreed(self, layout):
        """See `Compressor.agreed`."""
        return self.compressor.agreed(layout)

    def init(self, layout):
        """See `Compressor.init`."""
        return self.compressor.init(layout)

    def elements_sent(self, payload, layout):
        """See `Compressor.elements_sent`."""
        return self.compressor.elements_sent(payload, layout)

    def decompress(self, payload, layout):
        """See `Compressor.decompress`."""
        return self.compressor.decompress(payload, layout)

    def mean(self, payloads, layout):
        """See `Compressor.mean`."""
        return self.compressor.mean(payloads, layout)

    def uncompressed(self):
        """See `Compressor.uncompressed`."""
        return self.compressor.uncompressed()


def all_finite(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Whether no element of any of them is infinite or NaN, a boolean scalar."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in tensors])
