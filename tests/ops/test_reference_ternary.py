"""Tests of ternary words in pure TensorFlow against NumPy, bit for bit."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests import reference as oracle
from tests.ops import cases
from tests.ops.cases import KINDS, STREAMS, flushed, layouts, same, tensor
from tests.ops.implementations import reference as ops


@pytest.mark.sample(35)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "layout"), layouts(0, 1, 21, 1000, 6007))
def test_ternary(kind, size, layout):
    x, splits = cases.floats(size, kind), cases.row_splits(size, layout)
    rng = np.random.default_rng(size)
    scale = np.array([np.abs(x[b]).max() for b in oracle.blocks(splits)], np.float32)
    limit = np.where(rng.random(len(scale)) < 0.5, np.inf, scale * np.float32(0.7))
    limit = limit.astype(np.float32)
    scale = np.minimum(scale, limit)
    for stream in STREAMS:
        words = ops.pack_ternary(
            tf.constant(x),
            tf.constant(limit),
            tf.constant(scale),
            splits,
            tensor(stream),
        )
        same(words, oracle.pack_ternary(x, limit, scale, splits, stream))


def test_ternary_of_special_numbers():
    x = flushed(np.tile(cases.SPECIAL, 50))
    splits = [0, 300, 700, 1000]
    limit = np.array([np.inf, 1.0, np.inf], np.float32)
    for scale in (1.0, np.inf, np.nan, 0.0):
        scale = np.full(3, scale, np.float32)
        words = ops.pack_ternary(
            tf.constant(x),
            tf.constant(limit),
            tf.constant(scale),
            splits,
            tensor((7, 3, 0)),
        )
        with np.errstate(invalid="ignore"):
            same(words, oracle.pack_ternary(x, limit, scale, splits, (7, 3, 0)))


def test_zeros_are_never_kept_and_the_largest_always():
    x = np.array([0.0, -0.0, 3.0, -3.0] * 25, np.float32)
    for high in range(20):
        words = ops.pack_ternary(
            tf.constant(x),
            tf.constant([np.inf]),
            tf.constant([3.0]),
            [0, 100],
            tensor((5, high, 0)),
        )
        np.testing.assert_array_equal(
            ops.unpack_codes(words, 3, 100), [1, 1, 2, 0] * 25
        )


@pytest.mark.parametrize("limit", [math.inf, 0.6])
def test_ternary_rounding_is_unbiased(limit):
    """The mean over many draws is the clipped x: a z-test an element."""
    x = np.linspace(-1, 1, 41, dtype=np.float32)
    draws, s = 4000, min(1.0, limit)
    tiled = np.tile(x, draws)
    words = ops.pack_ternary(
        tf.constant(tiled),
        tf.constant([limit]),
        tf.constant([s]),
        [0, tiled.size],
        tensor((11, 5, 0)),
    )
    rounded = ops.unpack_codes(words, 3, tiled.size).numpy() - 1
    mean = s * rounded.reshape(draws, -1).mean(0)
    clipped = np.clip(x, -limit, limit)
    p = np.abs(clipped) / s
    deviation = s * np.sqrt(p * (1 - p) / draws)
    assert (np.abs(mean - clipped) <= 4.5 * deviation + 1e-7).all()
