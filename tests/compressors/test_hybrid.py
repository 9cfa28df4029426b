"""The hybrid rule: large and unambiguous elements send a threshold."""

import numpy as np

from tests.compressors.test_sparse_compressor import LAYOUT, gradients, step
from tfgradcomp.compressors import Hybrid


def test_the_variance_is_that_of_the_residual_before_sending():
    """As the text has it: r before the sending."""
    compressor, rng = Hybrid(0.3, 1.2, 0.8), np.random.default_rng(3)
    state, r, v, floors = compressor.init(LAYOUT), 0.0, 0.0, 0
    for g in gradients(rng, 30):
        g /= 4
        r, v = r + g.sum(0), v + np.square(g).sum(0)
        _, state, _, count = step(compressor, g.sum(0), np.square(g).sum(0), state)
        sent = (np.abs(r) > 0.3) & (r**2 > 1.2 * v)
        assert count == np.count_nonzero(sent)
        lower = v - 2 * np.abs(r) * 0.3 + 0.3**2
        floors += np.count_nonzero(sent & (lower < 0))
        v = 0.8 * np.where(sent, np.maximum(lower, 0), v)
        r = r - 0.3 * np.sign(r) * sent
        np.testing.assert_allclose(state["variance"], v, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(state["residual"], r, rtol=0, atol=1e-5)
    assert floors > 10
