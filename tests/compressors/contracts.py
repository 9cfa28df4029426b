"""Layouts and gradients that every compressor is tested with."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import bits, make_context
from tests.methods import second_moments_of
from tests.pairwise import parametrize_pairwise
from tests.selection import rows_by_compressor
from tfgradcomp.core import Layout

LAYOUTS = {
    "one": Layout.from_sizes([1]),
    "ones": Layout.from_sizes([1, 1, 1]),
    "tensors": Layout.from_sizes([35, 33, 1, 30, 1, 1, 2, 64, 64]),
    "buckets": Layout.from_sizes([100, 31], 32),
    "model": Layout.from_sizes([7, 90], "model"),
}
every_row = rows_by_compressor()
# The rows of every compressor, each with some of the values of other arguments.
every_row_pairwise = functools.partial(parametrize_pairwise, row=every_row.args[1])
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def of_kind(*kinds):
    """Runs a test for each compressor of some kinds."""
    return rows_by_compressor(lambda row: row.kind in kinds)


def gradient_of(layout, seed=0):
    x = np.random.default_rng(seed).normal(size=layout.size).astype(np.float32)
    return x * reference.spread(
        np.float32(10.0) ** np.arange(-1, layout.num_blocks - 1).clip(-1, 2),
        layout.row_splits,
    ).astype(np.float32)


def compress(row, x, layout, **context):
    """The first step of a row's compressor."""
    return row.compressor.compress(
        tf.constant(x),
        row.compressor.init(layout),
        layout,
        make_context(moments=second_moments_of(x), **context),
    )


def decoded(row, x, layout, **context):
    """What the payload of a first step stands for."""
    payload = compress(row, x, layout, **context).payload
    return row.compressor.decompress(payload, layout).numpy()


def same_bits(one, other) -> bool:
    """Whether two nests hold the same bits."""
    pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
    return all(bits(a) == bits(b) for a, b in pairs)
