"""A function of a worker that is traced once for all workers.

Workers run the same operations on different variables, datasets and queues. A traced
function captures the tensors of one worker; each call can replace them by those of
another worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgradcomp.compat import remote

_RANK = tf.TensorSpec([], tf.int32)


class WorkerFunction:
    """A traced function of a worker's rank and data, without a device.

    `call` is a function of the rank, an int32 scalar, an iterator and further arguments
    with the specifications `specs`.
    """

    def __init__(self, call: Callable, iterator: Any, *specs: tf.TensorSpec):
        traced = tf.function(call, autograph=False)
        self._function = traced.get_concrete_function(_RANK, iterator, *specs)
        self._specs = specs

    def fits(self, others: Mapping[int, tf.Tensor]) -> bool:
        """Returns whether another worker, with tensors as in `on`, can run it."""
        has_all = all(id(tensor) in others for tensor in self._captured())
        return has_all and not self._names_workers

    @functools.cached_property
    def _names_workers(self):
        """Returns whether operations of the function are bound to a worker."""
        graph = self._function.graph.as_graph_def()
        functions = graph.library.function
        nodes = [*graph.node, *(node for f in functions for node in f.node_def)]
        return any("/job:worker" in node.device for node in nodes)

    def on(
        self, device: str, rank: int, iterator: Any, local: Mapping[int, tf.Tensor]
    ) -> Callable:
        """Returns a function of the further arguments on a worker's device.

        Its result is copied to this process, because TensorFlow leaks three kilobytes
        on a worker for each value that is fetched from there.

        `local` has the worker's tensors by the `id`s of the tensors they replace.
        """
        captures = [local.get(id(tensor), tensor) for tensor in self._captured()]

        @tf.function(autograph=False)
        def placed(*arguments):
            with tf.device(device):
                given = tf.nest.flatten(
                    [tf.constant(rank), iterator, *arguments], expand_composites=True
                )
                result = remote.call(self._function, given, captures)
            with tf.device(remote.host_device()):
                return tf.identity(result)

        return placed.get_concrete_function(*self._specs)

    def _captured(self) -> Sequence[tf.Tensor]:
        return [outside for outside, _ in self._function.graph.captures]
