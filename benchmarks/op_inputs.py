"""The form of a row of op_rows.py, and the inputs of the ops that it times."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from workloads import resnet_50, sizes


class Row(NamedTuple):
    """An op to time.

    Attributes:
        name: What the table calls it.
        make: Takes the implementations of all ops, native or of the reference; returns
            the function and its arguments.
        target: The least ratio that it shall reach, or None.
        baseline: "memcpy" or "triad".
        in_python: Whether pure TensorFlow is timed, too.
    """

    name: str
    make: Callable
    target: float | None = None
    baseline: str = "memcpy"
    in_python: bool = True


class Inputs:
    """The inputs of the ops: vectors of `size` floats, and what is made of them.

    Args:
        size: The number of elements.
    """

    def __init__(self, size: int):
        self.size = size
        self._rng = np.random.default_rng(0)
        self.x, self.m, self.e = self._normal(), self._normal(), self._normal()
        # The ends of blocks: one block, buckets, and layers of a ResNet-50.
        self.one = np.array([0, size])
        self.buckets = np.append(np.arange(0, size, 2048), size)
        widths = sizes(resnet_50())
        while sum(widths) < size:
            widths *= 2
        self.layers = np.unique(np.minimum(np.cumsum([0, *widths]), size))
        self.tensors = tf.split(self.x, np.diff(self.layers))
        self.stream = tf.constant([7, 3, 0], tf.int64)
        self.limit = tf.constant([2.5])
        self.ratio = tf.constant(0.9)
        self.true, self.false = tf.constant(True), tf.constant(False)

    @cached_property
    def signs_1(self) -> tf.Tensor:
        """The words of one payload of signs."""
        return self.words(2, 1)

    @cached_property
    def signs_4(self) -> tf.Tensor:
        """The words of four payloads of signs."""
        return self.words(2, 4)

    @cached_property
    def signs_8(self) -> tf.Tensor:
        """The words of eight payloads of signs."""
        return self.words(2, 8)

    @cached_property
    def ternary_1(self) -> tf.Tensor:
        """The words of one payload of base 3."""
        return self.words(3, 1)

    def words(self, base: int, num_workers: int) -> tf.Tensor:
        """Returns random words, which are any numbers below base ** digits."""
        digits = max(k for k in range(1, 33) if base**k <= 2**32)
        shape = [num_workers, -(-self.size // digits)]
        drawn = self._rng.integers(0, base**digits, shape, np.uint64)
        return tf.constant(drawn.astype(np.uint32).view(np.int32))

    def scales(self, *shape: int) -> tf.Tensor:
        """Returns random positive scales."""
        return tf.constant(self._rng.random(shape, np.float32) + 0.5)

    def codes(self, base: int) -> tf.Tensor:
        """Returns random codes."""
        return tf.constant(self._rng.integers(0, base, self.size, np.int32))

    def sparse_words(self, num_workers: int) -> tf.Tensor:
        """Returns words of one element, at random, in each thousand elements."""
        shape = num_workers, -(-self.size // 1000)
        places = np.arange(0, self.size, 1000) + self._rng.integers(0, 1000, shape)
        sent = places + (self._rng.integers(0, 16, shape) << 28)
        return tf.constant(sent.astype(np.uint32).view(np.int32))

    def _normal(self) -> tf.Tensor:
        return tf.constant(self._rng.standard_normal(self.size, np.float32))
