"""N workers of TernGrad in a plain loop: the bits of virtual workers, but faster.

`tfgradcomp.virtual_workers` makes a graph with every worker in it. The studies of
TernGrad have up to 64 workers with one image each; so they call the method's functions.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tfgradcomp.core import Context, Layout


class Workers:
    """Workers that share one network, and compute their parts of a step in turn.

    Args:
        network: The network.
        optimizer: A Keras optimizer, or `tfgradcomp.TernGrad` around an optimizer.
        number: N.

    Attributes:
        layout: The blocks of the compressed vector.
    """

    def __init__(self, network, optimizer, number):
        self.network, self.number = network, number
        self._variables = network.trainable_variables
        self._inner, self._method, self._seed = optimizer, None, 0
        sizes = [int(np.prod(variable.shape)) for variable in self._variables]
        # Uncompressed tensors: none, or the last kernel and bias.
        self._last, block_size = 0, None
        if isinstance(optimizer, tfgradcomp.TernGrad):
            self._inner, self._seed = optimizer.inner_optimizer, optimizer.seed
            self._method = optimizer.method.fused()
            self._last, block_size = 2 * bool(optimizer.exclude), optimizer.block_size
        self._inner.build(self._variables)
        self._sizes = sizes
        compressed = sizes[: len(sizes) - self._last]
        self.layout = Layout(Layout.from_sizes(compressed, block_size).row_splits)

    def step(self, images, labels):
        """Take a step with a batch that the workers share equally."""
        parts = (np.split(array, self.number) for array in (images, labels))
        self._apply([self.gradient(*part) for part in zip(*parts, strict=True)])

    @functools.cached_property
    def gradient(self):
        """Function from images and labels to the flat gradient."""
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @tf.function
        def gradient(images, labels):
            with tf.GradientTape() as tape:
                value = loss(labels, self.network(images, training=True))
            found = tape.gradient(value, [v.value for v in self._variables])
            return tf.concat([tf.reshape(g, [-1]) for g in found], 0)

        return gradient

    @functools.cached_property
    def _apply(self):
        @tf.function
        def apply(vectors):
            mean = tf.add_n(vectors) / self.number
            if self._method:
                size = self.layout.size
                sent = self._mean_sent([vector[:size] for vector in vectors])
                mean = tf.concat([sent, mean[size:]], 0)
            updates = [
                tf.reshape(flat, variable.shape)
                for flat, variable in zip(
                    tf.split(mean, self._sizes), self._variables, strict=True
                )
            ]
            self._inner.apply(updates, self._variables)

        return apply

    def _mean_sent(self, vectors):
        method, layout = self._method, self.layout
        step = tf.cast(self._inner.iterations.value, tf.int64)
        contexts = [
            Context.at_rate_one(step, rank, self.number, self._seed)
            for rank in range(self.number)
        ]
        state = method.compressor.init(layout)
        payloads = encode(method.compressor, vectors, layout, contexts, state)
        stacked = {
            name: tf.stack([payload[name] for payload in payloads])
            for name in payloads[0]
        }
        server = contexts[0].at_server()
        reply, _ = method.server.combine(stacked, (), layout, server)
        return method.server.decompress(reply, layout, self.number)


def encode(compressor, vectors, layout, contexts, state=()):
    """Return the payloads of workers, which share the largest scale of each block."""
    workers = list(zip(vectors, contexts, strict=True))
    prepared = [compressor.prepare(x, state, layout, c) for x, c in workers]
    scale = tf.reduce_max([one["scale"] for one in prepared], 0)
    return [
        compressor.compress(
            x, state, layout, context._replace(prepared={**own, "scale": scale})
        ).payload
        for (x, context), own in zip(workers, prepared, strict=True)
    ]
