"""Rules for the gradients of single examples, one for each type of layer.

A rule takes a layer's call, its input a [examples, ...] and the loss' gradient δ with
respect to its output before the activation, and returns `Term`s. A term's functions
take inputs and δ in *samples*, [samples, examples in a sample, ...], and return the
gradients of the samples, [samples, *shape of the weight].
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
from tfgradcomp.per_example.layer_calls import LayerCall, floats_of, per_example


@dataclasses.dataclass(eq=False)
class Term:
    """Contribution of one call of a layer to the gradients of some variables.

    Attributes:
        variables: The variables.
        inputs: Tensors [examples, ...].
        deltas: Tensors [examples, ...]; the gradients are linear in them.
        gradients: (inputs, deltas) in samples -> a gradient [samples, *shape] for
            each variable.
        floats: Number of floats that `gradients` holds at once per example. Zero if it
            holds no more than the inputs, so that no chunks are needed.
        squares: A shortcut for a single variable: (inputs, deltas) in samples -> the
            sum of squares over the samples.
        min_samples: Smallest number of samples that `gradients` can be given at once.
    """

    variables: list[keras.Variable]
    inputs: list[tf.Tensor]
    deltas: list[tf.Tensor]
    gradients: Callable
    floats: int | tf.Tensor = 0
    squares: Callable | None = None
    min_samples: int = 1


def terms_of(call: LayerCall, deltas: list, batch: int | None) -> list[Term]:
    """Returns the terms of a call.

    Args:
        call: The call of a layer.
        deltas: The loss' gradient with respect to `watched(call)`.
        batch: Static number of examples; None if it is not static.
    """
    if rule := rule_of(call):
        # The type of the weights, at least float32.
        dtype = keras.backend.result_type(call.layer.variable_dtype, "float32")
        terms = rule(call, *(tf.cast(x, dtype) for x in (call.input, deltas[0])))
    else:
        terms = [_any_layer(call, deltas, batch)]
    return [term for term in terms if id(term.variables[0]) in call.variables]


def watched(call: LayerCall) -> list[tf.Tensor]:
    """Returns the tensors with respect to which a call needs the loss' gradient."""
    if rule_of(call) and call.before_activation is not None:
        return [call.before_activation]
    return call.outputs


def rule_of(call: LayerCall) -> Callable | None:
    """Returns the rule for a call; None if its layer is called again for each example.

    Raises:
        ValueError: If the layer mixes the examples of a batch in a way without a rule.
    """
    layer = call.layer
    if isinstance(layer, keras.layers.BatchNormalization):
        # Keras before 3.14 has no `renorm`.
        is_renorm = getattr(layer, "renorm", False)
        if is_renorm or type(layer) is not keras.layers.BatchNormalization:
            raise ValueError(
                "Second moments of a batch normalization need the statistics by which "
                "it divides. Use keras.layers.BatchNormalization with renorm=False. "
                f"Received: layer={layer}"
            )
        return _RULES[type(layer)]
    known = {id(v) for v in compat.own_trainable_variables(layer)}
    has_no_rule = (
        call.reads_inner_weights
        or call.variables.keys() - known
        or getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None)
        or compat.is_rematerialized(layer)
    )
    return None if has_no_rule else _RULES.get(type(layer))


def _dense(call, a, delta):
    def gradient(a, delta):
        return tf.matmul(_rows(a), _rows(delta), transpose_a=True)

    def squares(inputs, deltas):
        rows = (tf.reshape(x, [-1, x.shape[-1]]) for x in (*inputs, *deltas))
        # (a δᵀ)² = a² (δ²)ᵀ
        return tf.matmul(*map(tf.square, rows), transpose_a=True)

    # With one row per example.
    shortcut = squares if a.shape.rank == 2 else None
    return _kernel_terms(call.layer, a, delta, gradient, squares=shortcut)


