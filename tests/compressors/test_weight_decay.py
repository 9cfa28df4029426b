"""Weight decay that workers add to the reply, with and without momentum."""

import numpy as np
import pytest
import tensorflow as tf

from tfgradcomp.compressors import WeightDecay
from tfgradcomp.core import Layout

LAYOUT = Layout.from_sizes([5])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_term_is_that_of_the_paper(momentum):
    rng, decay = np.random.default_rng(0), WeightDecay(0.25, momentum)
    state, m = decay.init(LAYOUT), np.zeros(5)
    for _ in range(4):
        x = rng.normal(size=5).astype(np.float32)
        term, state = decay.term(tf.constant(x), state)
        m = momentum * m + 0.25 * x
        expected = momentum * m + 0.25 * x if momentum else 0.25 * x
        np.testing.assert_allclose(term, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rate", [-0.1, float("nan")])
def test_a_negative_rate_raises(rate):
    with pytest.raises(ValueError, match="weight_decay must be None or not negative"):
        WeightDecay(rate)
