r"""Thresholds that follow what is owed: a quantile of |r| in each block, in each step.

r is the residual with this step's gradient, at the moment of the criterion. Of a sample
of at most `SAMPLE` elements of a block, evenly spaced from its first, those that are
normal numbers count, n of them. With m the k-th largest of their |r|,
\( k = \lceil n / 32 \rceil \), the threshold is the largest float32 below m (at least
the least normal number), so that \( |r| \ge m \) is what passes: one element in 32, and
more where many are equal. Where no element counts nothing is sent: the threshold is the
largest float32.

Why a quantile: a fixed \( \tau \) is a limit to what an element can pay back in a step.
Where gradients are larger, or a criterion has held an element back, r outgrows
\( \tau \), and is then paid back in many steps of one sign, long after the weights have
moved on; under momentum, such late feedback makes weights swing. A threshold in
proportion to |r| pays back a share of it: |r| / \( \tau \) stays small. Why of each
block: with one for all tensors, those of large gradients would outgrow it still. And it
is no state: nothing is to be saved, and a run that resumes goes on with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfgradcomp.core.split_vector import Vector
from tfgradcomp.ops.reference.vectors import add

AUTO = "auto"
ONE_IN = 32  # One of so many elements passes.
SAMPLE = 2**12

_LARGEST, _LEAST_NORMAL = np.finfo(np.float32).max, np.finfo(np.float32).tiny


def find_thresholds(
    x: Vector, residual: tf.Tensor, row_splits: Sequence[int]
) -> tf.Tensor:
    """Returns the thresholds of a step, float32 `[num_blocks]`.

    Args:
        x: This step's gradient, float32 `[count]`.
        residual: What is owed of the steps before, float32 `[count]`.
        row_splits: The blocks.
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
    r = add(tf.gather(residual, index), tf.gather(tf.convert_to_tensor(x), index))
    magnitude = tf.abs(r)
    counts = (magnitude >= _LEAST_NORMAL) & (magnitude <= _LARGEST) & (place < width)
    count = tf.math.count_nonzero(counts, axis=1, dtype=tf.int32)
    most = -(-longest // ONE_IN)
    largest = tf.math.top_k(tf.where(counts, magnitude, 0.0), most).values
    # Where none counts, any will do.
    k = tf.maximum(-(-count // ONE_IN) - 1, 0)
    m = tf.gather(largest, k, batch_dims=1)
    below = tf.bitcast(tf.bitcast(m, tf.int32) - 1, tf.float32)
    return tf.where(count > 0, tf.maximum(below, _LEAST_NORMAL), _LARGEST)
