"""Payloads are decoded into the tensors of a layout, where a compressor can do that."""

import pytest

from tests.compressors.contracts import every_layout
from tests.methods import parts_of
from tests.selection import rows_by_compressor
from tfgradcomp.compressors import Codebook, ScaledSign, UniformLevels
from tfgradcomp.core import Layout, SplitVector
from tfgradcomp.testing.inputs import LAYOUTS, first_step, gradient_of


def test_the_layouts_have_blocks_of_different_sizes():
    assert LAYOUTS["buckets"].row_splits == (0, 32, 64, 96, 128, 131)
    assert LAYOUTS["model"].row_splits == (0, 97)
    assert LAYOUTS["tensors"].row_splits[:4] == (0, 35, 68, 69)


@pytest.mark.sample(66)
@rows_by_compressor(
    lambda row: isinstance(
        parts_of(row.compressor)[-1], (UniformLevels, Codebook, ScaledSign)
    )
)
@every_layout
def test_decoded_vectors_are_split_by_the_sizes_of_the_layout(row, layout):
    payload = first_step(row.compressor, gradient_of(layout), layout).payload
    vector = row.compressor.decompress(payload, layout)
    assert isinstance(vector, SplitVector)
    whole = row.compressor.decompress(payload, Layout(layout.row_splits))
    assert not isinstance(whole, SplitVector)
