"""Contracts of `Transport` and of `Route`, a method bound to a transport."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import CollectiveCall, Collectives
from tfgradcomp.compressors.base import (
    Compressed,
    checked_compress,
    checked_prepare,
)
from tfgradcomp.core import Context, Field, Fields, Layout, State, contracts
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.core.waiting_elements import WaitingElements
from tfgradcomp.methods import Method
from tfgradcomp.transports.messages import (
    joined_numbers,
    message_words,
    split_numbers,
)


class Words(NamedTuple):
    """Mean numbers of 32-bit words that a worker sends and receives in a step."""

    sent: float
    received: float


class PendingExchange(NamedTuple):
    """An exchange between `Route.push` and `Route.pull`.

    Attributes:
        context: The step of the payload.
        content: Data that `push` passes to `pull`; each route defines its type.
    """

    context: Context
    content: Any


class ExchangeResult(NamedTuple):
    """The result of an exchange.

    Attributes:
        update: float32 vector, the same on all workers.
        state: The part of the server's new state that this worker holds.
        nonfinite_flags: All workers' flags, int32 `[N]`.
        variable_length_words: int32, the words that this worker passed to collectives
            in addition to those that `Route.calls` declares.
    """

    update: Vector
    state: State
    nonfinite_flags: tf.Tensor
    variable_length_words: tf.Tensor | int = 0


class Route:
    """A method bound to a transport and a layout: all geometry, computed once.

    A step passes only values that change: payload, state, context and flag.

    Attributes:
        collectives: The collectives between the workers.
        method: The method, with chains of components fused.
        layout: The blocks of the flat vector.
        call_site: Name of the call site, the same on all workers.
        fields: The fields of a payload that travel.
        max_reduced_fields: The fields that are reduced to their maximum.
        num_max_reduced: Number of elements in these fields.
        mean_reduced_fields: The fields that are reduced to their mean.
        num_workers: Python integer N.
        local_state_size: Elements of a vector of the server's state on this worker.
        exchanges_every_step: Whether servers wait for a message in each step, also from
            variables without a gradient. Such servers keep their state themselves.
        sends_shared_fields: Whether servers need the `shared` fields of a payload in
            messages; workers that are servers have them.
    """

    exchanges_every_step: ClassVar[bool] = False
    sends_shared_fields: ClassVar[bool] = True

    def __init__(
        self, collectives: Collectives, method: Method, layout: Layout, call_site: str
    ):
        self.collectives = collectives
        self.method = method
        self.layout = layout
        self.call_site = call_site
        self.num_workers = collectives.num_workers
        compressor = method.compressor
        self.fields = {
            name: field
            for name, field in compressor.fields(layout).items()
            if self.sends_shared_fields or not field.shared
        }
        self.max_reduced_fields = compressor.max_reduced_fields(layout)
        self.num_max_reduced = sum(f.count for f in self.max_reduced_fields.values())
        self.mean_reduced_fields = compressor.mean_reduced_fields(layout)
        self._means: dict[str, dict[str, Field]] = {}
        for name, field in self.mean_reduced_fields.items():
            self._means.setdefault(field.dtype, {})[name] = field
        self.local_state_size = layout.size

    def rebound(self) -> Route:
        """Returns a new route, for collectives whose workers have changed."""
        return type(self)(self.collectives, self.method, self.layout, self.call_site)

    def without(self, waiting: WaitingElements) -> Route:
        """Returns a route for steps in which some elements take no part.

        Blocks are cut between these elements and the others. A server that compresses
        blocks of one size gets no others: there the result is this route.
        """
        layout = self.layout.cut_at(waiting.edges)
        alignment = self.method.server.shard_alignment
        if layout == self.layout or alignment(layout) != alignment(self.layout):
            return self
        call_site = f"{self.call_site}/{waiting.name}"
        return type(self)(self.collectives, self.method, layout, call_site)

    # A step.

    def init_state(self) -> State:
        """Returns the part of the server's first state that this worker holds."""
        by_tensor = self.method.needs_whole_tensors
        return contracts.initial_state(self.method.server, self.layout, by_tensor)

    def compress(
        self, x: Vector, state: State, server_state: State, context: Context
    ) -> tuple[Compressed, Context]:
        """Compresses this worker's vector, after the first round if there is one.

        Args:
            x: float32 vector of the layout's size.
            state: The compressor's state.
            server_state: The server's state, as far as it is held here.
            context: The step.

        Returns:
            The result, and the step with the result of the first round.

        Raises:
            ValueError: If the compressor returns tensors of other names, shapes or
                types than it declares.
        """
        compressor, layout = self.method.compressor, self.layout
        if self.method.server.read_by_workers:
            context = context._replace(server_state=server_state)
        prepared = checked_prepare(compressor, x, state, layout, context)
        prepared = self.reduce_mean(self.reduce_max(prepared, server_state))
        context = context._replace(prepared=prepared)
        return checked_compress(compressor, x, state, layout, context), context

    def reduce_max(self, prepared: Fields, state: State) -> Fields:
        """Takes the first round: replaces values by their maxima over all workers.

        Args:
            prepared: The result of `Compressor.prepare` on this worker.
            state: The part of the server's state that this worker holds.
        """
        if not self.max_reduced_fields:
            return prepared
        local = joined_numbers(prepared, self.max_reduced_fields)
        maxima = self.collectives.max(local, self.call_site)
        return {**prepared, **split_numbers(maxima, self.max_reduced_fields)}

    def reduce_mean(self, prepared: Fields) -> Fields:
        """Takes the first round: replaces values by their means over all workers.

        There is a collective for each type of numbers. Numbers are divided by N before
        the sum, so that half floats do not overflow.
        """
        for dtype, fields in self._means.items():
            local = joined_numbers(prepared, fields) / self.num_workers
            means = self.collectives.sum(local, f"{self.call_site}/{dtype}")
            prepared = {**prepared, **split_numbers(means, fields)}
        return prepared

    def push(
        self,
        payload: dict[str, tf.Tensor],
        state: State,
        context: Context,
        flag: tf.Tensor,
    ) -> PendingExchange:
        """Sends this worker's payload to the server.

        Args:
            payload: A tensor for each of `fields`.
            state: The part of the server's state that this worker holds.
            context: The step.
            flag: int32 scalar in [0, 2**24): 0 if the payload is finite; else the
                place of a value that is not.
        """
        raise NotImplementedError

    def pull(self, pending: PendingExchange, state: State) -> ExchangeResult:
        """Returns the decoded reply to the payloads of all workers.

        Args:
            pending: The result of `push`.
            state: The part of the server's state that this worker holds.
        """
        raise NotImplementedError

    def with_shared(self, payloads: Fields, payload: Fields) -> Fields:
        """Returns all workers' payloads, with the shared fields of this worker's.

        Args:
            payloads: The fields that travelled, with a leading axis of workers.
            payload: This worker's fields.
        """
        others = payload.keys() - payloads.keys()
        shared = {name: tf.stack([payload[name]] * self.num_workers) for name in others}
        return {**payloads, **shared}

    def received(self, state: State, result: ExchangeResult, context: Context) -> State:
        """Returns the compressor's state after an exchange.

        Args:
            state: The state that `compress` returned.
            result: The result of the exchange.
            context: The step that `compress` returned.

        Raises:
            ValueError: If the new state has not the form of the old one.
        """
        compressor = self.method.compressor
        if not compressor.hears_reply:
            return state
        new = compressor.received(state, result.update, self.layout, context)
        contracts.check_state(compressor, "received", new, state)
        return new

    def exchange(
        self,
        payload: dict[str, tf.Tensor],
        state: State,
        context: Context,
        flag: tf.Tensor,
    ) -> ExchangeResult:
        """Sends this worker's payload to the server and decodes the reply."""
        result = self.pull(self.push(payload, state, context, flag), state)
        return self.checked(result, state)

    def checked(self, result: ExchangeResult, state: State) -> ExchangeResult:
        """Returns a result after a comparison of its update and state.

        Args:
            result: The result.
            state: The server's state before it, as far as it is held here.

        Raises:
            ValueError: If the update is no float32 vector of the layout's size, or if
                the new state has not the form of the old one.
        """
        server = self.method.server
        contracts.check_vector(server, "decompress", result.update, self.layout)
        contracts.check_state(server, "combine", result.state, state)
        return result

    # Costs.

    @property
    def calls(self) -> list[CollectiveCall]:
        """The collectives of a step, first round and flags included.

        Collectives whose size varies from step to step are left out.
        """
        count = self.num_max_reduced
        maxima = [CollectiveCall("max", count)] if count else []
        means = [CollectiveCall("sum", message_words(f)) for f in self._means.values()]
        return maxima + means + self._exchange_calls()

    def _exchange_calls(self) -> list[CollectiveCall]:
        """Returns the collectives of `exchange`; by default it declares none."""
        return []

    @property
    def reply_fields(self) -> dict[str, Field]:
        """The fields of a reply in the form that this route carries."""
        return self.method.server.reply_fields(self.layout, self.num_workers)

    @property
    def words(self) -> Words:
        """The words of a step, without those whose number varies between steps."""
        return Words(
            sent=sum(map(self.collectives.words_sent, self.calls)),
            received=sum(map(self.collectives.words_received, self.calls)),
        )

    # The server's state as whole vectors, independent of its place.

    def owned_range(self, rank: int) -> range:
        """Returns the elements of the layout whose server state a worker holds."""
        return range(self.layout.size)

    def to_whole(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Joins a vector of the server's state.

        Args:
            parts: The vector `[local_state_size]` as each worker holds it, by ranks; or
                one of another size, which all workers hold.

        Returns:
            The vector, `[layout.size]`.
        """
        if len(parts[0]) != self.local_state_size:
            return parts[0]
        whole = np.zeros([self.layout.size], np.float32)
        for rank, part in enumerate(parts):
            owned = self.owned_range(rank)
            whole[owned.start : owned.stop] = part[: len(owned)]
        return whole

    def from_whole(self, whole: np.ndarray, rank: int) -> np.ndarray:
        """Returns a worker's part of a whole vector, as `to_whole` joins it."""
        if len(whole) != self.layout.size:
            return whole
        owned = self.owned_range(rank)
        part = np.zeros([self.local_state_size], np.float32)
        part[: len(owned)] = whole[owned.start : owned.stop]
        return part


class Transport:
    """Decides where the server is, and binds methods to routes to that server.

    Attributes:
        payload_kind: Human-readable description of the payloads that it supports.
        route_class: The class of its routes.
        carries_plain: Whether uncompressed vectors must use this transport, too.
        carries_tables: Whether rows of embedding tables may use `Rows` instead.
        collectives: The collectives between the workers.
    """

    payload_kind: ClassVar[str] = "any payload"
    route_class: ClassVar[type[Route]] = Route
    carries_plain: ClassVar[bool] = False
    carries_tables: ClassVar[bool] = True

    def __init__(self, collectives: Collectives):
        self.collectives = collectives

    def renewed(self) -> Transport:
        """Returns this transport for another optimizer, with call sites of its own."""
        other = copy.copy(self)
        other.collectives = self.collectives.renewed()
        return other

    def supports(self, method: Method, layout: Layout) -> bool:
        """Returns whether this transport can carry the payloads of a fused method."""
        return True

    def bind(self, method: Method, layout: Layout, call_site: str) -> Route:
        """Returns the route of a method, with all geometry computed.

        Args:
            method: The method.
            layout: The blocks of the flat vector.
            call_site: Name of the call site, the same on all workers and different
                for each route.

        Raises:
            ValueError: If the transport cannot carry the method's payloads.
        """
        fused = method.fused()
        if not self.supports(fused, layout):
            raise ValueError(
                f"transport={type(self).__name__} cannot carry this method's payloads: "
                f"it carries {self.payload_kind}. Use transport='auto'. "
                f"Received: method={method}"
            )
        return self.route_class(self.collectives, fused, layout, call_site)
