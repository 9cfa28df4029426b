"""Every worker is the server of its own shard of the vector."""

from __future__ import annotations

import functools
import itertools
import math

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.compressors.base import Compressor, Field, Layout
from tfgradcomp.ops import digits_per_word, words_for
from tfgradcomp.ops.block_sums import CHUNK, add_up, parts_of
from tfgradcomp.servers.base import Server, Shard
from tfgradcomp.transports.base import Call, Outcome, Transport
from tfgradcomp.transports import messages


class Sharded(Transport):
    r"""An all-to-all of payload shards, then an all-gather of the shards' replies.

    A worker receives \( \frac{N-1}{N} (b + r) \) bits an element, however many there
    are: b of the payload, r of the reply. The server's state is sharded as well.
    """

    carries = "parts of a vector, in blocks of one size where the server compresses"

    def can_carry(self, compressor, server, layout):
        """There must be shards of payloads that can be served one by one."""
        fields = compressor.fields(layout).values()
        return server.unit(layout) is not None and all(f.per for f in fields)

    @override
    def init_server(self, compressor, server, layout):
        shards = _shards(compressor, server, layout, self.collectives.num_workers)
        return server.init(Layout.from_sizes([shards.width]))

    @override
    def held(self, rank, compressor, server, layout):
        num_workers = self.collectives.num_workers
        shard = _shards(compressor, server, layout, num_workers)[rank]
        return range(shard.begin, shard.end)

    @override
    def exchange(
        self, payload, compressor, server, server_state, layout, context, status, site
    ):
        num_workers = self.collectives.num_workers
        shards = _shards(compressor, server, layout, num_workers)
        shard = shards[self.collectives.rank]

        rows = messages.pack(shards.cut(payload), shards.payload_fields)
        rows = tf.concat([tf.fill([num_workers, 1], status), rows], 1)
        rows = self.collectives.all_to_all(rows, site)
        payloads = shards.held(rows[:, 1:], compressor.fields(shard.layout))

        context = context._replace(offset=context.offset + shard.begin)
        state = tf.nest.map_structure(lambda s: s[: shard.size], server_state)
        part, state = server.combine_shard(payloads, state, shard, context)
        parts = self.collectives.gather(shards.message(part), site)
        reply = server.reply_of(shards.join(parts), layout)
        state = server.settle(payloads, part, reply, state, shard, context)
        state = tf.nest.map_structure(
            lambda s: tf.pad(s, [[0, shards.width - shard.size]]), state
        )
        update = server.decompress(reply, layout, num_workers)
        return Outcome(update, state, rows[:, 0])

    @override
    def calls(self, compressor, server, layout):
        num_workers = self.collectives.num_workers
        shards = _shards(compressor, server, layout, num_workers)
        row = 1 + messages.message_words(shards.payload_fields)
        return [
            Call("all_to_all", num_workers * row),
            Call("gather", messages.message_words(shards.reply_fields)),
        ]


