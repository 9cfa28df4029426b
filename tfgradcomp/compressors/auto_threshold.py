r"""Thresholds that follow the residual, in each block and in each step.

r is the residual plus this step's gradient, as the criterion sees it. The rule takes a
sample of at most `SAMPLE` elements of a block, evenly spaced from its first element.
Only normal numbers count; with `Hybrid` only unambiguous elements count. Let
\( m_1 \ge \dots \ge m_n \) be their |r|. The threshold is the largest float32 below
\( m_k \) (at least the least normal number), so that elements with \( |r| \ge m_k \)
pass:

- `Strom`: \( k = \lceil n / 32 \rceil \), one element in 32.
- `Hybrid`: the k with which the message takes most from the squares of the residual.
  With \( \tau = m_k \), the k elements that pass take \( \sum_{j \le k} m_j^2 - (m_j -
  \tau)^2 = \tau \, (2 (m_1 + \dots + m_k) - k \tau) \). At most a quarter of the
  sample passes.

More elements pass if many are equal. If no element counts, the threshold is the largest
float32 and nothing is sent.

A fixed \( \tau \) limits how much of its residual an element can send in a step. If
gradients are larger, or if a criterion has held an element back, r outgrows \( \tau \)
and is sent in many steps of one sign, long after the weights have changed. Under
momentum, such late feedback makes weights oscillate.

`Hybrid` does not take the quantile, because |r| of ambiguous elements grows while they
wait: the quantile would grow as well, and hold back unambiguous elements. Each block
has a threshold, because tensors with large gradients would outgrow a common one.
The threshold is no state: nothing has to be saved, and a run that resumes has the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfgradcomp.core.split_vector import SplitVector, Vector
from tfgradcomp.ops.reference.vectors import add

AUTO = "auto"
ONE_IN = 32  # The sample has this many elements for each that passes.
AT_MOST_ONE_IN = 4  # The upper limit if some elements are ambiguous.
SAMPLE = 2**12

_LARGEST, _LEAST_NORMAL = np.finfo(np.float32).max, np.finfo(np.float32).tiny


def find_thresholds(
    x: Vector,
    residual: tf.Tensor,
    row_splits: Sequence[int],
    moments: Vector | None = None,
    variance: tf.Tensor | None = None,
    alpha: float = 1.0,
) -> tf.Tensor:
    """Returns the thresholds of a step, float32 `[num_blocks]`.

    Args:
        x: This step's gradient, float32 `[count]`.
        residual: The residual of the steps before, float32 `[count]`.
        row_splits: The blocks.
        moments: This step's second moments, float32 `[count]`; None: no element is
            ambiguous.
        variance: The second moments of the steps before, float32 `[count]`.
        alpha: An element is ambiguous unless r squared exceeds `alpha` times the sum of
            both second moments.
    """
    splits = tf.cast(row_splits, tf.int32)
    begin, width = splits[:-1, tf.newaxis], (splits[1:] - splits[:-1])[:, tf.newaxis]
    if tf.is_tensor(row_splits):
        longest = tf.minimum(tf.reduce_max(width), SAMPLE)
    else:
        longest = min(int(np.diff(row_splits).max(initial=0)), SAMPLE)
    # A row for each block; short rows are padded with elements that do not count.
    place = -(-width // SAMPLE) * tf.range(longest)
    index = tf.where(place < width, begin + place, 0)

    def sampled(before, now):
        return add(tf.gather(before, index), _gathered(now, index, row_splits))

    r = sampled(residual, x)
    magnitude = tf.abs(r)
    counts = (magnitude >= _LEAST_NORMAL) & (magnitude <= _LARGEST) & (place < width)
    if moments is not None:
        counts &= r * r > alpha * sampled(variance, moments)
    most = -(-longest // (ONE_IN if moments is None else AT_MOST_ONE_IN))
    largest = tf.math.top_k(tf.where(counts, magnitude, 0.0), most).values
    count = tf.math.count_nonzero(counts, axis=1, dtype=tf.int32)
    if moments is None:
        # If no element counts, k does not matter.
        k = tf.maximum(-(-count // ONE_IN) - 1, 0)
    else:
        of_sample = tf.math.count_nonzero(place < width, 1, True, dtype=tf.int32)
        may_pass = tf.range(most) < -(-of_sample // AT_MOST_ONE_IN)
        taken = tf.where(may_pass, _taken(largest), 0.0)
        k = tf.argmax(taken, axis=1, output_type=tf.int32)
    m = tf.gather(largest, k, batch_dims=1)
    below = tf.bitcast(tf.bitcast(m, tf.int32) - 1, tf.float32)
    return tf.where(count > 0, tf.maximum(below, _LEAST_NORMAL), _LARGEST)


def _gathered(vector: Vector, index: tf.Tensor, row_splits: Sequence[int]) -> tf.Tensor:
    """Returns elements of a vector. `index` has a row for each block.

    The tensors of a `SplitVector` are not joined if no block has elements of two.
    """
    if tf.is_tensor(row_splits) or not isinstance(vector, SplitVector):
        return tf.gather(tf.convert_to_tensor(vector), index)
    sizes = [tensor.shape.num_elements() for tensor in vector]
    ends, splits = np.cumsum([0, *sizes]), np.asarray(row_splits)
    if not np.isin(ends, splits).all():
        return tf.gather(tf.convert_to_tensor(vector), index)
    blocks, rows = np.searchsorted(splits, ends), []
    for i, tensor in enumerate(vector):
        if sizes[i]:
            # What pads a short row may be outside of the tensor.
            own = index[blocks[i] : blocks[i + 1]] - ends[i]
            own = tf.clip_by_value(own, 0, sizes[i] - 1)
            rows.append(tf.gather(tf.reshape(tensor, [-1]), own))
    found = tf.concat(rows, 0) if rows else tf.zeros(tf.shape(index))
    return found if vector.scale == 1 else tf.math.multiply_no_nan(found, vector.scale)


def _taken(largest: tf.Tensor) -> tf.Tensor:
    """Returns by how much each threshold would reduce the squares of the residual."""
    # As float64, squares of large numbers are finite.
    m = tf.cast(largest, tf.float64)
    number = tf.cast(tf.range(1, tf.shape(m)[1] + 1), m.dtype)
    return m * (2 * tf.cumsum(m, axis=1) - number * m)
