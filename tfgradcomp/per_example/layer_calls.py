"""Record of the layers that read weights in a forward pass, with inputs and outputs.

A call of a layer that reads a weight is a *leaf*: its inputs, its outputs and the loss'
gradient with respect to the outputs determine each example's contribution to the
gradient of the weight. If a layer only calls other layers, their calls are recorded
instead. If these calls run in a loop, are recomputed in the backward pass, or have no
axis of examples, the outer layer becomes the leaf, in the worst case the whole model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import keras
import tensorflow as tf

from tfgradcomp.compat import layers as compat
from tfgradcomp.compat.replace import replaced_attribute
from tfgradcomp.compat.variables import tensorflow_variables
from tfgradcomp.compat.watcher import VariableReads

_thread = threading.local()
# The rules of these layers need the gradient with respect to the activation's input.
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
class LayerCall:
    """One call of a layer that reads weights.

    Attributes:
        layer: The layer.
        args: Positional arguments, in the types that the layer casts them to.
        kwargs: Keyword arguments.
        variables: The trainable variables that the layer, or a layer in it, has read,
            by their ids.
        outputs: Float outputs, flat.
        before_activation: Input of the layer's activation, if known.
        statistics: Mean and variance of the batch, if the layer normalized by them.
        reads_inner_weights: True if the layer reads weights of layers within it.
    """

    layer: keras.layers.Layer
    args: tuple
    kwargs: dict
    variables: dict = dataclasses.field(default_factory=dict)
    outputs: list = dataclasses.field(default_factory=list)
    before_activation: tf.Tensor | None = None
    statistics: tuple | None = None
    reads_inner_weights: bool = False
    _calls: list = dataclasses.field(default_factory=list)
    _graph: object = None
    _reads: VariableReads = dataclasses.field(default_factory=VariableReads)

    @property
    def input(self) -> tf.Tensor:
        """First argument of the call."""
        if self.args:
            return self.args[0]
        return next(self.kwargs[n] for n in ("inputs", "x") if n in self.kwargs)


class CallRecorder:
    """Context that records the leaves of the forward pass inside it.

    Args:
        variables: The trainable variables whose reads are recorded.
        batch: Static number of examples; None if it is not static.
    """

    def __init__(self, variables: list[keras.Variable], batch: int | None):
        compat.intercept_layer_calls(_call)
        compat.intercept_batch_statistics(_batch_statistics)
        self.leaves: list[LayerCall] = []
        self._batch = batch
        self._open: list[LayerCall] = []
        self._variables = {
            id(value): variable
            for variable in variables
            for value in tensorflow_variables(variable)
        }

    def __enter__(self):
        _thread.calls = self
        return self

    def __exit__(self, *_):
        _thread.calls = None

    @property
    def innermost(self) -> LayerCall:
        """The innermost of the calls that are running."""
        return self._open[-1]

    def call(self, original, layer, args, kwargs):
        """Calls a layer, and records the weights that it reads."""
        call = LayerCall(layer, args, kwargs, _graph=tf.compat.v1.get_default_graph())
        # The backward pass of a recomputed layer sees other tensors than these.
        recomputed = compat.is_rematerialized(layer)
        losses = compat.count_added_losses(layer)
        if self._open:
            self._pause()
        self._open.append(call)
        self._resume()
        if recomputed:
            _thread.calls = None
        try:
            with _recorded_activation(call):
                outputs = original(layer, *args, **kwargs)
        finally:
            _thread.calls = self
            self._pause()
            self._open.pop()
            if self._open:
                self._resume()
        if not call.variables:
            for inner in call._calls:
                self._hand_up(inner)
            return outputs
        if compat.count_added_losses(layer) > losses:
            raise ValueError(
                f"Layer {layer.name!r} reads its weights and calls `add_loss` in one "
                "call, so the loss' gradient cannot be split by examples. Use a "
                "weight's regularizer, the layer's activity_regularizer, or add the "
                f"loss in a separate layer. Received: layer={layer}"
            )
        for inner in call._calls:
            call.variables.update(inner.variables)
            call.reads_inner_weights = True
        return self._close(call, outputs)

    def _hand_up(self, leaf):
        parent = self._open[-1] if self._open else None
        if parent is None:
            self.leaves.append(leaf)
        elif leaf._graph is parent._graph and self._is_by_example(leaf):
            parent._calls.append(leaf)
        else:
            parent.variables.update(leaf.variables)
            parent.reads_inner_weights = True

    def _close(self, call, outputs):
        flat = keras.tree.flatten(outputs)
        if len(flat) > 1:
            # One output may depend on another: each copy gets its own gradient.
            flat = [compat.copy_with_mask(x) for x in flat]
            outputs = keras.tree.pack_sequence_as(outputs, flat)
        call.outputs = floats_of(flat)
        self._hand_up(call)
        return outputs

    def _is_by_example(self, leaf):
        inputs = per_example(leaf.args, leaf.kwargs, self._batch)
        return bool(inputs) and all(_has_batch(x, self._batch) for x in leaf.outputs)

    def _resume(self):
        self.innermost._reads.start()

    def _pause(self):
        for value in self.innermost._reads.stop():
            if id(value) in self._variables:
                variable = self._variables[id(value)]
                self.innermost.variables[id(variable)] = variable


def per_example(args, kwargs, batch: int | None) -> list[tf.Tensor]:
    """Returns the tensors among a call's arguments that have an axis of examples."""
    return [x for x in keras.tree.flatten((args, kwargs)) if _has_batch(x, batch)]


def floats_of(outputs) -> list[tf.Tensor]:
    """Returns the float tensors among a layer's outputs, flat."""
    flat = keras.tree.flatten(outputs)
    return [x for x in flat if tf.is_tensor(x) and x.dtype.is_floating]


def _has_batch(x, batch):
    return tf.is_tensor(x) and x.shape.rank != 0 and x.shape[0] in (batch, None)


def _recorded_activation(call: LayerCall):
    """Returns a context in which the layer's activation records its argument."""
    layer = call.layer
    activation = vars(layer).get("activation")
    has_rule = type(layer) in _ACTIVATED and not compat.is_rematerialized(layer)
    if activation is None or not has_rule:
        return contextlib.nullcontext()

    def recording_activation(x):
        call.before_activation = x
        return activation(x)

    return replaced_attribute(layer, "activation", recording_activation)


def _call(original, layer, *args, **kwargs):
    calls = getattr(_thread, "calls", None)
    if calls is None or not isinstance(layer, keras.layers.Layer):
        return original(layer, *args, **kwargs)
    return calls.call(original, layer, args, kwargs)


def _batch_statistics(original, layer, *args, **kwargs):
    statistics = original(layer, *args, **kwargs)
    calls = getattr(_thread, "calls", None)
    if calls is not None and calls.innermost.layer is layer:
        calls.innermost.statistics = statistics
    return statistics
