"""Figures that a worker computes from its own vectors, for buckets and for rounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.compressors import Clip, Compressor, ErrorFeedback, OptimalScale
from tfgradcomp.compressors.base import Wrapper
from tfgradcomp.compressors.sparse_compressor import SparseCompressor
from tfgradcomp.core import Context, Fields, Layout, State, contracts


class Vectors(NamedTuple):
    """The vectors of a worker in one compression.

    Attributes:
        layout: Their layout.
        padding: Number of zeros at their beginning, which are no elements.
        rounding: The part of the compressor that rounds `p`.
        x: This worker's mean gradient.
        p: Input of the rounding: `x` with the method's momentum and residual.
        q: The decoded payload.
        elements_sent: Number of elements in the payload.
    """

    layout: Layout
    padding: int
    rounding: Compressor
    x: tf.Tensor
    p: tf.Tensor
    q: tf.Tensor
    elements_sent: tf.Tensor | int

    @classmethod
    def of(
        cls,
        compressor: Compressor,
        x: tf.Tensor,
        state: State,
        payload: Fields,
        layout: Layout,
        context: Context,
        elements_sent: tf.Tensor | int,
        padding: int = 0,
    ) -> Vectors:
        """Returns the vectors of a payload.

        Args:
            compressor: The compressor, not fused.
            x: The gradient, float32.
            state: The compressor's state before it compressed.
            payload: Its payload.
            layout: The layout.
            context: The context of the step.
            elements_sent: Number of elements in the payload.
            padding: Number of zeros at the beginning.
        """
        rounding, p = _rounded(compressor, x, state, layout, context)
        q = tf.convert_to_tensor(compressor.decompress(payload, layout))
        return cls(layout, padding, rounding, x, p, q, elements_sent)


def names(
    compressor: Compressor, has_residual: bool, has_server_residual: bool
) -> list[str]:
    """Returns the names of the `figures` that a compressor has."""
    chain = [compressor]
    while isinstance(chain[-1], Wrapper):
        chain.append(chain[-1].compressor)
    exists = {
        "quantization_error": chain[-1].is_scaled,
        "zero_share": True,
        "clipped_share": any(isinstance(part, Clip) for part in chain),
        "residual_norm": has_residual,
        "server_residual_norm": has_server_residual,
        "block_variation": True,
        "elements_sent": True,
    }
    return [name for name, is_there in exists.items() if is_there]


def sums(
    vectors: Vectors,
    residuals: Iterable[tf.Tensor],
    server_residuals: Iterable[tf.Tensor] = (),
) -> dict[str, tf.Tensor]:
    """Returns sums over the elements of vectors, float64 scalars, by names.

    Args:
        vectors: The vectors.
        residuals: This worker's residuals after it compressed.
        server_residuals: Those of the server.
    """
    p, q, splits = vectors.p, vectors.q, vectors.layout.row_splits
    found = {
        "elements": vectors.layout.size - vectors.padding,
        "error": square(q - p),
        "length": square(p),
        "zeros": tf.math.count_nonzero(tf.equal(q[vectors.padding :], 0)),
        "clipped": 0,
        "sent": vectors.elements_sent,
        "residual": sum(map(square, residuals)),
        "server_residual": sum(map(square, server_residuals)),
    }
    statistics = ops.block_statistics(vectors.x, splits, ("l1", "sum_of_squares"))
    width = tf.cast(ops.widths(splits), tf.float64)
    mean = statistics.l1 / width
    variance = tf.maximum(statistics.sum_of_squares / width - mean * mean, 0)
    counts = (width > 1) & (mean > 0)
    variation = tf.where(counts, tf.math.divide_no_nan(tf.sqrt(variance), mean), 0)
    found["variation"] = tf.reduce_sum(variation)
    found["blocks"] = tf.math.count_nonzero(counts)
    if isinstance(vectors.rounding, Clip):
        limit = vectors.rounding.limit(ops.block_statistics(p, splits), vectors.layout)
        is_clipped = tf.abs(p) > ops.spread(limit, splits)
        found["clipped"] = tf.math.count_nonzero(is_clipped)
    return {name: tf.cast(value, tf.float64) for name, value in found.items()}


def figures(total: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the figures, float64 scalars, from `sums`."""
    ratio = tf.math.divide_no_nan
    return {
        "quantization_error": tf.sqrt(ratio(total["error"], total["length"])),
        "zero_share": total["zeros"] / total["elements"],
        "clipped_share": total["clipped"] / total["elements"],
        "residual_norm": tf.sqrt(total["residual"]),
        "server_residual_norm": tf.sqrt(total["server_residual"]),
        "block_variation": ratio(total["variation"], total["blocks"]),
        "elements_sent": total["sent"],
    }


def _rounded(
    compressor: Compressor, x: tf.Tensor, state: State, layout: Layout, context: Context
) -> tuple[Compressor, tf.Tensor]:
    """Returns the part of a compressor that rounds, and its input.

    The input contains momentum and residuals; clipping is a part of the rounding.
    """
    rounding = Clip, OptimalScale
    while isinstance(compressor, Wrapper) and not isinstance(compressor, rounding):
        x = compressor.transform(x, state, layout, context)
        state = compressor.inner_state(state)
        compressor = compressor.compressor
    if isinstance(compressor, SparseCompressor):
        x += state["residual"]
    return compressor, x


def residuals(compressor: Compressor, state: State, layout: Layout) -> list[tf.Tensor]:
    """Returns a worker's residuals.

    Args:
        compressor: The compressor, not fused.
        state: Its state.
        layout: The layout.
    """
    found = []
    while isinstance(compressor, Wrapper):
        if isinstance(compressor, ErrorFeedback):
            found.append(compressor.residual(state, layout))
        state = compressor.inner_state(state)
        compressor = compressor.compressor
    return found + residual_leaves(state)


def residual_leaves(state: State) -> list:
    """Returns the leaves of a state that are residuals, by their names."""
    leaves = contracts.named_leaves(state).items()
    return [leaf for name, leaf in leaves if name.endswith("residual")]


def square(x: tf.Tensor) -> tf.Tensor:
    """Returns the squared length of a vector, float64."""
    x = tf.cast(x, tf.float32)
    largest = tf.reduce_max(tf.abs(x))
    unit = tf.math.divide_no_nan(x, largest)
    squared = tf.cast(tf.reduce_sum(unit * unit), tf.float64)
    return squared * tf.square(tf.cast(largest, tf.float64))


def density(vector: tf.Tensor) -> tf.Tensor:
    r"""Returns \( \|v\|_1^2 / (d\,\|v\|_2^2) \): 1 where all magnitudes are equal."""
    unit = tf.math.divide_no_nan(vector, tf.reduce_max(tf.abs(vector)))
    ones = tf.reduce_sum(tf.abs(unit))
    size = tf.cast(tf.size(unit), tf.float32)
    return tf.math.divide_no_nan(ones * ones, size * tf.reduce_sum(unit * unit))


def cosine(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Returns the cosine between two vectors; 0 if one of them is 0."""
    a, b = (tf.math.divide_no_nan(v, tf.reduce_max(tf.abs(v))) for v in (a, b))
    return tf.math.divide_no_nan(tf.reduce_sum(a * b), tf.norm(a) * tf.norm(b))
