"""The contract of a server, the half of a method that combines payloads."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.compressors.base import Compressor, Identity, sum_in_order
from tfgradcomp.core import (
    Component,
    Context,
    Field,
    Fields,
    Layout,
    State,
    Vector,
    contracts,
)
from tfgradcomp.ops.block_sums import Part


class Shard(NamedTuple):
    """A part of the vector that a server holds by itself.

    Attributes:
        begin: Its first element.
        end: The element after its last.
        first_block: Index of the first block that reaches into it.
        layout: The blocks, cut off at its ends.
        parts: The subtrees whose sums make the blocks' sums.
    """

    begin: int
    end: int
    first_block: int
    layout: Layout
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Elements of the shard."""
        return self.end - self.begin


class SumField(NamedTuple):
    """The field of a payload that workers may add up on its way.

    Attributes:
        name: Name of the field.
        field: What its sum over all workers is: codes in a larger base, or numbers.
    """

    name: str
    field: Field


@dataclass(frozen=True)
class Server(Component, abc.ABC):
    """The server's half of a method: pure functions, in the manner of `Compressor`.

    A server computes the same reply from the same payloads on every transport. A
    subclass declares its reply (`reply_fields`), writes it (`combine`), reads it
    (`decompress`) and names its `uncompressed` form. All other methods have defaults.

    Attributes:
        read_by_workers: Whether compressors read the state (`Context.server_state`):
            then every worker must be a server of the whole vector.
        takes_weights: Whether `combine` reads the workers' weights (`Context.weights`).
    """

    registered_package: ClassVar[str] = "tfgradcomp.servers"
    read_by_workers: ClassVar[bool] = False
    takes_weights: ClassVar[bool] = False

    @abc.abstractmethod
    def reply_fields(self, layout: Layout, num_workers: int) -> dict[str, Field]:
        """Declares the tensors of a reply: the only statement of its size."""

    def init(self, layout: Layout) -> State:
        """Returns the state before the first step."""
        return ()

    @abc.abstractmethod
    def combine(
        self, payloads: Fields, state: State, layout: Layout, context: Context
    ) -> tuple[Fields, State]:
        """Returns the reply to the workers' payloads, and the new state.

        Args:
            payloads: The fields of the compressor, with a leading axis of workers.
            state: The result of `init` or of the last call.
            layout: The blocks of the flat vector.
            context: The step; its `rank` has no meaning here.
        """

    @abc.abstractmethod
    def decompress(self, reply: Fields, layout: Layout, num_workers: int) -> Vector:
        """Returns the float32 vector of `layout.size` that all workers apply."""

    def update(
        self, payloads: Fields, state: State, layout: Layout, context: Context
    ) -> tuple[Vector, State]:
        """Returns the decompressed reply, and the new state.

        Transports with a server on every worker call it: no reply has to travel, so a
        server may skip the words.
        """
        fields = self.reply_fields(layout, context.num_workers)
        reply, state = checked_combine(self, payloads, state, layout, context, fields)
        return self.decompress(reply, layout, context.num_workers), state

    @property
    def is_blockwise(self) -> bool:
        """True if each block is combined by itself."""
        return True

    # The same in shards, each of which has a server.

    def shard_alignment(self, layout: Layout) -> int | None:
        """Returns the number of elements that divides the size of every shard.

        1 if the reply to an element depends on the payloads of its block only; None if
        it depends on the whole vector.
        """
        return 1

    def shard_fields(self, shard: Shard, num_workers: int) -> dict[str, Field]:
        """Declares the tensors of a shard's reply."""
        return self.reply_fields(shard.layout, num_workers)

    def combine_shard(
        self, payloads: Fields, state: State, shard: Shard, context: Context
    ) -> tuple[Fields, State]:
        """Returns the shard's reply to the shards of payloads, and the new state."""
        return self.combine(payloads, state, shard.layout, context)

    def whole_reply(self, parts: Fields, layout: Layout) -> Fields:
        """Returns the reply for the whole vector, whose blocks `layout` has.

        In `parts`, the shards' replies are joined: sums of parts have become those of
        blocks.
        """
        return parts

    def deferred_reply(self, layout: Layout, num_workers: int) -> dict[str, Field]:
        """Declares the fields of the whole reply that `finish_shard` needs."""
        return {}

    def finish_shard(
        self,
        payloads: Fields,
        part: Fields,
        reply: Fields,
        state: State,
        shard: Shard,
        context: Context,
    ) -> State:
        """Returns the state of the shard once the whole reply is known.

        Args:
            payloads: As in `combine_shard`, like `shard` and `context`.
            part: The reply that `combine_shard` returned.
            reply: The reply for the whole vector.
            state: The state that `combine_shard` returned.
        """
        return state

    # Payloads that are added up by the network.

    def sum_field(self, layout: Layout, num_workers: int) -> SumField | None:
        """Returns the field whose sum over the workers is enough for the server.

        The other fields of a payload must then be `shared`. None if the server needs
        more than a sum.
        """
        return None

    def update_of_sum(
        self,
        total: tf.Tensor,
        payload: Fields,
        state: State,
        layout: Layout,
        context: Context,
    ) -> tuple[Vector, State]:
        """Returns the result of `update` for payloads that were added up.

        Args:
            total: The tensor that `sum_field` declares: int32 words of the sums of
                codes; or the mean of numbers.
            payload: This worker's other fields, equal on all workers.
            state: As in `combine`, like `layout` and `context`.
        """
        raise NotImplementedError

    # Other forms of the same rule.

    def uncompressed(self) -> Server:
        """Returns the same rule for float32 payloads, for uncompressed variables."""
        return Mean()

    def uncompressed_step(self) -> Server:
        """Returns the same rule for float32 payloads, for a single step."""
        return self.uncompressed()

    def wait(self, state: State, context: Context) -> State:
        """Returns the state, whole or a shard, after a step without the server.

        The elements are independent of each other.
        """
        return state

    def fused(self) -> Server:
        """Returns an equal server with fewer passes over memory, for `Method.fused`."""
        return self


