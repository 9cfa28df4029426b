"""A part of the gradients that travels together, with the method that carries it."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfgradcomp import compressors, servers
from tfgradcomp.compressors.base import Compressor, Context, Field, Layout
from tfgradcomp.compressors.weight_decay import WeightDecay
from tfgradcomp.ops import Parts
from tfgradcomp.optimizers.buckets import Bucket, Piece
from tfgradcomp.seam.per_worker_variable import PerWorkerVariable
from tfgradcomp.servers.base import Server
from tfgradcomp.transports import Transport
from tfgradcomp.transports.base import Call, Words


class Channel:
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
        initial = {
            "worker": compressor.init(self.layout),
            "server": transport.init_server(self.compressor, self.server, self.layout),
            "local": weight_decay.init(self.layout) if weight_decay else (),
        }
        self.state = tf.nest.pack_sequence_as(
            initial,
            [
                PerWorkerVariable(value, f"{name}.{path}")
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

    def flatten(self, tensors: list[tf.Tensor | None], gain: float = 1.0) -> Parts:
        """Returns the channel's share of a list over all variables, as float32.

        A variable without a gradient counts as zero. All are multiplied by `gain`.
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
        return Parts(parts, gain)

    def split(self, vector: tf.Tensor | Parts) -> dict[Piece, tf.Tensor]:
        """Cuts a flat vector into the pieces of variables."""
        parts = list(
            vector if isinstance(vector, Parts) else tf.split(vector, self.layout.sizes)
        )
        return dict(zip(self.pieces, parts[-len(self.pieces) :], strict=True))

    def step(self, gradient: Parts, weights, context: Context, locate):
        """Compresses this worker's mean gradient, exchanges it and decodes the reply.

        Args:
            gradient: What `flatten` returned.
            weights: Function that returns the flat weights, called where needed.
            context: The step.
            locate: Function without arguments that returns the status of a gradient
                that is not finite.

        Returns:
            The update, the new state, and all workers' statuses.
        """
        context = context._replace(
            offset=self.bucket.offset,
            max=lambda vector: self.transport.collectives.max(vector, self.name),
        )
        state = tf.nest.map_structure(tf.convert_to_tensor, self.state)
        payload, worker, finite = self.compressor.compress_checked(
            gradient, state["worker"], self.layout, context
        )
        update, server, statuses = self.transport.exchange(
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
        new_state = {"worker": worker, "server": server, "local": local}
        return update, new_state, statuses

    def reply_fields(self, num_workers: int) -> dict[str, Field]:
        """Returns what a reply is made of."""
        return self.transport.reply_fields(
            self.compressor, self.server, self.layout, num_workers
        )

    @property
    def words(self) -> Words:
        """The words a worker moves in a step."""
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