class Shards:
    """The vector in parts, and what of a payload or a reply belongs to each.

    All are `width` elements wide but the last ones, which may be shorter or empty. They
    are cut between the words of payload and reply and between the chunks of a sum.
    Rows of messages are equally long: each field is padded to its longest.

    Attributes:
        layout: The blocks of the whole vector.
        width: Elements of a shard, at most.
        payload_fields: What a worker sends to who serves a part.
        reply_fields: What that one replies to all.
    """

    def __init__(
        self,
        compressor: Compressor,
        server: Server,
        layout: Layout,
        num_workers: int,
        num_shards: int,
    ):
        self.layout = layout
        fields = [
            *compressor.fields(layout).values(),
            *server.reply_fields(layout, num_workers).values(),
        ]
        unit = math.lcm(CHUNK, server.unit(layout), *map(_per_word, fields))
        width = unit * math.ceil(layout.size / unit / num_shards)
        # Where nothing can be cut, one worker serves all of it.
        self.width = min(width, layout.size)
        cuts = [min(i * self.width, layout.size) for i in range(num_shards + 1)]
        shards = [_shard(layout, *cut) for cut in itertools.pairwise(cuts)]
        self._shards = shards
        self.payload_fields = _longest(compressor.fields(s.layout) for s in shards)
        self.reply_fields = _longest(
            server.shard_fields(s, num_workers) for s in shards
        )

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, rank: int) -> Shard:
        return self._shards[rank]

    def cut(self, payload: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the fields of a payload with a row for each shard."""
        return {
            name: self._rows(payload[name], field)
            for name, field in self.payload_fields.items()
        }

    def held(self, rows: tf.Tensor, fields: dict[str, Field]) -> dict[str, tf.Tensor]:
        """Returns the fields of the own shard, of what all workers sent."""
        payloads = messages.unpack(rows, self.payload_fields)
        return {
            name: payloads[name][:, : _length(field)] for name, field in fields.items()
        }

    def message(self, part: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns the words of the own shard's reply."""
        fields = self.reply_fields
        padded = {name: _padded(part[name], _length(fields[name])) for name in fields}
        return messages.pack(padded, fields)

    def part_of(
        self, message: tf.Tensor, fields: dict[str, Field]
    ) -> dict[str, tf.Tensor]:
        """Returns the fields of a shard's reply, of the words of `message`."""
        part = messages.unpack(message, self.reply_fields)
        return {name: part[name][: _length(field)] for name, field in fields.items()}

    def join(self, messages: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the fields of the whole vector, of the replies of all shards."""
        parts = messages.unpack(messages, self.reply_fields)
        return {
            name: self._whole(parts[name], field)
            for name, field in self.reply_fields.items()
        }

    def _rows(self, values, field):
        shards = len(self._shards)
        if field.per == "element":
            row = _length(field)
            return tf.reshape(_padded(values, shards * row), [shards, row])
        blocks = field.count // field.each
        index = [
            [min(i, self.layout.num_blocks - 1) for i in _span(shard, blocks)]
            for shard in self._shards
        ]
        rows = tf.gather(tf.reshape(values, [-1, field.each]), index)
        return tf.reshape(rows, [shards, field.count])

    def _whole(self, parts, field):
        if field.per == "element":
            size = _length(field._replace(count=self.layout.size * field.each))
            return tf.reshape(parts, [-1])[:size]
        flat = tf.reshape(parts, [-1])
        if field.per == "block":
            blocks = field.count // field.each
            places = {
                block: rank * blocks + i
                for rank, shard in reversed([*enumerate(self._shards)])
                for i, block in enumerate(_span(shard, shard.layout.num_blocks))
            }
            index = [places[block] for block in range(self.layout.num_blocks)]
            rows = tf.reshape(flat, [-1, field.each])
            return tf.reshape(tf.gather(rows, tf.constant(index, tf.int32)), [-1])
        sums = [
            (part, rank * field.count + i)
            for rank, shard in enumerate(self._shards)
            for i, part in enumerate(shard.parts)
        ]
        index = tf.constant([place for _, place in sums], tf.int32)
        return add_up(
            tf.gather(flat, index), [part for part, _ in sums], self.layout.row_splits
        )


@functools.lru_cache(maxsize=64)
def _shards(compressor, server, layout, num_workers):
    return Shards(compressor, server, layout, num_workers, num_workers)


def _shard(layout, begin, end):
    blocks = layout.blocks_in(begin, end)
    parts = parts_of(layout.row_splits, begin, end)
    return Shard(begin, end, blocks.start, layout.part(begin, end), tuple(parts))


def _span(shard, count):
    return range(shard.first_block, shard.first_block + count)


def _longest(fields_of_shards):
    longest = {}
    for fields in fields_of_shards:
        for name, field in fields.items():
            if name not in longest or longest[name].count < field.count:
                longest[name] = field
    return longest


def _per_word(field):
    if field.base is not None:
        return digits_per_word(field.base)
    return max(1, 4 // tf.as_dtype(field.dtype).size)


def _length(field):
    return field.count if field.base is None else words_for(field.count, field.base)


def _padded(vector, size):
    return tf.pad(vector, [[0, size - vector.shape[0]]])
