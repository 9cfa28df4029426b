"""Rules for the gradients of single examples, one for each type of layer.

Given a layer's inputs a [examples, ...] and the loss' gradient δ with respect to its
outputs before the activation, a rule returns `Term`s. Their functions take inputs and δ
in *samples*, [samples, examples in a sample, ...], and return the gradients of the
samples, [samples, *shape of the weight].
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
import warnings
from collections.abc import Callable

import keras
import tensorflow as tf

from tfgradcomp.compat import layers as compat
from tfgradcomp.compat.variables import tensorflow_variable
from tfgradcomp.per_example.layer_calls import Call, floats_of, per_example


@dataclasses.dataclass(eq=False)
class Term:
    """Contribution of one call of a layer to the gradients of some variables.

    Attributes:
        variables: The variables.
        inputs: Tensors [examples, ...].
        deltas: Tensors [examples, ...]; the gradients are linear in them.
        gradients: (inputs, deltas) in samples -> a gradient [samples, *shape] for
            each variable.
        floats: Numbers that `gradients` holds at once for one sample of one example.
            Zero where that is no more than the inputs, so that no chunks are needed.
        squares: A shortcut: (inputs, deltas) in samples -> the sum of squares over
            the samples, of the only variable.
        min_samples: Number of samples that `gradients` must be given at once, at least.
    """

    variables: list[keras.Variable]
    inputs: list[tf.Tensor]
    deltas: list[tf.Tensor]
    gradients: Callable
    floats: int | tf.Tensor = 0
    squares: Callable | None = None
    min_samples: int = 1


def terms_of(call: Call, deltas: list, batch: int | None) -> list[Term]:
    """Returns the terms of a call.

    Args:
        call: The call of a layer.
        deltas: The loss' gradient with respect to `watched(call)`.
        batch: Static number of examples, or `None`.
    """
    rule = rule_of(call)
    terms = rule(call, deltas[0]) if rule else [_any_layer(call, deltas, batch)]
    return [term for term in terms if id(term.variables[0]) in call.variables]


def watched(call: Call) -> list[tf.Tensor]:
    """Returns the tensors with respect to which a call needs the loss' gradient."""
    if rule_of(call) and call.before_activation is not None:
        return [call.before_activation]
    return call.outputs


def rule_of(call: Call) -> Callable | None:
    """Returns the rule for a call; None where its layer is called for each example.

    Raises:
        ValueError: If the layer mixes the examples of a batch in a way without a rule.
    """
    layer = call.layer
    own = {id(v) for v in compat.own_trainable_variables(layer)}
    if isinstance(layer, keras.layers.BatchNormalization):
        # Not there before Keras 3.14.
        is_renorm = getattr(layer, "renorm", False)
        if is_renorm or type(layer) is not keras.layers.BatchNormalization:
            raise ValueError(
                "Second moments of a batch normalization need the statistics that it "
                "divides by: use keras.layers.BatchNormalization with renorm=False. "
                f"Received: layer={layer}"
            )
    elif call.reads_inner_weights or call.variables.keys() - own or _is_special(layer):
        return None
    return _RULES.get(type(layer))


def _is_special(layer):
    return bool(
        getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None)
        or compat.is_rematerialized(layer)
    )


def _dense(call, delta):
    layer = call.layer
    a, delta = _cast(layer, call.input, delta)

    def kernel(inputs, deltas):
        return [tf.matmul(_rows(inputs[0]), _rows(deltas[0]), transpose_a=True)]

    def squares(inputs, deltas):
        # One row a sample: (a δᵀ)² = a² (δ²)ᵀ.
        a, delta = (
            tf.square(tf.reshape(x, [-1, x.shape[-1]])) for x in (inputs[0], deltas[0])
        )
        return tf.matmul(a, delta, transpose_a=True)

    variable = compat.kernel_of(layer)
    term = Term([variable], [a], [delta], kernel, floats=math.prod(variable.shape))
    if a.shape.rank == 2:
        term.squares = squares
    return [term, *_bias(layer, delta)]


