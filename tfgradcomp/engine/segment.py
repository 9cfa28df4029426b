"""A range of a flat vector, and the pieces of variables that it consists of."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.core import Layout, SplitVector
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.engine.bucket_ranges import BucketRange, Piece
from tfgradcomp.engine.flat_vectors import FlatVector
from tfgradcomp.engine.step_records import Gradients


class Segment:
    """The elements of a flat vector that a bucket holds.

    Attributes:
        vector: Name of the vector, such as `"compressed"` or `"plain"`.
        name: Name of the bucket, its call site on all workers.
        bucket_range: The range of the vector.
        layout: The blocks and tensors, the padding in front included.
        pieces: The pieces of variables, by their positions in the model.
        positions: Positions of the variables in the model.
        size: Number of elements of variables, without the padding.
    """

    def __init__(
        self, vector: FlatVector, name: str, bucket_range: BucketRange, layout: Layout
    ):
        self.vector, self.name = vector.name, name
        self.bucket_range, self.layout = bucket_range, layout
        self.pieces = vector.pieces(bucket_range)
        self.positions = [piece.position for piece in self.pieces]
        self.size = bucket_range.end - bucket_range.begin

    def flatten(
        self, tensors: Sequence[tf.Tensor | None], scale: float = 1.0
    ) -> SplitVector:
        """Returns the segment of a list over all variables, as float32, times `scale`.

        A variable without a tensor counts as zeros.
        """
        padding = self.bucket_range.alignment_padding
        parts = [tf.zeros([padding])] if padding else []
        for position, begin, end in self.pieces:
            tensor = tensors[position]
            if tensor is None:
                parts.append(tf.zeros([end - begin]))
                continue
            tensor = tf.convert_to_tensor(tensor)
            if end - begin < tensor.shape.num_elements():
                tensor = tf.reshape(tensor, [-1])[begin:end]
            parts.append(tf.cast(tensor, tf.float32))
        return SplitVector(parts, scale)

    def split(self, vector: Vector) -> dict[Piece, tf.Tensor]:
        """Cuts a flat vector into the pieces of variables."""
        is_split = isinstance(vector, SplitVector)
        parts = list(vector if is_split else tf.split(vector, self.layout.sizes))
        return dict(zip(self.pieces, parts[-len(self.pieces) :], strict=True))

    def second_moments(
        self, gradients: Gradients, accumulated: tf.Tensor | None = None
    ) -> Vector:
        """Returns the second moments of this worker's mean gradient.

        Args:
            gradients: This worker's gradients.
            accumulated: The sum over the earlier calls of the step, if there are any.
        """
        scale = gradients.scale * gradients.scale
        total: Vector = self.flatten(gradients.moments, scale)
        if gradients.calls:
            total = (tf.convert_to_tensor(accumulated) + total) / gradients.calls**2
        if gradients.clip_factors is None:
            return total
        return tf.square(self.flatten(gradients.clip_factors)) * total
