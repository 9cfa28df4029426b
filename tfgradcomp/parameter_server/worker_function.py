"""A function of one worker that is traced once for all of them.

Workers do the same by variables, datasets and queues of their own. TensorFlow takes
such tensors from outside a traced function, with each call of it: so another worker's
can take their places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgradcomp.compat import remote

_RANK = tf.TensorSpec([], tf.int32)


class WorkerFunction:
    """A traced function of a worker's rank, data and more, on no device yet.

    Args:
        call: Function of the rank, an int32 scalar, of an iterator and of what `specs`
            describe.
        iterator: The first worker's.
        specs: Of the other arguments.
    """

    def __init__(self, call: Callable, iterator: Any, *specs: tf.TensorSpec):
        traced = tf.function(call, autograph=False)
        self._function = traced.get_concrete_function(_RANK, iterator, *specs)
        self._specs = specs

    def fits(self, others: Mapping[int, tf.Tensor]) -> bool:
        """Returns whether another worker has all that is the first one's.

        Args:
            others: As in `on`.
        """
        has_all = all(id(tensor) in others for tensor in self._taken())
        return has_all and not self._names_workers

    @functools.cached_property
    def _names_workers(self):
        """Returns whether operations of the function are bound to a worker."""
        graph = self._function.graph.as_graph_def()
        functions = graph.library.function
        nodes = [*graph.node, *(node for f in functions for node in f.node_def)]
        return any("/job:worker" in node.device for node in nodes)

    def on(
        self, device: str, rank: int, iterator: Any, own: Mapping[int, tf.Tensor]
    ) -> Callable:
        """Returns the function of the arguments of `specs` on a worker's device.

        Its value comes to this process: one that is fetched from a worker leaves three
        kilobytes behind there, in TensorFlow.

        Args:
            device: The worker's device.
            rank: Its rank.
            iterator: Its data.
            own: The worker's tensors, by the `id`s of those that they stand for.
        """
        taken = [own.get(id(tensor), tensor) for tensor in self._taken()]

        @tf.function(autograph=False)
        def placed(*arguments):
            with tf.device(device):
                given = tf.nest.flatten(
                    [tf.constant(rank), iterator, *arguments], expand_composites=True
                )
                result = remote.call(self._function, given, taken)
            with tf.device(remote.host_device()):
                return tf.identity(result)

        return placed.get_concrete_function(*self._specs)

    def _taken(self) -> Sequence[tf.Tensor]:
        return [outside for outside, _ in self._function.graph.captures]
