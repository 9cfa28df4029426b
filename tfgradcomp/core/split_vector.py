"""A flat vector given as separate tensors, which need not be joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class DecodeOp(NamedTuple):
    """The native operation that has decoded a vector: name, tensors and attributes.

    Its words can be applied to the weights directly, without the vector in between. The
    attribute `sizes` has those of the vector's parts.
    """

    name: str
    arguments: tuple[tf.Tensor, ...]
    attributes: dict[str, Any]


class SplitVector:
    """A flat float32 vector, given as the tensors whose concatenation it is.

    TensorFlow converts it to the concatenation wherever a tensor is needed. Operations
    such as `pack_signs` read the tensors as they are.

    `tf.nest` treats it as a leaf. Give a `tf.function` or a branch of a `tf.cond` its
    `tensors`, not the object; an object returned from there becomes the flat vector.

    Attributes:
        tensors: float32 tensors of any static shapes, in order; at least one. A tensor
            is read row by row. It may be empty.
        scale: Factor of all elements, applied when they are read.
        decoding: The operation that has decoded the vector, or None.
    """

    dtype = tf.float32
    # NumPy calls this class for `array + parts`.
    __array_ufunc__ = None

    def __init__(
        self,
        tensors: Iterable[tf.Tensor],
        scale: float = 1.0,
        decoding: DecodeOp | None = None,
    ):
        self.tensors = tuple(tensors)
        self.scale = scale
        self.decoding = decoding
        if not self.tensors:
            raise ValueError(
                "A SplitVector needs at least one tensor, such as tf.zeros([0]). "
                f"Received: tensors={self.tensors}"
            )

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the flat vector."""
        sizes = [tensor.shape.num_elements() for tensor in self.tensors]
        return tf.TensorShape([None if None in sizes else sum(sizes)])

    def numpy(self) -> np.ndarray:
        """The flat vector as an array."""
        return tf.convert_to_tensor(self).numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # A graph tensor raises an error.
        return np.asarray(tf.convert_to_tensor(self), dtype)

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[tf.Tensor]:
        return iter(self.tensors)

    def __repr__(self) -> str:
        return f"SplitVector({list(self.tensors)}, {self.scale})"


def _joined(parts, dtype=None, name=None, as_ref=False):
    # Not cached: a tensor of one graph must not get into another. TensorFlow merges
    # equal operations of a graph.
    flat = tf.concat(
        [t if t.shape.rank == 1 else tf.reshape(t, [-1]) for t in parts], 0
    )
    if parts.scale != 1:
        # Not `*`: Grappler would fold the scale into the next constant.
        flat = tf.math.multiply_no_nan(flat, parts.scale)
    return tf.convert_to_tensor(flat, dtype)


tf.register_tensor_conversion_function(SplitVector, _joined)


def _operator(name):
    def operate(self, *others):
        return getattr(tf.convert_to_tensor(self), name)(*others)

    return operate


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "neg", "abs"):
    setattr(SplitVector, f"__{_name}__", _operator(f"__{_name}__"))


Vector = tf.Tensor | SplitVector
"""A flat float32 vector, joined or not."""
