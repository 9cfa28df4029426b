"""What a server is: the half of a method that combines the workers' payloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from tfgradcomp.compressors.base import Component, Context, Field, Layout, State
from tfgradcomp.ops.block_sums import Part


class Shard(NamedTuple):
    """A part of the vector that a server holds by itself.

    Attributes:
        begin: Its first element.
        end: The element after its last.
        first_block: Index of the first block that reaches into it.
        layout: What of the blocks lies within it.
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


@dataclass(frozen=True)
class Server(Component):
    """The server's half of a method: pure functions, in the manner of `Compressor`.

    Wherever a transport puts it, it computes the same reply from the same payloads.
    """

    def reply_fields(self, layout: Layout, num_workers: int) -> dict[str, Field]:
        """Declares what a reply is made of: the only statement of its size."""
        raise NotImplementedError

    def init(self, layout: Layout) -> State:
        """Returns the state before the first step."""
        return ()

    def combine(
        self,
        payloads: dict[str, tf.Tensor],
        state: State,
        layout: Layout,
        context: Context,
    ):
        """Returns the reply to the workers' payloads, and the new state.

        Args:
            payloads: The fields of the compressor, with a leading axis of workers.
            state: What `init` or the last call returned.
            layout: The blocks of the flat vector.
            context: The step; its `rank` means nothing here.
        """
        raise NotImplementedError

    def decompress(self, reply, layout: Layout, num_workers: int) -> tf.Tensor:
        """Returns the float32 vector of `layout.size` that all workers apply."""
        raise NotImplementedError

    def update(self, payloads, state: State, layout: Layout, context: Context):
        """Returns the decompressed reply at once, and the new state.

        For where the server is on every worker and no reply has to travel: a server
        may then skip the words.
        """
        reply, state = self.combine(payloads, state, layout, context)
        return self.decompress(reply, layout, context.num_workers), state

    @property
    def is_blockwise(self) -> bool:
        """Whether each block is combined by itself."""
        return True

    # The same in shards, each served by itself.

    def unit(self, layout: Layout) -> int | None:
        """Returns the number of elements between which shards may be cut.

        1 where the reply to an element depends on what was sent for it and its block;
        None where it depends on the whole vector.
        """
        return 1

    def shard_fields(self, shard: Shard, num_workers: int) -> dict[str, Field]:
        """Declares what the reply of a shard is made of."""
        return self.reply_fields(shard.layout, num_workers)

    def combine_shard(self, payloads, state: State, shard: Shard, context: Context):
        """As `combine`: the shard's reply to the shards of payloads, the new state."""
        return self.combine(payloads, state, shard.layout, context)

    def reply_of(self, parts: dict[str, tf.Tensor], layout: Layout):
        """Returns the reply for the whole vector.

        Args:
            parts: The shards' replies joined: sums of parts have become those of
                blocks.
            layout: The blocks of the whole vector.
        """
        return parts

    def settle(
        self, payloads, part, reply, state: State, shard: Shard, context: Context
    ) -> State:
        """Returns the state of the shard once the whole reply is known.

        Args:
            payloads: As in `combine_shard`.
            part: The reply that `combine_shard` returned.
            reply: The reply for the whole vector.
            state: The state that `combine_shard` returned.
            shard: The shard.
            context: The step.
        """
        return state

    # Codes that are added up on their way.

    def sum_base(self, layout: Layout, num_workers: int) -> int | None:
        """Returns the base of the sums of all workers' codes.

        None where the server needs more of the payloads than the sum of their codes.
        """
        return None

    def update_of_sum(
        self, words, payload, state: State, layout: Layout, context: Context
    ):
        """As `update`, of codes that were added up already.

        Args:
            words: The sums of the field `codes` over workers, in base `sum_base`.
            payload: The other fields, the same on all workers.
            state: As in `combine`.
            layout: The blocks of the flat vector.
            context: The step.
        """
        raise NotImplementedError

    def uncompressed(self) -> Server:
        """Returns the same rule for float32 payloads, for what is not compressed."""
        from tfgradcomp.servers.mean import Mean

        return Mean()
