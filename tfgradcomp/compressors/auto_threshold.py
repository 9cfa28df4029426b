r"""Thresholds that follow what is owed, in each block and in each step.

r is the residual with this step's gradient, at the moment of the criterion. Of a sample
of at most `SAMPLE` elements of a block, evenly spaced from its first, those that are
normal numbers count, and where ambiguous ones wait (`Hybrid`) only the others. Let
\( m_1 \ge \dots \ge m_n \) be their |r|. The threshold is the largest float32 below
\( m_k \) (at least the least normal number), so that \( |r| \ge m_k \) is what passes:

- `Strom`: \( k = \lceil n / 32 \rceil \), one element in 32.
- `Hybrid`: k is where the message takes most from what is owed. With
  \( \tau = m_k \), the k that pass take \( \sum_{j \le k} m_j^2 - (m_j - \tau)^2
  = \tau \, (2 (m_1 + \dots + m_k) - k \tau) \). At most a quarter of the sample
  passes.

More pass where many are equal. Where no element counts nothing is sent: the threshold
is the largest float32.

Why not a number: a fixed \( \tau \) is a limit to what an element can pay back in a
step. Where gradients are larger, or a criterion has held an element back, r outgrows
\( \tau \), and is then paid back in many steps of one sign, long after the weights have
moved on; under momentum, such late feedback makes weights swing. Why not the quantile
for `Hybrid`: |r| of ambiguous elements grows while they wait, and the quantile with it,
so that unambiguous ones wait as well. Why of each block: with one for all tensors,
those of large gradients would outgrow it still. And it is no state: nothing is to be
saved, and a run that resumes goes on with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.reference.vectors import add

AUTO = "auto"
ONE_IN = 32  # One of so many elements passes.
AT_MOST_ONE_IN = 4  # The same, where some are ambiguous.
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
        residual: What is owed of the steps before, float32 `[count]`.
        row_splits: The blocks.
        moments: This step's second moments, float32 `[count]`; None: no element is
            ambiguous.
        variance: Those of the steps before, float32 `[count]`.
        alpha: Elements are ambiguous unless r squared is beyond so many times both.
    """
    splits = tf.cast(row_splits, tf.int32)
    begin, width = splits[:-1, tf.newaxis], (splits[1:] - splits[:-1])[:, tf.newaxis]
    if tf.is_tensor(row_splits):
        longest = tf.minimum(tf.reduce_max(width), SAMPLE)
    else:
        longest = min(int(np.diff(row_splits).max(initial=0)), SAMPLE)
    # A row for each block; short ones are filled up with what does not count.
    place = -(-width // SAMPLE) * tf.range(longest)
    index = tf.where(place < width, begin + place, 0)

    def sampled(before, now):
        return add(
            tf.gather(before, index), tf.gather(tf.convert_to_tensor(now), index)
        )

    r = sampled(residual, x)
    magnitude = tf.abs(r)
    counts = (magnitude >= _LEAST_NORMAL) & (magnitude <= _LARGEST) & (place < width)
    if moments is not None:
        counts &= r * r > alpha * sampled(variance, moments)
    most = -(-longest // (ONE_IN if moments is None else AT_MOST_ONE_IN))
    largest = tf.math.top_k(tf.where(counts, magnitude, 0.0), most).values
    count = tf.math.count_nonzero(counts, axis=1, dtype=tf.int32)
    if moments is None:
        # Where none counts, any will do.
        k = tf.maximum(-(-count // ONE_IN) - 1, 0)
    else:
        of_sample = tf.math.count_nonzero(place < width, 1, True, dtype=tf.int32)
        may_pass = tf.range(most) < -(-of_sample // AT_MOST_ONE_IN)
        taken = tf.where(may_pass, _taken(largest), 0.0)
        k = tf.argmax(taken, axis=1, output_type=tf.int32)
    m = tf.gather(largest, k, batch_dims=1)
    below = tf.bitcast(tf.bitcast(m, tf.int32) - 1, tf.float32)
    return tf.where(count > 0, tf.maximum(below, _LEAST_NORMAL), _LARGEST)


def _taken(largest: tf.Tensor) -> tf.Tensor:
    """Returns what messages with each of these thresholds take from the squares."""
    # As float64, squares of large numbers are finite.
    m = tf.cast(largest, tf.float64)
    number = tf.cast(tf.range(1, tf.shape(m)[1] + 1), m.dtype)
    return m * (2 * tf.cumsum(m, axis=1) - number * m)
