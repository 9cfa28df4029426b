"""A range of the flat gradient, with the route that carries it and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.core import Context, SplitVector, State
from tfgradcomp.core.contracts import check_state, initial_state
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.engine import nonfinite
from tfgradcomp.engine.bucket_ranges import BucketRange, Piece
from tfgradcomp.engine.noise import gaussian
from tfgradcomp.engine.probe import IGNORE, ExchangeObserver
from tfgradcomp.transports import ExchangeResult, Route
from tfgradcomp.transports.messages import has_variable_length


class Gradients(NamedTuple):
    """One worker's gradients of a step, as lists over all variables.

    Attributes:
        values: Tensors, or `IndexedSlices` with each row once, for a `RowsBucket`; None
            where a variable has no gradient, which counts as zero.
        scale: What the gradients are to be multiplied by, in order to be this worker's
            own mean gradients.
        moments: Second moments, in the units of `values` squared; None where unknown.
        clip_factors: What clipping has multiplied each element by; None where nothing
            is clipped.
        calls: Number of calls whose gradients `values` are the mean of, or None.
    """

    values: list[tf.Tensor | None]
    scale: float = 1.0
    moments: Sequence[tf.Tensor | None] = ()
    clip_factors: list[tf.Tensor | None] | None = None
    calls: int | None = None


class BucketState(NamedTuple):
    """The state of a bucket by its roles: nests of variables, or of their new values.

    Attributes:
        worker: The compressor's state; differs between workers.
        moments: Second moments that add up until a step is taken, or `()`.
        server: The server's state, as far as it is held here.
        local: The weight decay's state, the same on all workers.
    """

    worker: State
    moments: State
    server: State
    local: State

    def named_leaves(self) -> Iterator[tuple[str, str, Any]]:
        """Yields the role, the name and the leaf, in the order of `tf.nest.flatten`."""
        for role, nest in self._asdict().items():
            for path, leaf in keras.tree.flatten_with_path(nest):
                keys = [str(key) for key in path if key != "inner"]
                if role == "moments":
                    keys = ["moments"]
                yield role, ".".join([_FILE_ROLES[role], *keys]), leaf


# The second moments are a worker's own as well.
_FILE_ROLES = {
    "worker": "worker",
    "moments": "worker",
    "server": "server",
    "local": "local",
}


class CompressedBucket(NamedTuple):
    """A compressed bucket, ready to be pushed.

    Attributes:
        payload: A tensor for each field.
        context: The step, with what the first round has given.
        flag: int32 scalar, 0 where all is finite; else see `nonfinite`.
        worker_state: The compressor's new state.
        elements_sent: Elements that this worker sends a value for.
    """

    payload: dict[str, tf.Tensor]
    context: Context
    flag: tf.Tensor
    worker_state: State
    elements_sent: tf.Tensor | int


class BucketResult(NamedTuple):
    """The result of a bucket's exchange.

    Attributes:
        update: float32, the same on all workers.
        state: The new state.
        nonfinite_flags: All workers' flags, int32 `[N]`.
        elements_sent: Elements that this worker sent a value for.
        variable_length_words: See `tfgradcomp.transports.ExchangeResult`.
    """

    update: Vector
    state: BucketState
    nonfinite_flags: tf.Tensor
    elements_sent: tf.Tensor | int
    variable_length_words: tf.Tensor | int


class GradientBucket:
    """One range of a flat vector, and the state of the method that carries it.

    Attributes:
        vector: Name of the vector, `"compressed"` or `"plain"`.
        name: Name of the bucket, its call site on all workers.
        pieces: What it holds of the variables, by their positions in the model.
        bucket_range: Which elements of the vector it holds.
        route: The method on its way.
        uncompressed_route: The route of steps that travel as float32; `route` where
            there are none, or where nothing is compressed.
        is_compressed: Whether the method compresses; else it travels as float32.
        has_variable_length: Whether its messages vary in length.
        state: Its variables.
        parts: The buckets that are exchanged for it, one by each device of a worker;
            itself where a worker is one device.
    """

    def __init__(
        self,
        vector: str,
        pieces: tuple[Piece, ...],
        bucket_range: BucketRange,
        route: Route,
        is_compressed: bool,
        accumulates: bool = False,
        uncompressed_route: Route | None = None,
        stream_offset: int = 0,
        create_variable: Callable = PerReplicaVariable.known,
    ):
        """Creates the variables of the state.

        Args:
            vector: Name of the vector.
            pieces: What it holds of the variables.
            bucket_range: Which elements of the vector it holds.
            route: The method, bound to its transport; its call site is the name.
            is_compressed: Whether the method compresses.
            accumulates: Whether second moments add up over several calls.
            uncompressed_route: The same method bound uncompressed_step, or None.
            stream_offset: Where the random numbers of the vector begin, a multiple of
                4: those of two vectors must be others.
            create_variable: Function of a value and a name.
        """
        self.parts: tuple[GradientBucket, ...] = (self,)
        self.vector = vector
        self.name = route.call_site
        self.pieces = pieces
        self.bucket_range = bucket_range
        self.route = route
        self.uncompressed_route = uncompressed_route or route
        self.layout = route.layout
        self.is_compressed = is_compressed
        self.has_variable_length = has_variable_length(route.fields)
        self._stream_offset = stream_offset
        self._weight_decay = route.method.weight_decay
        initial = BucketState(
            worker=initial_state(route.method.compressor, self.layout),
            moments=tf.zeros([self.layout.size]) if accumulates else (),
            server=route.init_state(),
            local=initial_state(self._weight_decay, self.layout)
            if self._weight_decay
            else (),
        )
        self.state = tf.nest.pack_sequence_as(
            initial,
            [
                create_variable(value, f"{self.name}.{name}")
                for _, name, value in initial.named_leaves()
            ],
        )

    def rebind(self) -> None:
        """Binds the method anew after the workers have changed; the state stays."""
        self.route = self.route.rebound()

    @property
    def size(self) -> int:
        """Elements of variables."""
        return self.bucket_range.end - self.bucket_range.begin

    @property
    def positions(self) -> list[int]:
        """Indices of the variables in the order of the model."""
        return [piece.position for piece in self.pieces]

    def flatten(
        self, tensors: Sequence[tf.Tensor | None], scale: float = 1.0
    ) -> SplitVector:
        """Returns the bucket's share of a list over all variables, as float32.

        A variable without a tensor counts as zero. All are multiplied by `scale`.
        """
        padding = self.bucket_range.alignment_padding
        parts = [tf.zeros([padding])] if padding else []
        for position, begin, end in self.pieces:
            tensor = tensors[position]
            if tensor is None:
                parts.append(tf.zeros([end - begin]))
                continue
            tensor = tf.convert_to_tensor(tensor)
            if end - begin < tensor.shape.num_elements():
                tensor = tf.reshape(tensor, [-1])[begin:end]
            parts.append(tf.cast(tensor, tf.float32))
        return SplitVector(parts, scale)

    def split(self, vector: Vector) -> dict[Piece, tf.Tensor]:
        """Cuts a flat vector into the pieces of variables."""
        is_split = isinstance(vector, SplitVector)
        parts = list(vector if is_split else tf.split(vector, self.layout.sizes))
        return dict(zip(self.pieces, parts[-len(self.pieces) :], strict=True))

    def compress(
        self,
        gradients: Gradients,
        context: Context,
        route: Route | None = None,
        observer: ExchangeObserver = IGNORE,
    ) -> CompressedBucket:
        """Compresses this worker's mean gradient, after the first round if any.

        Args:
            gradients: This worker's gradients.
            context: The step.
            route: The way that it will take; None for `route`.
            observer: Is told what happens.
        """
        route = route or self.route
        if route.method.compressor.needs_second_moments:
            context = context._replace(second_moments=self._second_moments(gradients))
        x = self.flatten(gradients.values, gradients.scale)
        state = tf.nest.map_structure(tf.convert_to_tensor, self.state.worker)
        observer.flattened(x, state)
        return self._compress(x, state, gradients, context, route)

    def _compress(self, x, state, gradients, context, route):
        compressor, layout = route.method.compressor, route.layout
        offset = self._stream_offset + self.bucket_range.offset
        context = context._replace(offset=offset)
        compressed, context = route.compress(x, state, self.state.server, context)
        is_finite = compressed.is_all_finite(x)
        # The padding before the first variable is finite.
        padding = len(x.tensors) - len(self.positions)
        places = self.positions[:1] * padding + self.positions
        flag = nonfinite.flag_of(is_finite, x, places, len(gradients.values))
        return CompressedBucket(
            compressed.payload,
            context,
            flag,
            compressed.state,
            compressor.elements_sent(compressed.payload, layout),
        )

    def exchange(
        self,
        gradients: Gradients,
        weights: list,
        context: Context,
        is_uncompressed_step: bool = False,
        observer: ExchangeObserver = IGNORE,
    ) -> BucketResult:
        """Compresses this worker's gradient, exchanges it and decodes the reply.

        Args:
            gradients: This worker's gradients.
            weights: All variables, in the order of the model; None for each that is
                excluded from weight decay.
            context: The step.
            is_uncompressed_step: Whether it travels as float32.
            observer: Is told what happens.
        """
        observer.ready([gradients.values[position] for position in self.positions])
        route = observer.timed(
            self.uncompressed_route if is_uncompressed_step else self.route
        )
        sent = self.compress(gradients, context, route, observer)
        observer.encoded(sent)
        server = tf.nest.map_structure(tf.convert_to_tensor, self.state.server)
        state = () if is_uncompressed_step else server
        result = route.exchange(sent.payload, state, sent.context, sent.flag)
        observer.exchanged(result.update)
        if is_uncompressed_step:
            result = result._replace(state=self._wait(server, sent.context))
        return self.finish(result, weights, sent)

    def _wait(self, server: State, context: Context) -> State:
        """Returns the server's state after a step that went past it."""
        owned = self.route.owned_range(context.rank)
        context = context.at_server()._replace(offset=context.offset + owned.start)
        return self.route.method.server.wait(server, context)

    def finish(
        self, result: ExchangeResult, weights: list, sent: CompressedBucket
    ) -> BucketResult:
        """Adds weight decay and noise to a reply, and puts the new state together."""
        update, local = self.with_local_terms(result.update, weights, sent.context)
        moments = tf.nest.map_structure(tf.zeros_like, self.state.moments)
        state = BucketState(sent.worker_state, moments, result.state, local)
        return BucketResult(
            update,
            state,
            result.nonfinite_flags,
            sent.elements_sent,
            result.variable_length_words,
        )

    def with_local_terms(
        self, update: Vector, weights: list, context: Context
    ) -> tuple[Vector, State]:
        """Returns an update with weight decay and noise, and the decay's new state."""
        local = tf.nest.map_structure(tf.convert_to_tensor, self.state.local)
        if self._weight_decay:
            before = local
            term, local = self._weight_decay.term(self.flatten(weights), before)
            check_state(self._weight_decay, "term", local, before)
            update += term
        noise_std = self.route.method.noise_std
        if noise_std:
            # The elements of the wrapper's own two vectors have the same numbers.
            stream = 4 if self.vector == "plain" else 3
            offset = self._stream_offset + self.bucket_range.offset
            context = context._replace(offset=offset)
            words = context.random_stream(stream, shared=True)
            update += noise_std * gaussian(words, self.layout.size)
        return update, local

    # Second moments.

    def _second_moments(self, gradients: Gradients) -> Vector:
        total = self.flatten(gradients.moments, gradients.scale * gradients.scale)
        if gradients.calls:
            before = tf.convert_to_tensor(self.state.moments)
            total = (before + total) / gradients.calls**2
        if gradients.clip_factors is None:
            return total
        return tf.square(self.flatten(gradients.clip_factors)) * total

    def accumulate(self, moments: list[tf.Tensor | None]) -> None:
        """Adds to the second moments of the step that a later call takes."""
        for total in tf.nest.flatten(self.state.moments):
            total.assign(tf.convert_to_tensor(total) + self.flatten(moments))

    def forget(self) -> None:
        """Drops the second moments that have added up."""
        for total in tf.nest.flatten(self.state.moments):
            total.assign(tf.zeros_like(total))
