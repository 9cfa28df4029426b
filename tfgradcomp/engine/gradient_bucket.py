"""A segment of the flat gradient, with the routes that carry it and its state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, cast

import tensorflow as tf

from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.core import Context, SplitVector, State
from tfgradcomp.core.contracts import check_state, initial_state, leaf_sizes
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.core.waiting_elements import WaitingElements
from tfgradcomp.engine.bucket_ranges import BucketRange
from tfgradcomp.engine.flat_vectors import FlatVector
from tfgradcomp.engine.probe import ExchangeObserver
from tfgradcomp.engine.segment import Segment
from tfgradcomp.engine.step_records import (
    BucketResult,
    BucketState,
    StateLeaf,
    StepInputs,
)
from tfgradcomp.engine.waiting_pieces import merged, waiting_elements
from tfgradcomp.ops.normal import gaussian
from tfgradcomp.transports import Route, SharedGather
from tfgradcomp.transports.messages import has_variable_length
from tfgradcomp.transports.rows import TouchedRows


class Operands(NamedTuple):
    """The operands of an exchange: a vector, its state, a route and the step.

    Attributes:
        bucket: The bucket that this device exchanges.
        route: The route of this step.
        x: This worker's mean gradient, flat.
        state: The values of the state before the step.
        weights: The weights that the weight decay is computed from, flat; None where
            the method has no weight decay.
        context: The step, at the place of `x` in the model.
        num_variables: Number of the model's variables.
        rows: The rows of a table that `x` consists of; None: the whole bucket.
    """

    bucket: GradientBucket
    route: Route
    x: SplitVector
    state: BucketState
    weights: Vector | None
    context: Context
    num_variables: int
    rows: TouchedRows | None = None


class GradientBucket(Segment):
    """A segment of the flat gradient that one device of a worker exchanges.

    Attributes:
        route: The method, bound to its transport.
        uncompressed_route: The route of uncompressed steps; `route` where there are
            none, or where nothing is compressed.
        is_compressed: Whether the method compresses; otherwise float32 travels.
        has_variable_length: Whether its messages vary in length.
        takes_rows: Whether it takes a gradient that names rows of a table.
        can_batch: Whether its payload may share a message with those of other buckets.
        offset: Index of its first element, padding included, among all elements of the
            model that draw random numbers.
        state: The variables of its state.
        leaves: The leaves of its state, in the order of `tf.nest.flatten`.
        parts: The bucket that each device of a worker exchanges; here there is one.
        waiting: The elements that take no part in the step; None where all do.
    """

    takes_rows = False
    waiting: WaitingElements | None = None

    def __init__(
        self,
        vector: FlatVector,
        bucket_range: BucketRange,
        route: Route,
        uncompressed_route: Route | None = None,
        accumulates: bool = False,
        create_variable: Callable = PerReplicaVariable.known,
    ):
        """Creates the variables of the state.

        Args:
            vector: The flat vector.
            bucket_range: The range of the vector.
            route: The method, bound to its transport; its call site names the bucket.
            uncompressed_route: The route of uncompressed steps, if there are any.
            accumulates: Whether second moments accumulate over several calls.
            create_variable: Function of a value and a name.
        """
        super().__init__(vector, route.call_site, bucket_range, route.layout)
        self.route, self.uncompressed_route = route, uncompressed_route or route
        self.is_compressed = vector.is_compressed
        self.can_batch = SharedGather.takes(route)
        self.has_variable_length = has_variable_length(route.fields)
        self.offset = vector.stream_offset + bucket_range.offset
        self.parts: tuple[GradientBucket, ...] = (self,)
        self._accumulates = accumulates
        initial = self._initial_state()
        self.leaves = self._leaves(initial)
        values = tf.nest.flatten(initial)
        variables = [
            create_variable(value, f"{self.name}.{leaf.name}")
            for leaf, value in zip(self.leaves, values, strict=True)
        ]
        self.state = tf.nest.pack_sequence_as(initial, variables)

    def _initial_state(self):
        method, layout = self.route.method, self.layout
        decay, by_tensor = method.weight_decay, method.needs_whole_tensors
        return BucketState(
            worker=initial_state(method.compressor, layout, by_tensor),
            moments=tf.zeros([self.layout.size]) if self._accumulates else (),
            server=self.route.init_state(),
            local=initial_state(decay, layout) if decay else (),
        )

    def _leaves(self, state):
        """Returns the leaves of a state."""
        method, layout = self.route.method, self.layout
        items = {}
        if method.needs_whole_tensors:
            halves = {"worker": method.compressor, "server": method.server}
            items = {r: iter(leaf_sizes(h, layout)) for r, h in halves.items()}
        by_element, leaves = layout.sizes or (), []
        for role, name, _ in state.named_leaves():
            sizes = next(items[role]) if role in items else by_element
            if role == "server" and sizes != by_element:
                # Only servers of whole vectors have such a leaf: all are equal.
                role, name = "local", name.replace("server", "local", 1)
            leaves.append(StateLeaf(role, name, sizes))
        return leaves

    @property
    def declared_routes(self) -> list[Route]:
        """The routes whose traffic is known before a step."""
        return [self.route]

    def rebind(self) -> None:
        """Binds the method anew after the workers have changed; the state stays."""
        self.route = self.route.rebound()

    def operands(
        self,
        step: StepInputs,
        route_of: Callable[[GradientBucket], Route],
        observer: ExchangeObserver,
    ) -> Operands:
        """Returns the operands of an exchange, by the route of the step."""
        gradients = step.gradients
        observer.note("ready", [gradients.values[p] for p in self.positions])
        route = observer.timed(route_of(self))
        context = step.context._replace(offset=self.offset)
        if route.method.compressor.needs_second_moments:
            moments = self.second_moments(gradients, self.state.moments)
            context = context._replace(second_moments=moments)
        x = self.flatten(gradients.values, gradients.scale)
        state = tf.nest.map_structure(tf.convert_to_tensor, self.state)
        if self.waiting:
            initial = self._initial_state()
            state = self._merged(state, initial, context)
        weights = self.weights_to_decay(step.weights)
        return Operands(self, route, x, state, weights, context, len(gradients.values))

    def completed(self, result: BucketResult, operands: Operands) -> BucketResult:
        """Returns the result for the whole bucket, of the result for some operands."""
        state = self.without_waiting(result.state, operands.context)
        return result._replace(state=state)

    def without_waiting(self, state: BucketState, context: Context) -> BucketState:
        """Returns a new state, with the old one of pieces that wait."""
        if self.waiting is None:
            return state
        return self._merged(state, self.state, context)

    def _merged(self, state, waiting, context):
        """Returns a state in which the elements that wait have another state."""
        owned = self.route.owned_range(context.rank)
        if self.route.exchanges_every_step:
            owned = range(0)
        elements = cast(WaitingElements, self.waiting)
        return merged(elements, self.leaves, state, waiting, owned)

    def with_gradients(self, positions: Collection[int]) -> GradientBucket:
        """Returns this bucket for steps in which some of its variables wait.

        The variables that wait travel as zeros, and nothing of their state changes.
        Blocks are cut between them and the others.

        Args:
            positions: The variables that have a gradient.
        """
        if {*self.positions} <= {*positions}:
            return self
        padding = self.bucket_range.alignment_padding
        waiting = waiting_elements(self.pieces, padding, positions)
        bucket = copy.copy(self)
        bucket.waiting, bucket.parts = waiting, (bucket,)
        bucket.route = self.route.without(waiting)
        return bucket

    def weights_to_decay(self, weights: Sequence) -> SplitVector | None:
        """Returns its share of all weights, flat; None without weight decay."""
        return self.flatten(weights) if self.route.method.weight_decay else None

    def local_terms(
        self, update: Vector, weights: Vector | None, state: State, context: Context
    ) -> tuple[Vector, State]:
        """Adds weight decay and noise, which all workers compute alike.

        Args:
            update: The decoded reply.
            weights: As `weights_to_decay` returns them.
            state: The values of the weight decay's state.
            context: The step.

        Returns:
            The update, and the new state of the weight decay.
        """
        method = self.route.method
        if method.weight_decay:
            before = state
            term, state = method.weight_decay.term(weights, before)
            check_state(method.weight_decay, "term", state, before)
            update += term
        if method.noise_std:
            # The wrapper's own two vectors share the numbers of elements.
            stream = 4 if self.vector == "plain" else 3
            context = context._replace(offset=self.offset)
            words = context.random_stream(stream, shared=True)
            update += method.noise_std * gaussian(words, self.layout.size)
        return update, state

    def accumulate(self, moments: Sequence[tf.Tensor | None]) -> None:
        """Adds to the second moments of the step that a later call takes."""
        for total in tf.nest.flatten(self.state.moments):
            total.assign(tf.convert_to_tensor(total) + self.flatten(moments))

    def forget(self) -> None:
        """Drops the accumulated second moments."""
        for total in tf.nest.flatten(self.state.moments):
            total.assign(tf.zeros_like(total))
