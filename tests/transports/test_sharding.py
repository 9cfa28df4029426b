"""The division of a vector into shards, and the warning if it is not divided."""

import logging

import pytest

from tfgradcomp.compressors import ORQ, Ternary
from tfgradcomp.core import Layout
from tfgradcomp.methods import Method
from tfgradcomp.servers import CodeSum, Mean, Requantize
from tfgradcomp.transports import sharding


@pytest.fixture
def warnings(caplog):
    """Captures the log, as if no warning had been logged before."""
    sharding._warn_uncut.cache_clear()
    caplog.set_level(logging.WARNING, logger="tfgradcomp")
    yield caplog
    sharding._warn_uncut.cache_clear()


ONE_BLOCK = Layout.from_sizes([100_000])
BLOCKS = Layout.from_sizes([100_000], 2048)


def shards(compressor, server, layout, num_shards=4):
    return sharding.Sharding(Method(compressor, server), layout, num_shards, num_shards)


def test_a_single_compressed_block_is_not_cut_and_warns(warnings):
    for _ in range(3):
        assert shards(ORQ(5), Requantize(ORQ(5)), ONE_BLOCK).num_used == 1
    (message,) = warnings.messages
    assert "Requantize" in message
    assert "block_size=" in message


@pytest.mark.parametrize(
    ("compressor", "server", "layout", "num_shards", "num_used"),
    [
        (ORQ(5), Requantize(ORQ(5)), BLOCKS, 4, 4),
        (ORQ(5), Mean(ORQ(5)), ONE_BLOCK, 4, 4),
        (Ternary(), CodeSum(Ternary()), ONE_BLOCK, 4, 4),
        # Too small to be cut with any server.
        (ORQ(5), Requantize(ORQ(5)), Layout.from_sizes([100]), 4, 1),
        (ORQ(5), Requantize(ORQ(5)), ONE_BLOCK, 1, 1),
    ],
)
def test_no_warning_if_the_server_is_not_the_reason(
    warnings, compressor, server, layout, num_shards, num_used
):
    assert shards(compressor, server, layout, num_shards).num_used == num_used
    assert warnings.messages == []