def checked_combine(
    server: Server,
    payloads: Fields,
    state: State,
    layout: Layout,
    context: Context,
    fields: dict[str, Field],
) -> tuple[Fields, State]:
    """Combines payloads, and compares the reply with `fields` and both states.

    Raises:
        ValueError: If the server returns a reply or a state of another form.
    """
    reply, new_state = server.combine(payloads, state, layout, context)
    contracts.check_fields(server, "combine", reply, fields, "reply_fields")
    contracts.check_state(server, "combine", new_state, state)
    return reply, new_state


def width_of_blocks(layout: Layout) -> int | None:
    """Returns the size of all blocks but the last, which may be smaller.

    None if they differ: then no shards of one size have whole blocks.
    """
    widths = {*np.diff(layout.row_splits)[:-1].tolist()}
    if len(widths) > 1:
        return None
    return widths.pop() if widths else max(1, layout.size)


def mean_of_workers(
    compressor: Compressor, payloads: Fields, layout: Layout, context: Context
) -> Vector:
    """Returns the mean of decoded payloads, weighted if the step has weights.

    Args:
        compressor: The compressor that decodes the payloads.
        payloads: The fields, with a leading axis of workers.
        layout: The blocks of the flat vector.
        context: The step.
    """
    if context.weights is None:
        return compressor.mean(payloads, layout)
    total = sum_in_order(
        weight
        * compressor.decompress({k: v[rank] for k, v in payloads.items()}, layout)
        for rank, weight in enumerate(tf.unstack(context.weights))
    )
    return tf.math.divide_no_nan(total, tf.reduce_sum(context.weights))


@dataclass(frozen=True)
class Mean(Server):
    r"""Replies \( \frac{1}{N} \sum_i \Delta^{(i)} \), summed in the order of ranks.

    Attributes:
        compressor: The workers' compressor; its payloads are decoded by it.
    """

    takes_weights: ClassVar[bool] = True

    compressor: Compressor = Identity()

    @override
    def reply_fields(self, layout, num_workers):
        return {"values": Field(layout.size, per="element")}

    @override
    def combine(self, payloads, state, layout, context):
        mean = mean_of_workers(self.compressor, payloads, layout, context)
        return {"values": mean}, state

    @override
    def decompress(self, reply, layout, num_workers):
        return reply["values"]

    @override
    def shard_alignment(self, layout):
        return width_of_blocks(layout) if self.compressor.needs_whole_blocks else 1

    @override
    def sum_field(self, layout, num_workers):
        fields = self.compressor.fields(layout)
        (name, *others) = [n for n, field in fields.items() if not field.shared]
        field = fields[name]
        # Integers without a base, and fields of variable length, are no numbers to add.
        is_sum = field.base is None and tf.as_dtype(field.dtype).is_floating
        return SumField(name, field) if is_sum and not others else None

    @override
    def update_of_sum(self, total, payload, state, layout, context):
        name, _ = self.sum_field(layout, context.num_workers)
        payloads = {n: v[tf.newaxis] for n, v in {**payload, name: total}.items()}
        return self.update(payloads, state, layout, context)
