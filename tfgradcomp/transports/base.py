"""What a transport is: it moves words, and knows no method by name."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import tensorflow as tf

from tfgradcomp.compressors.base import Compressor, Context, Field, Layout, State
from tfgradcomp.ops import SplitVector
from tfgradcomp.servers.base import Server
from tfgradcomp.collectives.base import Collectives


class Words(NamedTuple):
    """32-bit words that a worker sends and receives in a step, on average."""

    sent: float
    received: float


class Call(NamedTuple):
    """A collective.

    Attributes:
        kind: Name of a method of `Collectives`: gather, all_to_all, sum or max.
        words: 32-bit words that a worker hands to it.
    """

    kind: str
    words: int

    def moved(self, num_workers: int) -> float:
        """Returns the words that a worker sends, which are as many as it receives."""
        others = num_workers - 1
        if self.kind == "gather":
            return others * self.words
        if self.kind == "all_to_all":
            return others / num_workers * self.words
        # A ring: every word goes round twice, less the own part.
        return 2 * others / num_workers * self.words


class Outcome(NamedTuple):
    """What an exchange gives.

    Attributes:
        update: float32, the same on all workers.
        server_state: The server's new state, as far as it is held here.
        statuses: All workers' statuses, int32 `[N]`.
        varying_words: int32, the words that this worker handed to collectives besides
            those that `Transport.calls` declares.
    """

    update: tf.Tensor | SplitVector
    server_state: State
    statuses: tf.Tensor
    varying_words: tf.Tensor | int = 0


class Transport:
    """Carries payloads to where the server is, and replies back.

    Attributes:
        carries: What a method must send to go this way, in words.
        collectives: What moves vectors between the workers.
    """

    carries: ClassVar[str] = "any payload"

    def __init__(self, collectives: Collectives):
        self.collectives = collectives

    def can_carry(self, compressor: Compressor, server: Server, layout: Layout) -> bool:
        """Returns whether what the method sends can go this way."""
        return True

    def init_server(
        self, compressor: Compressor, server: Server, layout: Layout
    ) -> State:
        """Returns the server's first state, as far as it is held here."""
        return server.init(layout)

    def held(
        self,
        rank: int,
        compressor: Compressor,
        server: Server,
        layout: Layout,
    ) -> range:
        """Returns the elements whose server state a worker holds."""
        return range(layout.size)

    def exchange(
        self,
        payload: dict[str, tf.Tensor],
        compressor: Compressor,
        server: Server,
        server_state: State,
        layout: Layout,
        context: Context,
        status: tf.Tensor,
        site: str,
    ) -> Outcome:
        """Carries one payload a worker to the server, and decodes the reply.

        Args:
            payload: A tensor for each of the compressor's fields.
            compressor: Says what the fields are.
            server: The rule that combines the payloads.
            server_state: The server's state, as far as it is held here.
            layout: The blocks of the flat vector.
            context: The step.
            status: int32 scalar in [0, 2**24), a word that all workers shall see.
            site: Name of the call site, the same on all workers.
        """
        raise NotImplementedError

    def reply_fields(
        self, compressor: Compressor, server: Server, layout: Layout, num_workers: int
    ) -> dict[str, Field]:
        """Returns what a reply is made of where this transport carries one."""
        return server.reply_fields(layout, num_workers)

    def calls(
        self, compressor: Compressor, server: Server, layout: Layout
    ) -> list[Call]:
        """Returns the collectives of an exchange, the status included.

        What varies from step to step is left out.
        """
        raise NotImplementedError

    def words(self, compressor: Compressor, server: Server, layout: Layout) -> Words:
        """Returns what an exchange moves, besides what varies from step to step."""
        calls = self.calls(compressor, server, layout)
        moved = sum(self.collectives.moved(call) for call in calls)
        return Words(sent=moved, received=moved)
