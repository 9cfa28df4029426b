"""Sums of parts make the sums of blocks, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits
from tfgradcomp import ops
from tfgradcomp.core import Layout
from tfgradcomp.ops.block_sums import CHUNK, add_up, parts_of

LAYOUTS = {
    "one block": Layout((0, 30 * CHUNK + 17)),
    "ragged": Layout((0, 5, 2000, 2001, 11_111, 20_480, 30_001)),
    "chunks": Layout((0, CHUNK, 5 * CHUNK, 6 * CHUNK, 13 * CHUNK)),
    "small": Layout((0, 3, 700)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("width", [1, 3, 4, 8, 100])
def test_parts_add_up_to_their_blocks(layout, width):
    # Magnitudes so unlike that any other order has other bits.
    random = np.random.default_rng(width)
    x = random.normal(size=layout.size) * 10.0 ** random.integers(-9, 9, layout.size)
    x = x.astype(np.float32)
    whole = ops.block_statistics(tf.constant(x), layout.row_splits).l1
    cuts = [*range(0, layout.size, width * CHUNK), layout.size]
    parts, sums = [], []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        own = parts_of(layout.row_splits, begin, end)
        splits = (*(part.begin - begin for part in own), end - begin)
        assert splits[0] == 0
        sums.append(ops.block_statistics(tf.constant(x[begin:end]), splits).l1)
        parts += own
    total = add_up(tf.concat(sums, 0), parts, layout.row_splits)
    assert bits(total) == bits(whole)
    if len(cuts) == 2:
        assert len(parts) == layout.num_blocks


def test_parts_are_few():
    splits = (0, 10_000_000)
    for begin, end in ((0, 2_500_096), (2_500_096, 5_000_192), (7_500_288, 10_000_000)):
        parts = parts_of(splits, begin, end)
        assert (parts[0].begin, parts[-1].end) == (begin, end)
        assert len(parts) < 2 * np.log2(10_000_000 / CHUNK)
    assert parts_of(splits, CHUNK, CHUNK) == []
