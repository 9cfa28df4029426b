"""The contract of a compressor, the worker's half of a method."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.core import (
    Component,
    Context,
    Field,
    Fields,
    Layout,
    SplitVector,
    State,
    Vector,
    contracts,
)
from tfgradcomp.core.arguments import check_choice


class Compressed(NamedTuple):
    """The result of a compression.

    Attributes:
        payload: A tensor for each field.
        state: The new state.
        is_finite: Boolean scalar: whether all elements of the input and all numbers of
            the payload are finite. None if the compressor does not know; then
            `is_all_finite` takes another pass over memory.
    """

    payload: Fields
    state: State
    is_finite: tf.Tensor | None = None

    def is_all_finite(self, x: Vector) -> tf.Tensor:
        """Returns whether the input `x` and the payload are finite."""
        if self.is_finite is not None:
            return self.is_finite
        num_parts = len(x) if isinstance(x, SplitVector) else 1
        is_finite = tf.equal(ops.first_nonfinite(x, tf.constant(False)), num_parts)
        numbers = [v for v in self.payload.values() if v.dtype.is_floating]
        return is_finite & all_finite(numbers) if numbers else is_finite


@dataclass(frozen=True)
class Compressor(Component, abc.ABC):
    """The worker's half of a method: pure functions over flat float32 vectors.

    A subclass declares its payload (`fields`), writes it (`compress`) and reads it
    (`decompress`). All other methods have defaults. Vectors may be `SplitVector`s.

    A compressor is a frozen dataclass: equal arguments mean equal behaviour. It creates
    no variable; its memory goes through its `State`. Compressors compose by wrapping:
    `ErrorFeedback(ScaledSign())`.

    Attributes:
        short_name: Name by which `tfgradcomp.compressors.get` finds the class, for
            stateless compressors whose arguments all have defaults; else None.
        is_scaled: Whether decoded values have the scale of the input. False for signs.
        is_blockwise: Whether each block is compressed by itself.
        contracts: Whether the error is smaller than the input, at least on average, so
            that error feedback may follow; see `OptimalScale`.
        needs_second_moments: Whether `context.second_moments` must be given.
        needs_whole_tensors: Whether no tensor may be cut, because shapes matter. Then
            the vectors of its state may have another size than the layout: `init` of a
            layout is the concatenation of `init` of its tensors.
        needs_whole_blocks: Whether a payload can be decoded for whole blocks only,
            because its fields have places in a block.
        hears_reply: Whether the state depends on the reply (`received`).
        most_elements: Greatest number of elements of a vector; None for no limit.
    """

    registered_package: ClassVar[str] = "tfgradcomp.compressors"
    short_name: ClassVar[str | None] = None
    is_scaled: ClassVar[bool] = True
    is_blockwise: ClassVar[bool] = True
    contracts: ClassVar[bool] = False
    needs_second_moments: ClassVar[bool] = False
    needs_whole_tensors: ClassVar[bool] = False
    needs_whole_blocks: ClassVar[bool] = False
    hears_reply: ClassVar[bool] = False
    most_elements: ClassVar[int | None] = None

    @abc.abstractmethod
    def fields(self, layout: Layout) -> dict[str, Field]:
        """Declares the tensors of a payload: the only statement of its size."""

    def max_reduced_fields(self, layout: Layout) -> dict[str, Field]:
        """Declares a first round: tensors that are reduced to their maximum."""
        return {}

    def mean_reduced_fields(self, layout: Layout) -> dict[str, Field]:
        """Declares a first round: numbers that are reduced to their mean.

        Their type is one that can be added: float32, float16, bfloat16 or float64.
        """
        return {}

    def first_round(self, layout: Layout) -> dict[str, Field]:
        """Returns the fields of the first round, maxima first."""
        return {**self.max_reduced_fields(layout), **self.mean_reduced_fields(layout)}

    def init(self, layout: Layout) -> State:
        """Returns the state before the first step."""
        return ()

    def prepare(
        self, x: Vector, state: State, layout: Layout, context: Context
    ) -> Fields:
        """Returns this worker's part of the first round, before `compress`.

        Returns:
            A tensor for each field of the first round, and any other tensor that
            `compress` would have to compute again. `compress` finds them in
            `context.prepared`, with the declared fields reduced over the workers.
        """
        return {}

    @abc.abstractmethod
    def compress(
        self, x: Vector, state: State, layout: Layout, context: Context
    ) -> Compressed:
        """Returns the payload of `x`, a tensor for each field, and the new state."""

    def received(
        self, state: State, update: Vector, layout: Layout, context: Context
    ) -> State:
        """Returns the new state once the reply has come.

        It is called if `hears_reply` is true, and not in uncompressed steps.

        Args:
            state: The state that `compress` returned.
            update: The decoded reply, the same on all workers.
            layout: The blocks of the flat vector.
            context: The step, as `compress` saw it.
        """
        return state

    def elements_sent(self, payload: Fields, layout: Layout) -> tf.Tensor | int:
        """Returns the number of elements that a payload has a value for."""
        return layout.size

    @abc.abstractmethod
    def decompress(self, payload: Fields, layout: Layout) -> Vector:
        """Returns the float32 vector of `layout.size` that a payload stands for."""

    def mean(self, payloads: Fields, layout: Layout) -> Vector:
        """Returns the mean of N decoded payloads, added in the order of ranks.

        Args:
            payloads: The fields, with a leading axis of workers.
            layout: The blocks of the flat vector.
        """
        workers = tf.nest.map_structure(tf.unstack, payloads)
        total = sum_in_order(
            self.decompress(dict(zip(workers, values, strict=True)), layout)
            for values in zip(*workers.values(), strict=True)
        )
        # Not `/`: Grappler would turn it into a product with the reciprocal.
        return tf.math.divide_no_nan(total, len(next(iter(workers.values()))))

    def uncompressed(self) -> Compressor:
        """Returns the same mathematics without compression, for other variables."""
        return Identity()

    def uncompressed_step(self) -> Compressor:
        """Returns the same mathematics without compression, for a single step.

        Its state has the form of this compressor's, whose residual waits.
        """
        return self.uncompressed()

    def fused(self) -> Compressor:
        """Returns an equal compressor with fewer passes over memory.

        `Method.fused` calls it.
        """
        return self


def checked_prepare(
    compressor: Compressor, x: Vector, state: State, layout: Layout, context: Context
) -> Fields:
    """Prepares `x`, and compares the result with the declared first round.

    Raises:
        ValueError: If the compressor returns fields of another form.
    """
    prepared = compressor.prepare(x, state, layout, context)
    for declared_by in ("max_reduced_fields", "mean_reduced_fields"):
        fields = getattr(compressor, declared_by)(layout)
        contracts.check_fields(
            compressor, "prepare", prepared, fields, declared_by, allow_others=True
        )
    return prepared


def checked_compress(
    compressor: Compressor, x: Vector, state: State, layout: Layout, context: Context
) -> Compressed:
    """Compresses `x`, and compares payload and state with the declared ones.

    Raises:
        ValueError: If the compressor returns a payload or a state of another form.
    """
    compressed = compressor.compress(x, state, layout, context)
    fields = compressor.fields(layout)
    contracts.check_fields(compressor, "compress", compressed.payload, fields)
    contracts.check_state(compressor, "compress", compressed.state, state)
    return compressed


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends the vector as it is, in the format `dtype`.

    Attributes:
        dtype: `"float32"`, or `"bfloat16"` / `"float16"`: rounded to nearest.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(
            inner, Identity("bfloat16"), Mean(Identity("bfloat16"))
        )
        ```
    """

    short_name: ClassVar[str | None] = "identity"
    contracts: ClassVar[bool] = True

    dtype: str = "float32"

    def __post_init__(self):
        check_choice("dtype", self.dtype, ("float32", "bfloat16", "float16"))

    @override
    def fields(self, layout):
        return {"values": Field(layout.size, dtype=self.dtype, per="element")}

    @override
    def compress(self, x, state, layout, context):
        values = tf.cast(x, self.dtype)
        # Every format keeps infinities and NaN.
        return Compressed({"values": values}, state, all_finite([values]))

    @override
    def decompress(self, payload, layout):
        return tf.cast(payload["values"], tf.float32)


