"""Division of a vector among servers, and the division into shards."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.core import Context, Field, Layout, State, contracts
from tfgradcomp.core.logging import logger
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.methods import Method
from tfgradcomp.ops import digits_per_word
from tfgradcomp.ops.block_sums import CHUNK, add_up, parts_of
from tfgradcomp.ops.reference.vectors import zero_padded
from tfgradcomp.servers import Server, Shard
from tfgradcomp.transports import messages
from tfgradcomp.transports.base import Words


class Division:
    """The division of a method's vector among servers.

    Attributes:
        num_used: Number of servers that take part.
        payload_words: Words of a payload for each server; None if they vary.
        reply_words: Words of each server's reply; None if they vary.
        deferred_reply: The fields of the whole reply that `finish` needs.
    """

    num_used = 1
    payload_words: int | None
    reply_words: int | None

    def __init__(self, method: Method, layout: Layout, num_workers: int):
        self._method, self._layout, self._num_workers = method, layout, num_workers
        self.deferred_reply: dict[str, Field] = {}

    @property
    def words(self) -> Words:
        """Words to and from all servers, without parts of variable length."""
        return Words(
            self.num_used * (self.payload_words or 0),
            self.num_used * (self.reply_words or 0),
        )

    def owned_range(self, index: int) -> range:
        """Returns the elements whose state a server holds; all by default."""
        return range(self._layout.size)

    def init_state(self, index: int) -> State:
        """Returns the first state of a server."""
        raise NotImplementedError

    def messages(self, payload: dict[str, tf.Tensor]) -> Sequence[tf.Tensor]:
        """Returns a payload's words for each server, int32 vectors."""
        raise NotImplementedError

    def combine(
        self, index: int, rows: tf.Tensor, state: State, context: Context
    ) -> tuple[tf.Tensor, State]:
        """Returns a server's reply and its new state.

        Args:
            index: Index of the server.
            rows: The workers' words for this server, int32 `[N, payload_words]`; rows
                that are shorter end with zeros.
            state: The server's state.
            context: The step, of the whole vector.

        Returns:
            The reply, int32 `[reply_words]`, and the new state. With a
            `deferred_reply`, `finish` completes the state.
        """
        raise NotImplementedError

    def whole_reply(self, rows: tf.Tensor) -> dict[str, tf.Tensor]:
        """Joins the replies of all servers to the reply for the whole vector."""
        raise NotImplementedError

    def decoded(
        self, replies: Sequence[tf.Tensor], context: Context
    ) -> tuple[Vector, dict[str, tf.Tensor]]:
        """Returns the update of all workers, and the reply for the whole vector.

        Args:
            replies: The replies of all servers.
            context: The step.
        """
        reply = self.whole_reply(tf.stack(replies))
        server = self._method.server
        return server.decompress(reply, self._layout, self._num_workers), reply


