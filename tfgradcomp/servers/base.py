"""What a server is: the half of a method that combines the workers' payloads."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp.compressors.base import Component, Context, Field, Layout, State


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

    def uncompressed(self) -> Server:
        """Returns the same rule for float32 payloads, for what is not compressed."""
        from tfgradcomp.servers.mean import Mean

        return Mean()
