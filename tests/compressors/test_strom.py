"""Strom's rule, and the hybrid's: what is not sent is sent later."""

import numpy as np
import pytest

from tests.compressors.test_sparse_compressor import CODINGS, LAYOUT, gradients, step
from tfgradcomp.compressors import Hybrid, Strom


@CODINGS
@pytest.mark.parametrize("kind", [Strom, Hybrid])
def test_sent_and_residual_add_up_to_the_gradients(kind, coding):
    compressor = kind(0.37, index_coding=coding)
    state, came, sent = compressor.init(LAYOUT), 0.0, 0.0
    for g in gradients(np.random.default_rng(1)):
        total = g.sum(0).astype(np.float32)
        moments = np.square(g).sum(0) if kind is Hybrid else None
        decoded, state, finite, count = step(compressor, total, moments, state)
        came, sent = came + total.astype(np.float64), sent + decoded.astype(np.float64)
        assert finite and count == np.count_nonzero(decoded)
        # Signs of the threshold, and of nothing else.
        np.testing.assert_array_equal(np.abs(decoded[decoded != 0]), np.float32(0.37))
    assert np.count_nonzero(sent) > 100
    np.testing.assert_allclose(sent + state["residual"], came, rtol=0, atol=2e-4)
