"""One flat vector of gradients, with the method that carries it."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfgradcomp import compressors, servers
from tfgradcomp.compressors.base import Compressor, Context, Layout
from tfgradcomp.compressors.weight_decay import WeightDecay
from tfgradcomp.seam.per_worker_variable import PerWorkerVariable
from tfgradcomp.servers.base import Server
from tfgradcomp.transports import Transport
from tfgradcomp.transports.base import Words


class Channel:
    """Variables whose gradients travel together, and the state of their method.

    Args:
        name: Name of the channel; its state is saved under it.
        positions: Indices of the variables in the order of the model.
        shapes: Their shapes.
        layout: The blocks of the concatenation of these variables.
        compressor: The worker's half of the method.
        server: The server's half.
        transport: Carries the payloads.
        weight_decay: What workers add to the reply, or None.
    """

    def __init__(
        self,
        name: str,
        positions: list[int],
        shapes: list[tf.TensorShape],
        layout: Layout,
        compressor: Compressor,
        server: Server,
        transport: Transport,
        weight_decay: WeightDecay | None,
    ):
        self.name = name
        self.positions = positions
        self.shapes = shapes
        self.layout = layout
        self.compressor = compressors.fused(compressor)
        self.server = servers.fused(server)
        self.transport = transport
        self.weight_decay = weight_decay
        initial = {
            "worker": compressor.init(layout),
            "server": transport.init_server(self.compressor, self.server, layout),
            "local": weight_decay.init(layout) if weight_decay else (),
        }
        self.state = tf.nest.pack_sequence_as(
            initial,
            [
                PerWorkerVariable(value, ".".join([name, *path]))
                for path, value in _leaves(initial)
            ],
        )

    def flatten(self, tensors: list[tf.Tensor | None]) -> tf.Tensor:
        """Concatenates the channel's share of a list over all variables, as float32.

        A variable without a gradient counts as zero.
        """
        parts = []
        for position, shape in zip(self.positions, self.shapes, strict=True):
            tensor = tensors[position]
            if tensor is None:
                tensor = tf.zeros(shape)
            parts.append(tf.cast(tf.reshape(tensor, [-1]), tf.float32))
        return tf.concat(parts, 0)

    def split(self, vector: tf.Tensor) -> dict[int, tf.Tensor]:
        """Cuts a flat vector into tensors, by the positions of the variables."""
        parts = tf.split(vector, [shape.num_elements() for shape in self.shapes])
        return {
            position: tf.reshape(part, shape)
            for position, part, shape in zip(
                self.positions, parts, self.shapes, strict=True
            )
        }

    def compress(self, gradient: tf.Tensor, context: Context):
        """Returns the payload of this worker's mean gradient, and the new state."""
        state = tf.nest.map_structure(tf.convert_to_tensor, self.state["worker"])
        return self.compressor.compress(gradient, state, self.layout, context)

    def exchange(self, payload, weights, context: Context, status: tf.Tensor):
        """Exchanges a payload and decodes the reply.

        Args:
            payload: What `compress` returned.
            weights: Function that returns the flat weights, called where needed.
            context: The step.
            status: A word that all workers shall see.

        Returns:
            The update, the new state of server and weight decay, and all workers'
            statuses.
        """
        state = tf.nest.map_structure(
            tf.convert_to_tensor, {k: self.state[k] for k in ("server", "local")}
        )
        update, server, statuses = self.transport.exchange(
            payload,
            self.compressor,
            self.server,
            state["server"],
            self.layout,
            context,
            status,
            self.name,
        )
        local = state["local"]
        if self.weight_decay:
            term, local = self.weight_decay.term(weights(), local)
            update += term
        return update, {"server": server, "local": local}, statuses

    def words(self, num_workers: int) -> Words:
        """Returns the words a worker moves in a step."""
        moved = self.transport.words(
            self.compressor, self.server, self.layout, num_workers
        )
        # What the workers agree on first goes round as a ring's all-reduce.
        agreed = sum(f.count for f in self.compressor.agreed(self.layout).values())
        ring = 2 * (num_workers - 1) / num_workers * agreed
        return Words(moved.sent + ring, moved.received + ring)


def _leaves(nest):
    """Pairs (names on the way, leaf) of a nest, in the order of `tf.nest.flatten`."""
    return [
        ([str(key) for key in path if key != "inner"], leaf)
        for path, leaf in keras.tree.flatten_with_path(nest)
    ]
