"""The rows of the table that ops.py makes: every op with its inputs, by family."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from op_inputs import Inputs, Row
from workloads import resnet_50

from tfgradcomp.compressors.low_rank import Matrices
from tfgradcomp.core import Layout, SplitVector
from tfgradcomp.ops import pack_largest, uniform
from tfgradcomp.ops.reference.chunks import ChunkFormat


def make_rows(size: int) -> list[Row]:
    """Returns what is timed, on vectors of `size` floats."""
    inputs = Inputs(size)
    families = (
        _signs,
        _codes,
        _ternary,
        _means_of_signs,
        _votes,
        _levels,
        _statistics,
        _momentum,
        _error_feedback,
        _server_error_feedback,
        _sparse,
        _largest,
        _low_rank,
    )
    return [row for family in families for row in family(inputs)]


def _of_tensors(inputs: Inputs, function: Callable) -> tuple[Callable, Callable]:
    """Returns a function of the gradient: of its tensors, and of these joined."""
    return (
        lambda ops: (lambda *x: function(ops, SplitVector(x)), inputs.tensors),
        lambda ops: (lambda *x: function(ops, tf.concat(x, 0)), inputs.tensors),
    )


def _sum_levels(inputs: Inputs, base: int, packed: tf.Tensor) -> Callable:
    zero = packed.shape[0] * (base - 1) // 2 if base > 2 else 1
    step = 1 if base > 2 else 2
    scale = inputs.scales(1)
    return lambda ops: (
        lambda w, s: ops.sum_levels(w, s, inputs.one, base, step, zero),
        (packed, scale),
    )


def _signs(inputs: Inputs) -> list[Row]:
    tensors, joined = _of_tensors(inputs, lambda ops, x: ops.pack_signs(x))
    return [
        Row("pack signs", lambda ops: (ops.pack_signs, (inputs.x,)), 1.5),
        Row("pack signs of layers' tensors", tensors, in_python=False),
        Row("the same, joined first", joined, in_python=False),
        Row("unpack signs to floats", _sum_levels(inputs, 2, inputs.signs_1), 1.4),
    ]


def _codes(inputs: Inputs) -> list[Row]:
    size, codes = inputs.size, inputs.codes(3)
    ternary_1, ternary_4 = inputs.ternary_1, inputs.words(3, 4)
    return [
        Row(
            "pack base 3 from codes",
            lambda ops: (lambda c: ops.pack_codes(c, 3), (codes,)),
            1.2,
        ),
        Row("unpack base 3 to floats", _sum_levels(inputs, 3, ternary_1), 1.2),
        Row(
            "unpack base 3 to codes",
            lambda ops: (lambda w: ops.unpack_codes(w, 3, size), (ternary_1,)),
        ),
        Row(
            "unpack base 9 to floats",
            _sum_levels(inputs, 9, inputs.words(9, 1)),
        ),
        Row(
            "sum of 4 base-3 payloads to floats",
            _sum_levels(inputs, 3, ternary_4),
        ),
        Row(
            "sum of 4 base-3 payloads to words",
            lambda ops: (lambda w: ops.sum_codes(w, 3, size), (ternary_4,)),
        ),
        *(
            Row(
                f"base 3 to base {sum_base}",
                lambda ops, sum_base=sum_base: (
                    lambda w: ops.sum_codes(w, 3, size, sum_base),
                    (ternary_1,),
                ),
            )
            for sum_base in (5, 9, 17)
        ),
        Row(
            "base 2 to base 5",
            lambda ops: (lambda w: ops.sum_codes(w, 2, size, 5), (inputs.signs_1,)),
        ),
    ]


def _ternary(inputs: Inputs) -> list[Row]:
    arguments = inputs.x, inputs.limit, inputs.stream

    def of_single_ops(ops):
        def step(x, limit, stream):
            clipped = tf.clip_by_value(x, -limit, limit)
            drawn = uniform(stream, inputs.size)
            kept = drawn * limit < tf.abs(clipped)
            sign = tf.cast(tf.sign(clipped), tf.int32)
            return ops.pack_codes(tf.where(kept, sign, 0) + 1, 3)

        return step, arguments

    return [
        Row(
            "clip, ternarise and pack",
            lambda ops: (
                lambda x, s, r: ops.pack_ternary(x, s, s, inputs.one, r),
                arguments,
            ),
            0.5,
        ),
        Row("the same of single ops", of_single_ops, in_python=False),
    ]


def _means_of_signs(inputs: Inputs) -> list[Row]:
    one, arguments = inputs.one, (inputs.signs_8, inputs.scales(8, 1))

    def of_single_ops(ops):
        def step(w, s):
            total = 0.0
            for i in range(8):
                total += ops.mean_of_signs(w[i : i + 1], s[i : i + 1], one)
            return total / 8

        return step, arguments

    def to_tensors(ops):
        def step(w, s):
            return ops.mean_of_signs(w, s, one, np.diff(inputs.layers).tolist()).tensors

        return step, arguments

    def that_is_split(ops):
        def step(w, s):
            return tf.split(ops.mean_of_signs(w, s, one), np.diff(inputs.layers))

        return step, arguments

    return [
        Row(
            "mean of 8 sign payloads",
            lambda ops: (lambda w, s: ops.mean_of_signs(w, s, one), arguments),
            0.6,
        ),
        Row("the same of single ops ", of_single_ops, in_python=False),
        Row("the same to layers' tensors", to_tensors, in_python=False),
        Row("the same, split at last", that_is_split, in_python=False),
    ]


def _votes(inputs: Inputs) -> list[Row]:
    return [
        Row(
            "majority vote of 8 sign payloads",
            lambda ops: (
                lambda w, r: ops.majority_vote(w, inputs.size, 2, 2, 0, r),
                (inputs.signs_8, inputs.stream),
            ),
        )
    ]


def _levels(inputs: Inputs) -> list[Row]:
    x, stream, buckets = inputs.x, inputs.stream, inputs.buckets
    drawn = x, stream
    nine_4 = inputs.words(9, 4)
    table = tf.sort(inputs.scales(4, len(buckets) - 1, 9))

    def with_levels_of(rule, count):
        def make(ops):
            def encode(x, stream):
                found, nonfinite = ops.find_levels(x, buckets, rule, count)
                return ops.pack_levels(x, found, buckets, stream), found, nonfinite

            return encode, drawn

        return make

    def qsgd(count):
        places = tf.linspace(-1.0, 1.0, count)

        def make(ops):
            def encode(x, stream):
                largest = ops.block_statistics(x, buckets, ()).maximum
                levels = tf.cast(largest, tf.float32)[:, tf.newaxis] * places
                return ops.pack_levels(x, levels, buckets, stream), largest

            return encode, drawn

        return make

    return [
        Row(
            "find levels, ORQ-9",
            lambda ops: (lambda x: ops.find_levels(x, buckets, "optimal", 9), (x,)),
        ),
        Row("round to bfloat16 at random", lambda ops: (ops.round_to_bfloat16, drawn)),
        Row("ORQ-9 encode", with_levels_of("optimal", 9)),
        Row("Linear-9 encode", with_levels_of("quantiles", 9)),
        Row("BinGrad-pb encode", with_levels_of("symmetric", 2)),
        Row(
            "find levels, BinGrad-b",
            lambda ops: (lambda x: ops.find_levels(x, buckets, "means", 3), (x,)),
        ),
        Row("QSGD-9 encode", qsgd(9), 0.5),
        Row("QSGD-257 encode", qsgd(257), in_python=False),
        Row(
            "mean of 4 base-9 payloads of levels",
            lambda ops: (
                lambda w, table: ops.mean_of_levels(w, table, buckets),
                (nine_4, table),
            ),
        ),
    ]


def _statistics(inputs: Inputs) -> list[Row]:
    return [
        Row(
            "statistics of layers",
            lambda ops: (
                lambda x: ops.block_statistics(x, inputs.layers),
                (inputs.x,),
            ),
        )
    ]


def _momentum(inputs: Inputs) -> list[Row]:
    return [
        Row(
            "moving average and pack signs",
            lambda ops: (
                lambda *args: ops.pack_momentum_signs(*args[:2], 0.9, *args[2:]),
                (inputs.x, inputs.m, inputs.false, inputs.stream),
            ),
        )
    ]


def _error_feedback(inputs: Inputs) -> list[Row]:
    m, e, ratio, true = inputs.m, inputs.e, inputs.ratio, inputs.true
    one, layers = inputs.one, inputs.layers
    arguments = inputs.x, m, e, ratio, true
    tensors, joined = _of_tensors(
        inputs,
        lambda ops, x: ops.sign_error_feedback(x, m, e, 0.9, ratio, true, layers),
    )

    def feedback(splits):
        return lambda ops: (
            lambda *args: ops.sign_error_feedback(*args[:3], 0.9, *args[3:], splits),
            arguments,
        )

    def of_single_ops(ops):
        def step(x, m, e, ratio, moving):
            m = 0.9 * m + x
            p = 0.9 * m + x + ratio * e
            mean = ops.block_statistics(p, layers).l1 / np.diff(layers)
            s = tf.cast(mean, tf.float32)
            signs = ops.pack_signs(p)
            sent = ops.mean_of_signs(signs[tf.newaxis], s[tf.newaxis], layers)
            return signs, s, m, tf.where(moving, p - sent, e)

        return step, arguments

    return [
        Row("error feedback, layers", feedback(layers), 0.8, "triad"),
        Row(
            "error feedback, layers' tensors",
            tensors,
            baseline="triad",
            in_python=False,
        ),
        Row("the same, joined first ", joined, baseline="triad", in_python=False),
        Row("error feedback, one block", feedback(one), 0.8, "triad"),
        Row(
            "error feedback, layers, of single ops",
            of_single_ops,
            baseline="triad",
            in_python=False,
        ),
    ]


def _server_error_feedback(inputs: Inputs) -> list[Row]:
    layers, e, ratio, true = inputs.layers, inputs.e, inputs.ratio, inputs.true
    blocks = len(layers) - 1
    sent = inputs.signs_4, inputs.scales(4, blocks)
    return [
        Row(
            "server's error feedback of 4 payloads",
            lambda ops: (
                lambda *args: ops.mean_sign_error_feedback(*args, layers),
                (*sent, e, ratio, true),
            ),
        ),
        Row(
            "its first half: signs and sums",
            lambda ops: (
                lambda *args: ops.mean_sign_sums(*args, layers),
                (*sent, e, ratio),
            ),
        ),
        Row(
            "its second half: the residual",
            lambda ops: (
                lambda *args: ops.mean_sign_residual(*args, layers),
                (*sent, e, ratio, true, inputs.signs_1[0], inputs.scales(blocks)),
            ),
        ),
    ]


def _sparse(inputs: Inputs) -> list[Row]:
    layers, sent = inputs.layers, inputs.sparse_words(4)
    # One in a thousand sums r = x + e has r * r > 1.5 * (moments + variance).
    moments, variance = tf.fill([inputs.size], 7.2), tf.fill([inputs.size], 7.2)
    arguments = inputs.x, moments, inputs.e, variance
    return [
        Row(
            "pack what is unambiguous, 1 in 1000",
            lambda ops: (
                lambda *args: ops.pack_unambiguous(*args, 1.5, 0.999, layers),
                arguments,
            ),
            baseline="triad",
        ),
        Row(
            "pack what is over a threshold, 1 in 1000",
            lambda ops: (
                lambda *args: ops.pack_over_threshold(
                    *args, [3.0] * (len(layers) - 1), 1.5, 0.999, layers
                ),
                arguments,
            ),
            baseline="triad",
        ),
        Row(
            "mean of 4 sparse payloads, 1 in 1000 each",
            lambda ops: (
                lambda w, s: ops.mean_of_sparse(w, s, layers),
                (sent, inputs.scales(4, len(layers) - 1)),
            ),
        ),
    ]


def _largest(inputs: Inputs) -> list[Row]:
    x, form = inputs.x, ChunkFormat(64, 4096, 2)
    splits = Layout.from_sizes([inputs.size], form.chunk).row_splits
    levels = inputs.scales(4, len(splits) - 1, form.levels)
    # What any vector sends, of each worker.
    sent = tf.tile(pack_largest(x, splits, *form)[0][tf.newaxis], [4, 1])
    return [
        Row(
            "pack the 64 largest of 4096",
            lambda ops: (lambda x: ops.pack_largest(x, splits, *form), (x,)),
        ),
        Row(
            "mean of 4 payloads of the 64 largest of 4096",
            lambda ops: (
                lambda w, levels: ops.mean_of_largest(w, levels, splits, *form),
                (sent, levels),
            ),
        ),
    ]


def _low_rank(inputs: Inputs) -> list[Row]:
    rank, shapes, left = 4, [], inputs.size
    for shape in itertools.cycle(resnet_50()):
        if math.prod(shape) > left:
            break
        shapes.append(shape)
        left -= math.prod(shape)
    matrices = Matrices.of(Layout.from_shapes([*shapes, (left,)]), rank)
    of_left = inputs.x[: rank * sum(matrices.heights)]
    of_right = inputs.x[: rank * sum(matrices.widths)]
    values = inputs.x[: rank * sum(matrices.widths) + matrices.others]
    # Pure TensorFlow takes minutes to build the graphs.
    return [
        Row(
            "matrices times factors of rank 4",
            lambda ops: (
                lambda x, q: ops.multiply_matrices(x, q, *matrices, rank),
                (inputs.x, of_right),
            ),
            in_python=False,
        ),
        Row(
            "transposed matrices times factors",
            lambda ops: (
                lambda x, p: ops.multiply_transposed(x, p, *matrices, rank),
                (inputs.x, of_left),
            ),
            in_python=False,
        ),
        Row(
            "products of factors of rank 4",
            lambda ops: (
                lambda p, q: ops.multiply_factors(p, q, *matrices, rank),
                (of_left, values),
            ),
            in_python=False,
        ),
        Row(
            "orthonormal factors of rank 4",
            lambda ops: (
                lambda p: ops.orthonormalize(p, matrices.heights, rank),
                (of_left,),
            ),
            in_python=False,
        ),
    ]