class Sharding(Division):
    """The division into shards, each with the server's rule.

    All shards have `width` elements, except the last ones, which may be shorter or
    empty. No cut divides a word of payload or reply, or a chunk of a sum. All messages
    have the same length: each field is padded to the longest of all shards.

    Attributes:
        width: Largest number of elements in a shard.
    """

    payload_words: int
    reply_words: int

    def __init__(
        self, method: Method, layout: Layout, num_workers: int, num_shards: int
    ):
        super().__init__(method, layout, num_workers)
        compressor, server = method.compressor, method.server
        fields = [
            *compressor.fields(layout).values(),
            *server.reply_fields(layout, num_workers).values(),
        ]
        word_alignment = math.lcm(CHUNK, *map(_items_per_word, fields))
        alignment = math.lcm(word_alignment, server.shard_alignment(layout) or 1)
        # A vector that cannot be cut becomes one shard.
        self.width = _shard_width(layout.size, alignment, num_shards)
        cuts = [min(i * self.width, layout.size) for i in range(num_shards + 1)]
        self._shards = [_shard(layout, *cut) for cut in itertools.pairwise(cuts)]
        self.num_used = sum(shard.size > 0 for shard in self._shards)
        could_cut = _shard_width(layout.size, word_alignment, num_shards) < layout.size
        if self.num_used == 1 and num_shards > 1 and could_cut:
            _warn_uncut(server)
        self._payload_fields = _longest(
            compressor.fields(shard.layout) for shard in self._shards
        )
        self._reply_fields = _longest(
            server.shard_fields(shard, num_workers) for shard in self._shards
        )
        self.payload_words = messages.message_words(self._payload_fields)
        self.reply_words = messages.message_words(self._reply_fields)
        self.deferred_reply = server.deferred_reply(layout, num_workers)

    @staticmethod
    def supports(method: Method, layout: Layout) -> bool:
        """Returns whether a method's payloads can be cut into shards."""
        fields = method.compressor.fields(layout).values()
        alignment = method.server.shard_alignment(layout)
        can_cut = alignment is not None and all(field.per for field in fields)
        return can_cut and not method.server.read_by_workers

    @override
    def owned_range(self, index):
        return range(self._shards[index].begin, self._shards[index].end)

    @override
    def init_state(self, index):
        return contracts.initial_state(self._method.server, self._shards[index].layout)

    @override
    def messages(self, payload):
        rows = {
            name: self._rows(payload[name], field)
            for name, field in self._payload_fields.items()
        }
        return messages.pack(rows, self._payload_fields)

    @override
    def combine(self, index, rows, state, context):
        shard, payloads, context = self._received(index, rows, context)
        server = self._method.server
        part, new_state = server.combine_shard(payloads, state, shard, context)
        fields = server.shard_fields(shard, self._num_workers)
        contracts.check_fields(server, "combine_shard", part, fields, "shard_fields")
        contracts.check_state(server, "combine_shard", new_state, state)
        fields = self._reply_fields
        padded = {name: zero_padded(part[name], fields[name].length) for name in fields}
        return messages.pack(padded, fields), new_state

    @override
    def whole_reply(self, rows):
        parts = messages.unpack(rows, self._reply_fields)
        joined = {
            name: self._joined(parts[name], field)
            for name, field in self._reply_fields.items()
        }
        return self._method.server.whole_reply(joined, self._layout)

    def finish(
        self,
        index: int,
        rows: tf.Tensor,
        words: tf.Tensor,
        reply: dict[str, tf.Tensor],
        state: State,
        context: Context,
    ) -> State:
        """Returns a server's state after the step, which may need the whole reply.

        Args:
            index: Index of the server.
            rows: As in `combine`.
            words: The reply that `combine` returned.
            reply: The whole reply, or only its fields in `deferred_reply`.
            state: The state that `combine` returned.
            context: The step, of the whole vector.
        """
        if not self.deferred_reply:
            return state
        shard, payloads, context = self._received(index, rows, context)
        server = self._method.server
        part = messages.unpack(words, self._reply_fields)
        fields = server.shard_fields(shard, self._num_workers)
        part = {name: part[name][: field.length] for name, field in fields.items()}
        return server.finish_shard(payloads, part, reply, state, shard, context)

    def _received(self, index, rows, context):
        shard = self._shards[index]
        payloads = messages.unpack(rows, self._payload_fields)
        fields = self._method.compressor.fields(shard.layout)
        payloads = {n: payloads[n][:, : f.length] for n, f in fields.items()}
        offset = context.offset + shard.begin
        return shard, payloads, context.at_server()._replace(offset=offset)

    def _rows(self, values, field):
        shards = len(self._shards)
        if field.per == "element":
            row = field.length
            return tf.reshape(zero_padded(values, shards * row), [shards, row])
        blocks = field.count // field.items_per_block
        last = self._layout.num_blocks - 1
        index = [[min(i, last) for i in _span(s, blocks)] for s in self._shards]
        rows = tf.gather(tf.reshape(values, [-1, field.items_per_block]), index)
        return tf.reshape(rows, [shards, field.count])

    def _joined(self, parts, field):
        flat = tf.reshape(parts, [-1])
        if field.per == "element":
            count = self._layout.size * field.items_per_block
            return flat[: field._replace(count=count).length]
        if field.per == "block":
            blocks = field.count // field.items_per_block
            places = {
                block: index * blocks + i
                for index, shard in reversed([*enumerate(self._shards)])
                for i, block in enumerate(_span(shard, shard.layout.num_blocks))
            }
            index = [places[block] for block in range(self._layout.num_blocks)]
            rows = tf.reshape(flat, [-1, field.items_per_block])
            return tf.reshape(tf.gather(rows, tf.constant(index, tf.int32)), [-1])
        sums = [
            (part, index * field.count + i)
            for index, shard in enumerate(self._shards)
            for i, part in enumerate(shard.parts)
        ]
        index = tf.constant([place for _, place in sums], tf.int32)
        parts = [part for part, _ in sums]
        return add_up(tf.gather(flat, index), parts, self._layout.row_splits)


def _shard_width(size, alignment, num_shards):
    return min(alignment * math.ceil(size / alignment / num_shards), size)


@functools.cache
def _warn_uncut(server: Server) -> None:
    """Logs, once per kind of server, why all shards except one are empty."""
    logger.warning(
        "a vector cannot be cut into shards: %s combines whole blocks, and a block is "
        "a whole tensor or the whole vector. One server does all the work; give the "
        "method smaller blocks of one size (block_size=2048)",
        server,
    )


def _shard(layout, begin, end):
    blocks = layout.blocks_in(begin, end)
    parts = parts_of(layout.row_splits, begin, end)
    return Shard(begin, end, blocks.start, layout.part(begin, end), tuple(parts))


def _span(shard, count):
    return range(shard.first_block, shard.first_block + count)


def _longest(fields_of_shards):
    longest: dict[str, Field] = {}
    for fields in fields_of_shards:
        for name, field in fields.items():
            if name not in longest or longest[name].count < field.count:
                longest[name] = field
    return longest


def _items_per_word(field):
    if field.base is not None:
        return digits_per_word(field.base)
    return max(1, 4 // tf.as_dtype(field.dtype).size)
