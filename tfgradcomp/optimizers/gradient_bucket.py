"""A part of the gradients that travels together, with the method that carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfgradcomp import compressors, servers
from tfgradcomp.compressors.base import Compressor, Context, Field, Layout
from tfgradcomp.compressors.weight_decay import WeightDecay
from tfgradcomp.ops import SplitVector
from tfgradcomp.optimizers.bucket_ranges import Bucket, Piece
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.servers.base import Server
from tfgradcomp.transports import Transport
from tfgradcomp.transports.base import Call, Words
from tfgradcomp.transports.messages import varies


class Step(NamedTuple):
    """What a channel's step gives.

    Attributes:
        update: float32, the same on all workers.
        state: The new state.
        statuses: All workers' statuses, int32 `[N]`.
        elements_sent: Elements that this worker sent a value for.
        varying_words: See `tfgradcomp.transports.base.Outcome`.
    """

    update: tf.Tensor | SplitVector
    state: dict
    statuses: tf.Tensor
    elements_sent: tf.Tensor | int
    varying_words: tf.Tensor | int


class GradientBucket:
    """One bucket of a flat vector, and the state of its method.

    Args:
        name: Name of the channel, its call site on all workers.
        positions: Indices of the variables that make up the whole vector.
        bucket: Which part of it this is.
        layout: Its blocks, and the sizes of the variables.
        compressor: The worker's half of the method.
        server: The server's half.
        transport: Carries the payloads.
        weight_decay: What workers add to the reply, or None.
        accumulates: Whether second moments add up over several calls before a step.
    """

    def __init__(
        self,
        name: str,
        positions: Sequence[int],
        bucket: Bucket,
        layout: Layout,
        compressor: Compressor,
        server: Server,
        transport: Transport,
        weight_decay: WeightDecay | None,
        accumulates: bool = False,
    ):
        self.name = name
        self.bucket = bucket
        self.pieces = tuple(
            piece._replace(position=positions[piece.position])
            for piece in bucket.pieces(layout)
        )
        self.layout = bucket.layout(layout)
        self.compressor = compressors.fused(compressor)
        self.server = servers.fused(server)
        self.transport = transport
        self.weight_decay = weight_decay
        self.varies = varies(compressor.fields(self.layout))
        self.accumulates = accumulates
        initial = {
            "worker": compressor.init(self.layout),
            "worker.moments": tf.zeros([self.layout.size]) if accumulates else (),
            "server": transport.init_server(self.compressor, self.server, self.layout),
            "local": weight_decay.init(self.layout) if weight_decay else (),
        }
        self.state = tf.nest.pack_sequence_as(
            initial,
            [
                PerReplicaVariable(value, f"{name}.{path}")
                for path, value in named_leaves(initial)
            ],
        )

    @property
    def size(self) -> int:
        """Elements of variables."""
        return self.bucket.end - self.bucket.begin

    @property
    def positions(self) -> list[int]:
        """Indices of the variables in the order of the model."""
        return [piece.position for piece in self.pieces]

    def held(self, rank: int) -> range:
        """Returns the elements of the layout whose server state a worker holds."""
        return self.transport.held(rank, self.compressor, self.server, self.layout)

    @property
    def is_spread(self) -> bool:
        """Whether the server's state is spread over the workers."""
        return self.held(0) != range(self.layout.size) or self.held(0) != self.held(-1)

    def flatten(self, tensors: list[tf.Tensor | None], scale: float = 1.0) -> SplitVector:
        """Returns the channel's share of a list over all variables, as float32.

        A variable without a gradient counts as zero. All are multiplied by `scale`.
        """
        parts = [tf.zeros([self.bucket.lead])] if self.bucket.lead else []
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

    def second_moments(
        self,
        moments: list[tf.Tensor | None],
        scale: float,
        calls: int | None,
        kept: list[tf.Tensor | None] | None,
    ) -> tf.Tensor | SplitVector:
        """Returns the second moments that go with what `flatten` returns.

        Args:
            moments: Those of the gradients of this call, over all variables.
            scale: What the gradients are multiplied by.
            calls: Number of calls of which the gradients are the mean, or None.
            kept: The part of each element that clipping has left, over all variables,
                or None where nothing is clipped.
        """
        total = self.flatten(moments, scale * scale)
        if calls:
            before = tf.convert_to_tensor(self.state["worker.moments"])
            total = (before + total) / calls**2
        return total if kept is None else tf.square(self.flatten(kept)) * total

    def accumulate(self, moments: list[tf.Tensor | None]) -> None:
        """Adds to the second moments of the step that a later call takes."""
        total = self.state["worker.moments"]
        total.assign(tf.convert_to_tensor(total) + self.flatten(moments))

    def forget(self) -> None:
        """Drops the second moments that have added up."""
        for total in tf.nest.flatten(self.state["worker.moments"]):
            total.assign(tf.zeros_like(total))

    def split(self, vector: tf.Tensor | SplitVector) -> dict[Piece, tf.Tensor]:
        """Cuts a flat vector into the pieces of variables."""
        parts = list(
            vector if isinstance(vector, SplitVector) else tf.split(vector, self.layout.sizes)
        )
        return dict(zip(self.pieces, parts[-len(self.pieces) :], strict=True))

    def step(self, gradient: SplitVector, weights, context: Context, locate) -> Step:
        """Compresses this worker's mean gradient, exchanges it and decodes the reply.

        Args:
            gradient: What `flatten` returned.
            weights: Function that returns the flat weights, called where needed.
            context: The step.
            locate: Function without arguments that returns the status of a gradient
                that is not finite.
        """
        context = context._replace(
            offset=self.bucket.offset,
            max=lambda vector: self.transport.collectives.max(vector, self.name),
        )
        state = tf.nest.map_structure(tf.convert_to_tensor, self.state)
        payload, worker, finite = self.compressor.compress_checked(
            gradient, state["worker"], self.layout, context
        )
        update, server, statuses, varying_words = self.transport.exchange(
            payload,
            self.compressor,
            self.server,
            state["server"],
            self.layout,
            context,
            tf.cond(finite, lambda: tf.constant(0), locate),
            self.name,
        )
        local = state["local"]
        if self.weight_decay:
            term, local = self.weight_decay.term(weights(), local)
            update += term
        new_state = {
            "worker": worker,
            "worker.moments": tf.nest.map_structure(
                tf.zeros_like, state["worker.moments"]
            ),
            "server": server,
            "local": local,
        }
        sent = self.compressor.elements_sent(payload, self.layout)
        return Step(update, new_state, statuses, sent, varying_words)

    def reply_fields(self, num_workers: int) -> dict[str, Field]:
        """Returns what a reply is made of."""
        return self.transport.reply_fields(
            self.compressor, self.server, self.layout, num_workers
        )

    @property
    def words(self) -> Words:
        """The words a worker moves in a step, besides what varies."""
        moved = self.transport.words(self.compressor, self.server, self.layout)
        agreed = self.compressor.agreed(self.layout).values()
        rounds = Call("max", sum(field.count for field in agreed))
        agreeing = self.transport.collectives.moved(rounds)
        return Words(moved.sent + agreeing, moved.received + agreeing)


def named_leaves(nest) -> list[tuple[str, object]]:
    """Pairs (name, leaf) of a nest, in the order of `tf.nest.flatten`."""
    return [
        (".".join(str(key) for key in path if key != "inner"), leaf)
        for path, leaf in keras.tree.flatten_with_path(nest)
    ]
