"""The rows of compressors, and their first steps."""

import pytest

from tests.selection import rows_by_compressor
from tfgradcomp.testing.inputs import LAYOUTS, decoded_step

every_row = rows_by_compressor()
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def of_kind(*kinds):
    """Runs a test for each compressor of some kinds."""
    return rows_by_compressor(lambda row: row.kind in kinds)


def decoded(row, x, layout, **context):
    """What the payload of a first step stands for."""
    return decoded_step(row.compressor, x, layout, **context).numpy()
