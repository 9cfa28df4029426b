"""Remote tasks of a TensorFlow cluster: functions without a public name."""

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
    """Runs the eager operations of this thread by a separate executor.

    Threads that share an executor get each other's errors, and TensorFlow has no public
    executor.
    """
    separate = executor.new_executor(enable_async=False)
    try:
        with context.executor_scope(separate):
            yield
    finally:
        # Otherwise the executor would report its errors again when it is deleted.
        separate.clear_error()


def host_device() -> str:
    """Returns the full name of this process' CPU, for a chief of remote tasks.

    The public device names are local: they lack the job and the task.
    """
    return f"{context.context().host_address_space()}/device:CPU:0"


def make_constants_here() -> None:
    """Makes TensorFlow create constants for other tasks in this process.

    TensorFlow would create them in the other task, and block all threads of Python
    while that task does not answer. It has no option against it.
    """
    replace(constant_op, "convert_to_eager_tensor", _made_here)


def _made_here(original, value, ctx, *args, **kwargs):
    name = ctx.device_name or ""
    if "/job:worker/" not in name and "/job:ps/" not in name:
        return original(value, ctx, *args, **kwargs)
    with tf.device(host_device()):
        return original(value, ctx, *args, **kwargs)


def forget_errors() -> None:
    """Makes operations of this thread possible again after a task was lost.

    Otherwise TensorFlow raises the error of the lost task in all later operations.
    """
    context.context().executor.clear_error()


def reconnect() -> None:
    """Connects to tasks that were started again, and keeps the others' variables.

    All tasks must run. TensorFlow has no public function for it.
    """
    context.context().update_server_def(context.get_server_def())


def call(function: Any, arguments: Sequence, captures: Sequence) -> Any:
    """Calls a concrete function with other tensors in place of its captures.

    The public call always takes the tensors that were captured.
    """
    return function._call_flat(arguments, captures)


def build(model: keras.Model, spec: Any) -> None:
    """Creates all variables of a compiled model for data of an `element_spec`.

    The public `build` creates no variables of metrics and of the optimizer.
    """
    model._symbolic_build(data_batch=_ranked(spec))


@contextlib.contextmanager
def losses_of(num_workers: int) -> Iterator[None]:
    """Makes Keras divide losses by N in this context, as under N replicas.

    Keras takes N from the strategy only. The bits of a gradient depend on where it is
    divided.
    """
    replace(keras_loss, "scale_loss_for_distribution", _times(lambda n: 1.0 / n))
    replace(keras_loss, "unscale_loss_for_distribution", _times(lambda n: n))
    token = _NUM_WORKERS.set(num_workers)
    try:
        yield
    finally:
        _NUM_WORKERS.reset(token)


def _times(factor):
    """Returns a replacement that multiplies by a function of the N of `losses_of`."""

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