@dataclass(frozen=True)
class Wrapper(Compressor):
    """A compressor that changes the input of another compressor.

    A subclass computes the new input (`transform`), and overrides `compress` and `init`
    if it has a state.

    Attributes:
        compressor: The wrapped compressor.
    """

    compressor: Compressor

    @property
    @override
    def is_blockwise(self):  # type: ignore[override]
        return self.compressor.is_blockwise

    @property
    @override
    def most_elements(self):  # type: ignore[override]
        return self.compressor.most_elements

    @property
    @override
    def needs_whole_tensors(self):  # type: ignore[override]
        return self.compressor.needs_whole_tensors

    @property
    @override
    def needs_whole_blocks(self):  # type: ignore[override]
        return self.compressor.needs_whole_blocks

    @property
    @override
    def hears_reply(self):  # type: ignore[override]
        return self.compressor.hears_reply

    @override
    def fields(self, layout):
        return self.compressor.fields(layout)

    @override
    def max_reduced_fields(self, layout):
        return self.compressor.max_reduced_fields(layout)

    @override
    def mean_reduced_fields(self, layout):
        return self.compressor.mean_reduced_fields(layout)

    def transform(
        self, x: Vector, state: State, layout: Layout, context: Context
    ) -> Vector:
        """Returns the input of the wrapped compressor."""
        raise NotImplementedError

    def inner_state(self, state: State) -> State:
        """Returns the wrapped compressor's part of the state."""
        return state

    @override
    def prepare(self, x, state, layout, context):
        if not self.first_round(layout):
            return {}
        transformed = self.transform(x, state, layout, context)
        inner = self.inner_state(state)
        return self.compressor.prepare(transformed, inner, layout, context)

    @override
    def init(self, layout):
        return self.compressor.init(layout)

    @override
    def received(self, state, update, layout, context):
        before = self.inner_state(state)
        inner = self.compressor.received(before, update, layout, context)
        return inner if before is state else {**state, "inner": inner}

    @override
    def elements_sent(self, payload, layout):
        return self.compressor.elements_sent(payload, layout)

    @override
    def decompress(self, payload, layout):
        return self.compressor.decompress(payload, layout)

    @override
    def mean(self, payloads, layout):
        return self.compressor.mean(payloads, layout)

    @override
    def uncompressed(self):
        return self.compressor.uncompressed()

    @override
    def uncompressed_step(self):
        return self.compressor.uncompressed_step()


def mean_of_values(payloads: Fields, layout: Layout) -> Fields:
    """Returns the payload that stands for the mean of N payloads.

    Args:
        payloads: Fields with a leading axis of workers: numbers `"values"`, which
            decoding is linear in, and shared fields.
        layout: The blocks of the flat vector.
    """
    first = {name: stacked[0] for name, stacked in payloads.items()}
    return {**first, "values": Identity().mean({"values": payloads["values"]}, layout)}


def sum_in_order(vectors: Iterable[Vector]) -> Vector:
    """Returns the sum of float32 vectors, added one after the other.

    In a graph, TensorFlow reorders a sum of sums.
    """
    one = tf.constant(1.0)
    return functools.reduce(lambda total, x: ops.add_scaled(x, total, one), vectors)


def all_finite(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Returns a boolean scalar: no element of any tensor is infinite or NaN."""
    checks = [tf.reduce_all(tf.math.is_finite(x)) for x in tensors]
    return checks[0] if len(checks) == 1 else tf.reduce_all(checks)
