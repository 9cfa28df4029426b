"""Which layers read which weights in a forward pass, and from what to what.

A call of a layer that itself reads a weight is a *leaf*: its inputs, its outputs and
the loss' gradient with respect to them say what each example gave to that weight.
Layers that only call others are looked into. Where that cannot be done (the others are
called inside a loop, are recomputed, or know nothing of examples) the outer layer
becomes the leaf, at worst the whole model.
"""

from __future__ import annotations

import dataclasses
import threading

import keras
import tensorflow as tf
from keras.src import backend
from tensorflow.python.eager.record import VariableWatcher

from tfgradcomp.compat.replace import replace

_thread = threading.local()
# Their output before the activation is what the gradient is asked for.
_ACTIVATED = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
)


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer that reads weights.

    Attributes:
        layer: The layer.
        args: Its positional arguments, cast as the layer wants them.
        kwargs: Its arguments by name.
        variables: The trainable variables that it, or a layer in it, has read.
        outputs: Its float outputs, flat.
        before_activation: What it gave to its activation, where it has one.
        statistics: Mean and variance of the batch, where it normalises by them.
        inner: Whether it reads weights of layers within it.
    """

    layer: keras.layers.Layer
    args: tuple
    kwargs: dict
    variables: dict = dataclasses.field(default_factory=dict)
    outputs: list = dataclasses.field(default_factory=list)
    before_activation: tf.Tensor | None = None
    statistics: tuple | None = None
    inner: bool = False
    _calls: list = dataclasses.field(default_factory=list)
    _graph: object = None
    _watcher: VariableWatcher | None = None

    @property
    def input(self) -> tf.Tensor:
        """Its first argument."""
        if self.args:
            return self.args[0]
        return next(self.kwargs[n] for n in ("inputs", "x") if n in self.kwargs)


class LayerCalls:
    """Records, as a context, the leaves of the forward pass in it.

    Args:
        variables: The trainable variables that matter.
        batch: Static number of examples, `None` where it is not static.
    """

    def __init__(self, variables: list[keras.Variable], batch: int | None):
        replace(keras.Operation, "__call__", _call)
        replace(keras.layers.BatchNormalization, "_moments", _moments)
        self.leaves: list[Call] = []
        self._batch = batch
        self._open: list[Call] = []
        self._variables = {}
        local_results = tf.distribute.get_strategy().experimental_local_results
        for variable in variables:
            for local in (variable._value, *local_results(variable._value)):
                self._variables[id(local)] = variable

    def __enter__(self):
        _thread.calls = self
        return self

    def __exit__(self, *_):
        _thread.calls = None

    def call(self, original, layer, args, kwargs):
        """Calls a layer, and notes what it reads."""
        call = Call(layer, args, kwargs, _graph=tf.compat.v1.get_default_graph())
        activation = vars(layer).get("activation")
        # A recomputed layer's tensors are not those that its gradient sees.
        recomputed = layer._remat_mode is not None
        losses = _count_losses(layer)
        if self._open:
            self._pause()
        self._open.append(call)
        self._resume()
        if recomputed:
            _thread.calls = None
        elif type(layer) in _ACTIVATED and activation is not None:

            def noted(x):
                call.before_activation = x
                return activation(x)

            # Past `__setattr__`, which tracks.
            vars(layer)["activation"] = noted
        try:
            outputs = original(layer, *args, **kwargs)
        finally:
            _thread.calls = self
            if "activation" in vars(layer):
                vars(layer)["activation"] = activation
            self._pause()
            self._open.pop()
            if self._open:
                self._resume()
        if not call.variables:
            return self._look_into(call, outputs)
        if _count_losses(layer) > losses:
            raise ValueError(
                f"Layer {layer.name!r} reads its weights and calls `add_loss` at once, "
                "so that the loss' gradient cannot be told apart by examples. Use a "
                "weight's regularizer, the layer's activity_regularizer, or add the "
                f"loss in a layer of its own. Received: layer={layer}"
            )
        for inner in call._calls:
            call.variables.update(inner.variables)
            call.inner = True
        return self._close(call, outputs)

    def _look_into(self, call, outputs):
        for inner in call._calls:
            self._hand_up(inner)
        return outputs

    def _hand_up(self, leaf):
        parent = self._open[-1] if self._open else None
        if parent is None:
            self.leaves.append(leaf)
        elif leaf._graph is parent._graph and self._is_by_example(leaf):
            parent._calls.append(leaf)
        else:
            parent.variables.update(leaf.variables)
            parent.inner = True

    def _close(self, call, outputs):
        flat = keras.tree.flatten(outputs)
        if len(flat) > 1:
            # One output may lead to another: each gets a gradient of its own.
            flat = [_identity(x) for x in flat]
            outputs = keras.tree.pack_sequence_as(outputs, flat)
        call.outputs = floats_of(flat)
        self._hand_up(call)
        return outputs

    def _is_by_example(self, leaf):
        inputs = per_example(leaf.args, leaf.kwargs, self._batch)
        return bool(inputs) and all(_has_batch(x, self._batch) for x in leaf.outputs)

    def _resume(self):
        self._open[-1]._watcher = VariableWatcher()
        self._open[-1]._watcher.__enter__()

    def _pause(self):
        call = self._open[-1]
        call._watcher.__exit__(None, None, None)
        for variable in call._watcher.watched_variables():
            if id(variable) in self._variables:
                variable = self._variables[id(variable)]
                call.variables[id(variable)] = variable


def per_example(args, kwargs, batch: int | None) -> list[tf.Tensor]:
    """Returns the tensors among a call's arguments that have a row for each example."""
    return [x for x in keras.tree.flatten((args, kwargs)) if _has_batch(x, batch)]


def floats_of(outputs) -> list[tf.Tensor]:
    """Returns the float tensors among a layer's outputs, flat."""
    flat = keras.tree.flatten(outputs)
    return [x for x in flat if tf.is_tensor(x) and x.dtype.is_floating]


def _has_batch(x, batch):
    return tf.is_tensor(x) and x.shape.rank != 0 and x.shape[0] in (batch, None)


def _call(original, layer, *args, **kwargs):
    calls = getattr(_thread, "calls", None)
    if calls is None or not isinstance(layer, keras.layers.Layer):
        return original(layer, *args, **kwargs)
    return calls.call(original, layer, args, kwargs)


def _moments(original, layer, *args, **kwargs):
    statistics = original(layer, *args, **kwargs)
    calls = getattr(_thread, "calls", None)
    if calls is not None and calls._open[-1].layer is layer:
        calls._open[-1].statistics = statistics
    return statistics


def _count_losses(layer):
    return sum(len(inner._losses) for inner in layer._flatten_layers())


def _identity(x):
    if not tf.is_tensor(x):
        return x
    mask = backend.get_keras_mask(x)
    x = tf.identity(x)
    if mask is not None:
        backend.set_keras_mask(x, mask)
    return x
