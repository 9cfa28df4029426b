"""Remote tasks of a TensorFlow cluster: what has no public name."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from tensorflow.python.eager import context, executor
from tensorflow.python.framework import constant_op

from tfgradcomp.compat.replace import replace

_NUM_WORKERS: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "num_workers", default=None
)


@contextlib.contextmanager
def own_executor() -> Iterator[None]:
    """Runs eager operations of this thread by themselves.

    Threads that share an executor get each other's errors.
    """
    own = executor.new_executor(enable_async=False)
    try:
        with context.executor_scope(own):
            yield
    finally:
        # Else it would report them once more, when it is deleted.
        own.clear_error()


def host_device() -> str:
    """Returns the name of this process' CPU, for a chief that names those of others."""
    return f"{context.context().host_address_space()}/device:CPU:0"


def make_constants_here() -> None:
    """Makes constants for other tasks in this process, from where operations take them.

    TensorFlow would make them there, and hold all threads of Python as long as that
    task does not answer.
    """
    replace(constant_op, "convert_to_eager_tensor", _made_here)


def _made_here(original, value, ctx, *args, **kwargs):
    name = ctx.device_name or ""
    if "/job:worker/" not in name and "/job:ps/" not in name:
        return original(value, ctx, *args, **kwargs)
    with tf.device(host_device()):
        return original(value, ctx, *args, **kwargs)


def forget_errors() -> None:
    """Makes operations of this thread possible again after a task was lost."""
    context.context().executor.clear_error()


def reconnect() -> None:
    """Connects to tasks that were started anew; all must be there.

    What the others hold stays.
    """
    context.context().update_server_def(context.get_server_def())


def call(function: Any, arguments: Sequence, captures: Sequence) -> Any:
    """Calls a concrete function with other tensors for those that it has captured.

    Args:
        function: A concrete function of tensors.
        arguments: Its arguments.
        captures: What takes the places of the captures, in their order.
    """
    return function._call_flat(arguments, captures)


def names_workers(function: Any) -> bool:
    """Returns whether operations of a concrete function are bound to a worker."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    return any("/job:worker" in node.device for node in nodes)


def build(model: keras.Model, spec: Any) -> None:
    """Creates all variables of a compiled model: its own, metrics', the optimizer's.

    Args:
        model: A Keras model.
        spec: The `element_spec` of the dataset that it is trained on.
    """
    model._symbolic_build(data_batch=_ranked(spec))


@contextlib.contextmanager
def losses_of(num_workers: int) -> Iterator[None]:
    """Makes Keras divide losses by N here, as it does where a strategy has N replicas.

    The bits of a gradient depend on where it is divided.
    """
    replace(keras_loss, "scale_loss_for_distribution", _times(lambda n: 1.0 / n))
    replace(keras_loss, "unscale_loss_for_distribution", _times(lambda n: n))
    token = _NUM_WORKERS.set(num_workers)
    try:
        yield
    finally:
        _NUM_WORKERS.reset(token)


def _times(factor):
    """A replacement that multiplies by a function of N, where `losses_of` says N."""

    def product(original, value):
        num_workers = _NUM_WORKERS.get()
        if num_workers is None:
            return original(value)
        return value * tf.constant(factor(num_workers), value.dtype)

    return product


def _ranked(spec):
    for leaf in tf.nest.flatten(spec):
        if leaf.shape.rank is None:
            raise ValueError(
                "The dataset's batches must have a known number of axes, so that the "
                "model can be built before its first batch. Give `from_generator` an "
                "`output_signature`, or use `tf.ensure_shape`. "
                f"Received: element_spec={spec}"
            )
    return spec