def _bias(layer, delta):
    if layer.bias is None:
        return []
    shape = layer.bias.shape

    def gradients(_, deltas):
        return [_sum_to(deltas[0], shape)]

    return [Term([layer.bias], [], [delta], gradients)]


def _sum_to(x, shape):
    """Sums [samples, n, ...] over the axes along which `shape` is broadcast."""
    kept = x.shape.rank - len(shape)
    axes = [*range(1, kept)]
    axes += [kept + i for i, size in enumerate(shape) if size == 1]
    return tf.reshape(tf.reduce_sum(x, axes), [-1, *shape])


def _conv(call, delta):
    layer = call.layer
    a, delta = _cast(layer, call.input, delta)
    last = layer.data_format == "channels_last"
    if not last:
        delta = tf.transpose(delta, [0, *range(2, delta.shape.rank), 1])
    variable = compat.kernel_of(layer)
    channels, filters = a.shape[-1 if last else 1], delta.shape[-1]
    groups = getattr(layer, "groups", channels)
    size = math.prod(layer.kernel_size)

    def kernel(inputs, deltas):
        a, delta = inputs[0], deltas[0]
        samples, rank = tf.shape(a)[0], a.shape.rank
        # Channels first: slices along a row copy fast, whatever their number.
        a = tf.transpose(
            a,
            [0, rank - 1, *range(1, rank - 1)] if last else [0, 2, 1, *range(3, rank)],
        )
        windows = _windows(layer, a, tf.shape(delta)[2:-1])
        if groups == 1:
            windows = tf.reshape(windows, [samples, size * channels, -1])
            gradient = tf.matmul(windows, _rows(delta))
        else:
            shape = [samples, size, groups, channels // groups, -1]
            windows = tf.reshape(windows, shape)
            delta = tf.reshape(delta, [samples, -1, groups, filters // groups])
            gradient = tf.einsum("skgip,spgo->skigo", windows, delta)
        return [tf.reshape(gradient, [samples, *variable.shape])]

    floats = math.prod(variable.shape) + _count(delta[..., 0]) * size * channels
    term = Term([variable], [a], [delta], kernel, floats=floats)
    return [term, *_bias(layer, delta)]


def _windows(layer, a, out):
    """Returns the inputs under each element of the kernel, for every output position.

    Args:
        layer: A convolution.
        a: Inputs, [s, c, n, *space].
        out: The spatial shape of the outputs.

    Returns:
        A tensor [s, elements of the kernel, c, n, *out].
    """
    paddings = [[0, 0]] * 3
    for axis, (size, stride, rate) in enumerate(
        zip(layer.kernel_size, layer.strides, layer.dilation_rate, strict=True)
    ):
        reach = (out[axis] - 1) * stride + (size - 1) * rate + 1
        missing = tf.maximum(reach - tf.shape(a)[axis + 3], 0)
        before = {"valid": 0, "same": missing // 2, "causal": (size - 1) * rate}
        before = before[layer.padding]
        paddings.append([before, missing - before])
    if layer.padding != "valid":
        a = tf.pad(a, paddings)
    windows = []
    for offset in itertools.product(*map(range, layer.kernel_size)):
        slices = []
        for axis, (stride, rate) in enumerate(
            zip(layer.strides, layer.dilation_rate, strict=True)
        ):
            begin = offset[axis] * rate
            slices.append(slice(begin, begin + (out[axis] - 1) * stride + 1, stride))
        windows.append(a[(..., *slices)])
    return tf.stack(windows, axis=1)


def _embedding(call, delta):
    layer, tokens = call.layer, call.input
    table = compat.embeddings_of(layer)
    count, width = table.shape
    delta = _cast(layer, delta)[0]
    if not tokens.dtype.is_integer:
        tokens = tf.cast(tokens, tf.int32)
    tokens = tf.where(tokens < 0, tokens + count, tokens)

    def gradients(inputs, deltas):
        samples = tf.shape(inputs[0])[0]
        tokens = tf.reshape(inputs[0], [samples, -1])
        first = tf.range(samples, dtype=tokens.dtype)[:, tf.newaxis] * count
        sums = tf.math.unsorted_segment_sum(
            tf.reshape(deltas[0], [-1, width]),
            tf.reshape(tokens + first, [-1]),
            samples * count,
        )
        return [tf.reshape(sums, [samples, count, width])]

    def squares(inputs, deltas):
        # A token's uses in one sample are summed, then squared.
        samples = tf.shape(inputs[0])[0]
        tokens = tf.reshape(inputs[0], [samples, -1])
        delta = tf.reshape(deltas[0], [samples, -1, width])
        order = tf.argsort(tokens, axis=1)
        tokens = tf.gather(tokens, order, batch_dims=1)
        delta = tf.reshape(tf.gather(delta, order, batch_dims=1), [-1, width])
        begins = tf.cast(tokens[:, 1:] != tokens[:, :-1], tf.int32)
        begins = tf.pad(begins, [[0, 0], [1, 0]], constant_values=1)
        tokens = tf.reshape(tokens, [-1])
        segment = tf.cumsum(tf.reshape(begins, [-1])) - 1
        uses = tf.size(tokens)
        sums = tf.math.unsorted_segment_sum(delta, segment, uses)
        # Empty segments get a negative token, which the last sum leaves out.
        tokens = tf.math.unsorted_segment_max(tokens, segment, uses)
        return tf.math.unsorted_segment_sum(tf.square(sums), tokens, count)

    floats = count * width
    return [Term([table], [tokens], [delta], gradients, floats, squares)]


def _batch_normalization(call, delta):
    layer = call.layer
    x, delta = _cast(layer, call.input, delta)
    if call.statistics is None:
        mean, variance = layer.moving_mean, layer.moving_variance
    else:
        mean, variance = call.statistics
    normal = keras.ops.batch_normalization(
        x,
        keras.ops.cast(mean, x.dtype),
        keras.ops.cast(variance, x.dtype),
        axis=layer.axis,
        epsilon=layer.epsilon,
    )
    return _scale_and_offset(layer, normal, delta, [layer.axis])


def _layer_normalization(call, delta):
    layer = call.layer
    x, delta = _cast(layer, call.input, delta)
    mean, variance = tf.nn.moments(x, layer.axis, keepdims=True)
    centred = x if layer.rms_scaling else x - mean
    normal = centred * tf.math.rsqrt(variance + layer.epsilon)
    return _scale_and_offset(layer, normal, delta, layer.axis)


def _rms_normalization(call, delta):
    layer = call.layer
    x, delta = _cast(layer, call.input, delta)
    normal = keras.ops.rms_normalization(x, axis=layer.axis, epsilon=layer.epsilon)
    return [_along(layer.scale, [normal], delta, layer.axis)]


def _scale_and_offset(layer, normal, delta, axes):
    terms = []
    if layer.gamma is not None:
        terms.append(_along(layer.gamma, [normal], delta, axes))
    if layer.beta is not None:
        terms.append(_along(layer.beta, [], delta, axes))
    return terms


def _along(variable, factors, delta, axes):
    """Returns the term of a variable whose shape is that of some axes of δ."""
    rank = delta.shape.rank
    kept = {axis % rank for axis in axes}
    summed = [1, *(axis + 1 for axis in range(1, rank) if axis not in kept)]

    def gradients(inputs, deltas):
        product = deltas[0] * inputs[0] if inputs else deltas[0]
        return [tf.reshape(tf.reduce_sum(product, summed), [-1, *variable.shape])]

    return Term([variable], factors, [delta], gradients)


def _einsum_dense(call, delta):
    layer = call.layer
    a, delta = _cast(layer, call.input, delta)
    left, out = layer.equation.split("->")
    left, right = left.split(",")
    free = [c for c in string.ascii_letters if c not in layer.equation]
    sample = free.pop()
    if "..." in left:
        dots = "".join(free[: a.shape.rank - len(left) + 3])
        left, out = left.replace("...", dots), out.replace("...", dots)
    equation = f"{sample}{left},{sample}{out}->{sample}{right}"

    def kernel(inputs, deltas):
        return [tf.einsum(equation, inputs[0], deltas[0])]

    variable = compat.kernel_of(layer)
    term = Term([variable], [a], [delta], kernel, floats=math.prod(variable.shape))
    return [term, *_bias(layer, delta)]


def _any_layer(call, deltas, batch):
    """Returns the term of a layer without a rule, which is called for each sample."""
    layer, variables = call.layer, list(call.variables.values())
    warnings.warn(
        f"Layer {layer.name!r} ({type(layer).__name__}) has no rule for second "
        "moments: it is called again for each example, which is slow.",
        stacklevel=3,
    )
    structure = call.args, call.kwargs
    inputs = per_example(*structure, batch)
    index_of = {id(x): i for i, x in enumerate(inputs)}

    def of_one(tensors):
        inputs, deltas = tensors
        args, kwargs = keras.tree.map_structure(
            lambda x: inputs[index_of[id(x)]] if id(x) in index_of else x, structure
        )
        with tf.GradientTape() as tape, keras.StatelessScope() as scope:
            outputs = layer(*args, **kwargs)
        if scope.state_mapping:
            raise ValueError(
                f"Layer {layer.name!r} has no rule for second moments, and draws "
                "random numbers or keeps state, so that it cannot be asked again for "
                "each example. Put dropout, noise and batch normalisation into layers "
                f"of their own. Received: layer={layer}"
            )
        return tape.gradient(
            floats_of(outputs),
            [tensorflow_variable(variable) for variable in variables],
            output_gradients=deltas,
            unconnected_gradients="zero",
        )

    def gradients(inputs, deltas):
        return tf.vectorized_map(of_one, (inputs, deltas))

    floats = sum(math.prod(v.shape) for v in variables)
    for x in [*inputs, *call.outputs]:
        floats += 4 * _count(x)
    deltas = [
        tf.zeros_like(x) if d is None else d
        for x, d in zip(call.outputs, deltas, strict=True)
    ]
    # TensorFlow cannot vectorize a recurrent layer's loop over a single sample.
    return Term(variables, inputs, deltas, gradients, floats, min_samples=2)


def _cast(layer, *tensors):
    """Casts tensors to the type of the weights, at least float32."""
    dtype = keras.backend.result_type(layer.variable_dtype, "float32")
    return [tf.cast(x, dtype) for x in tensors]


def _count(x):
    """Returns the size of one example of [examples, ...]; static if the shape is."""
    if x.shape[1:].is_fully_defined():
        return math.prod(x.shape[1:])
    return tf.reduce_prod(tf.shape(x, tf.int64)[1:])


def _rows(x):
    """Reshapes [samples, ..., c] to [samples, rows, c]."""
    return tf.reshape(x, [tf.shape(x)[0], -1, x.shape[-1]])


_RULES = {
    keras.layers.Dense: _dense,
    keras.layers.EinsumDense: _einsum_dense,
    keras.layers.Conv1D: _conv,
    keras.layers.Conv2D: _conv,
    keras.layers.Conv3D: _conv,
    keras.layers.DepthwiseConv1D: _conv,
    keras.layers.DepthwiseConv2D: _conv,
    keras.layers.Embedding: _embedding,
    keras.layers.BatchNormalization: _batch_normalization,
    keras.layers.LayerNormalization: _layer_normalization,
    keras.layers.RMSNormalization: _rms_normalization,
}