def _kernel_terms(layer, a, delta, gradient, floats=0, squares=None):
    """Returns the terms of a layer's kernel, and of its bias if it has one.

    Args:
        layer: The layer.
        a: Inputs of the layer.
        delta: δ.
        gradient: Function (a, δ) in samples -> gradients of the kernel.
        floats: Number of floats that `gradient` holds besides its result.
        squares: `Term.squares` of the kernel.
    """
    kernel, bias = compat.kernel_of(layer), layer.bias

    def kernel_gradients(inputs, deltas):
        return [gradient(inputs[0], deltas[0])]

    def bias_gradients(_, deltas):
        return [_sum_to(deltas[0], bias.shape)]

    floats += math.prod(kernel.shape)
    terms = [Term([kernel], [a], [delta], kernel_gradients, floats, squares)]
    if bias is not None:
        terms.append(Term([bias], [], [delta], bias_gradients))
    return terms


def _sum_to(x, shape):
    """Sums [samples, n, ...] over the axes along which `shape` is broadcast."""
    kept = x.shape.rank - len(shape)
    axes = [*range(1, kept)]
    axes += [kept + i for i, size in enumerate(shape) if size == 1]
    return tf.reshape(tf.reduce_sum(x, axes), [-1, *shape])


def _conv(call, a, delta):
    layer = call.layer
    last = layer.data_format == "channels_last"
    if not last:
        delta = tf.transpose(delta, [0, *range(2, delta.shape.rank), 1])
    shape = compat.kernel_of(layer).shape
    channels, filters = a.shape[-1 if last else 1], delta.shape[-1]
    groups = getattr(layer, "groups", channels)
    size = math.prod(layer.kernel_size)

    def gradient(a, delta):
        samples, rank = tf.shape(a)[0], a.shape.rank
        # Channels first: slices along a row copy fast, whatever their number.
        channels_first = 0, 2, 1, *range(3, rank)
        order = (0, rank - 1, *range(1, rank - 1)) if last else channels_first
        windows = _windows(layer, tf.transpose(a, order), tf.shape(delta)[2:-1])
        if groups == 1:
            windows = tf.reshape(windows, [samples, size * channels, -1])
            result = tf.matmul(windows, _rows(delta))
        else:
            parts = [samples, size, groups, channels // groups, -1]
            windows = tf.reshape(windows, parts)
            delta = tf.reshape(delta, [samples, -1, groups, filters // groups])
            result = tf.einsum("skgip,spgo->skigo", windows, delta)
        return tf.reshape(result, [samples, *shape])

    floats = _count(delta[..., 0]) * size * channels
    return _kernel_terms(layer, a, delta, gradient, floats)


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
        amounts = {"valid": 0, "same": missing // 2, "causal": (size - 1) * rate}
        before = amounts[layer.padding]
        paddings.append([before, tf.maximum(missing - before, 0)])
    if layer.padding != "valid":
        a = tf.pad(a, paddings)
    windows = []
    for offsets in itertools.product(*map(range, layer.kernel_size)):
        slices = []
        for axis, stride in enumerate(layer.strides):
            begin = offsets[axis] * layer.dilation_rate[axis]
            slices.append(slice(begin, begin + (out[axis] - 1) * stride + 1, stride))
        windows.append(a[(..., *slices)])
    return tf.stack(windows, axis=1)


def _embedding(call, _, delta):
    tokens, table = call.input, compat.embeddings_of(call.layer)
    count, width = table.shape
    if tokens.dtype not in (tf.int32, tf.int64):
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
        # The uses of a token in one sample are summed, then squared.
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
        # Empty segments get a negative token, which the last sum ignores.
        tokens = tf.math.unsorted_segment_max(tokens, segment, uses)
        return tf.math.unsorted_segment_sum(tf.square(sums), tokens, count)

    floats = count * width
    return [Term([table], [tokens], [delta], gradients, floats, squares)]


def _batch_normalization(call, x, delta):
    layer = call.layer
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
    return _affine_terms(layer.gamma, layer.beta, normal, delta, [layer.axis])


def _layer_normalization(call, x, delta):
    layer = call.layer
    mean, variance = tf.nn.moments(x, layer.axis, keepdims=True)
    centred = x if layer.rms_scaling else x - mean
    normal = centred * tf.math.rsqrt(variance + layer.epsilon)
    return _affine_terms(layer.gamma, layer.beta, normal, delta, layer.axis)


def _rms_normalization(call, x, delta):
    layer = call.layer
    normal = keras.ops.rms_normalization(x, axis=layer.axis, epsilon=layer.epsilon)
    return _affine_terms(layer.scale, None, normal, delta, layer.axis)


def _affine_terms(scale, offset, normal, delta, axes):
    """Returns the terms of a scale and an offset along some axes; each may be None."""
    rank = delta.shape.rank
    kept = {axis % rank for axis in axes}
    summed = [1, *(axis + 1 for axis in range(1, rank) if axis not in kept)]

    def term(variable, factors):
        def gradients(inputs, deltas):
            product = deltas[0] * inputs[0] if inputs else deltas[0]
            return [tf.reshape(tf.reduce_sum(product, summed), [-1, *variable.shape])]

        return Term([variable], factors, [delta], gradients)

    terms = [] if scale is None else [term(scale, [normal])]
    return terms if offset is None else [*terms, term(offset, [])]


def _einsum_dense(call, a, delta):
    layer = call.layer
    left, out = layer.equation.split("->")
    left, right = left.split(",")
    free = [c for c in string.ascii_letters if c not in layer.equation]
    sample = free.pop()
    if "..." in left:
        dots = "".join(free[: a.shape.rank - len(left) + 3])
        left, out = left.replace("...", dots), out.replace("...", dots)
    equation = f"{sample}{left},{sample}{out}->{sample}{right}"

    def gradient(a, delta):
        return tf.einsum(equation, a, delta)

    return _kernel_terms(layer, a, delta, gradient)


def _any_layer(call, deltas, batch):
    """Returns the term of a layer without a rule, by calling it for each sample."""
    layer, variables = call.layer, list(call.variables.values())
    warnings.warn(
        f"Layer {layer.name!r} ({type(layer).__name__}) has no rule for second "
        "moments: it is called again for each example, which is slow.",
        stacklevel=3,
    )
    structure = call.args, call.kwargs
    inputs = per_example(*structure, batch)
    index_of = {id(x): i for i, x in enumerate(inputs)}

    def of_sample(tensors):
        inputs, deltas = tensors
        args, kwargs = keras.tree.map_structure(
            lambda x: inputs[index_of[id(x)]] if id(x) in index_of else x, structure
        )
        with tf.GradientTape() as tape, keras.StatelessScope() as scope:
            outputs = layer(*args, **kwargs)
        if scope.state_mapping:
            raise ValueError(
                f"Layer {layer.name!r} has no rule for second moments, and draws "
                "random numbers or keeps state, so it cannot be called again for each "
                "example. Put dropout, noise and batch normalization into separate "
                f"layers. Received: layer={layer}"
            )
        return tape.gradient(
            floats_of(outputs),
            [tensorflow_variable(variable) for variable in variables],
            output_gradients=deltas,
            unconnected_gradients="zero",
        )

    def gradients(inputs, deltas):
        return tf.vectorized_map(of_sample, (inputs, deltas))

    floats = sum(math.prod(v.shape) for v in variables)
    floats += sum(4 * _count(x) for x in [*inputs, *call.outputs])
    deltas = [
        tf.zeros_like(x) if d is None else d
        for x, d in zip(call.outputs, deltas, strict=True)
    ]
    # TensorFlow cannot vectorize a recurrent layer's loop over a single sample.
    return Term(variables, inputs, deltas, gradients, floats, min_samples=2)


def _count(x):
    """Returns the size of an example in [examples, ...], an int if it is static."""
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
