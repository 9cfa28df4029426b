"""The contract of a transport and of a route, a method on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import CollectiveCall, Collectives
from tfgradcomp.core import Context, Field, Layout, State
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.methods import Method


class Words(NamedTuple):
    """32-bit words that a worker sends and receives in a step, on average."""

    sent: float
    received: float


class PendingExchange(NamedTuple):
    """A payload between `Route.push` and `Route.pull`.

    Attributes:
        context: The step that it belongs to.
        content: What the route needs to go on; the route's own affair.
    """

    context: Context
    content: Any


class ExchangeResult(NamedTuple):
    """The result of an exchange.

    Attributes:
        update: float32 vector, the same on all workers.
        state: The server's new state, as far as it is held here.
        nonfinite_flags: All workers' flags, int32 `[N]`.
        variable_length_words: int32, the words that this worker handed to collectives
            in addition to those that `Route.calls` declares.
    """

    update: Vector
    state: State
    nonfinite_flags: tf.Tensor
    variable_length_words: tf.Tensor | int = 0


class Route:
    """A method bound to a transport and a layout: all geometry, computed once.

    A step passes only what changes: payload, state, context and flag.

    Attributes:
        collectives: What moves vectors between the workers.
        method: The method, with chains of components fused.
        layout: The blocks of the flat vector.
        call_site: Name of the call site, the same on all workers.
        fields: The fields of a payload.
        max_reduced_fields: The fields of the first round; empty where there is none.
        num_workers: Python integer N.
        local_state_size: Elements of a vector of the server's state held here.
    """

    def __init__(
        self, collectives: Collectives, method: Method, layout: Layout, call_site: str
    ):
        self.collectives = collectives
        self.method = method
        self.layout = layout
        self.call_site = call_site
        self.num_workers = collectives.num_workers
        self.fields = method.compressor.fields(layout)
        self.max_reduced_fields = method.compressor.max_reduced_fields(layout)
        self.local_state_size = layout.size

    def rebound(self) -> Route:
        """Returns the route anew, for collectives whose workers have changed."""
        return type(self)(self.collectives, self.method, self.layout, self.call_site)

    # What a step does.

    def init_state(self) -> State:
        """Returns the server's first state, as far as it is held here."""
        return self.method.server.init(self.layout)

    def reduce_max(
        self, prepared: dict[str, tf.Tensor], state: State
    ) -> dict[str, tf.Tensor]:
        """Takes the first round: reduces what `Compressor.prepare` returned.

        Args:
            prepared: What `Compressor.prepare` returned on this worker.
            state: The server's state, as far as it is held here.
        """
        names = [*self.max_reduced_fields]
        if not names:
            return prepared
        sizes = [self.max_reduced_fields[name].count for name in names]
        local = tf.concat([prepared[name] for name in names], 0)
        parts = tf.split(self.collectives.max(local, self.call_site), sizes)
        return {**prepared, **dict(zip(names, parts, strict=True))}

    def push(
        self,
        payload: dict[str, tf.Tensor],
        state: State,
        context: Context,
        flag: tf.Tensor,
    ) -> PendingExchange:
        """Sends this worker's payload on its way to the server.

        Args:
            payload: A tensor for each of `fields`.
            state: The server's state, as far as it is held here.
            context: The step.
            flag: int32 scalar in [0, 2**24): 0, or what is not finite on this worker.
        """
        raise NotImplementedError

    def pull(self, pending: PendingExchange, state: State) -> ExchangeResult:
        """Returns the decoded reply to the payloads of all workers.

        Args:
            pending: What `push` returned.
            state: The server's state, as far as it is held here.
        """
        raise NotImplementedError

    def exchange(
        self,
        payload: dict[str, tf.Tensor],
        state: State,
        context: Context,
        flag: tf.Tensor,
    ) -> ExchangeResult:
        """Carries one payload a worker to the server, and decodes the reply."""
        return self.pull(self.push(payload, state, context, flag), state)

    # What it costs.

    @property
    def calls(self) -> list[CollectiveCall]:
        """The collectives of a step, first round and flags included.

        Whatever varies from step to step is left out.
        """
        count = sum(field.count for field in self.max_reduced_fields.values())
        first_round = [CollectiveCall("max", count)] if count else []
        return first_round + self._exchange_calls()

    def _exchange_calls(self) -> list[CollectiveCall]:
        raise NotImplementedError

    @property
    def reply_fields(self) -> dict[str, Field]:
        """The fields of a reply, as this route carries it."""
        return self.method.server.reply_fields(self.layout, self.num_workers)

    @property
    def words(self) -> Words:
        """The words that a step moves, without those that vary from step to step."""
        return Words(
            sent=sum(map(self.collectives.words_sent, self.calls)),
            received=sum(map(self.collectives.words_received, self.calls)),
        )

    # The server's state in one form, wherever it is held.

    def owned_range(self, rank: int) -> range:
        """Returns the elements of the layout whose server state a worker holds."""
        return range(self.layout.size)

    def to_whole(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Joins a vector of the server's state.

        Args:
            parts: The vector `[local_state_size]` as each worker holds it, by ranks.

        Returns:
            The vector, `[layout.size]`.
        """
        whole = np.zeros([self.layout.size], np.float32)
        for rank, part in enumerate(parts):
            owned = self.owned_range(rank)
            whole[owned.start : owned.stop] = part[: len(owned)]
        return whole

    def from_whole(self, whole: np.ndarray, rank: int) -> np.ndarray:
        """Returns what a worker holds, `[local_state_size]`, of a whole vector."""
        owned = self.owned_range(rank)
        part = np.zeros([self.local_state_size], np.float32)
        part[: len(owned)] = whole[owned.start : owned.stop]
        return part


class Transport:
    """Says where the server is, and binds methods to routes there.

    Attributes:
        payload_kind: Human-readable description of the payloads that it supports.
        route_class: The class of its routes.
        carries_plain: Whether what is not compressed must go this way, too.
        carries_tables: Whether rows of tables of embeddings may go by `Rows` beside it.
        collectives: What moves vectors between the workers.
    """

    payload_kind: ClassVar[str] = "any payload"
    route_class: ClassVar[type[Route]] = Route
    carries_plain: ClassVar[bool] = False
    carries_tables: ClassVar[bool] = True

    def __init__(self, collectives: Collectives):
        self.collectives = collectives

    def supports(self, method: Method, layout: Layout) -> bool:
        """Returns whether the payloads of a fused method can go this way."""
        return True

    def bind(self, method: Method, layout: Layout, call_site: str) -> Route:
        """Puts together, once, what does not change from step to step.

        Args:
            method: The method.
            layout: The blocks of the flat vector.
            call_site: Name of the call site, the same on all workers; distinct for
                distinct routes.

        Raises:
            ValueError: If the transport cannot carry the method's payloads.
        """
        fused = method.fused()
        if not self.supports(fused, layout):
            raise ValueError(
                f"transport={type(self).__name__} cannot carry what this method sends: "
                f"it carries {self.payload_kind}. Use transport='auto'. "
                f"Received: method={method}"
            )
        return self.route_class(self.collectives, fused, layout, call_site)
