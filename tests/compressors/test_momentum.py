"""Momentum on the worker: its warm-up, and values out of range."""

import numpy as np
import pytest

from tfgradcomp.compressors import Identity, Momentum, NesterovMomentum
from tfgradcomp.compressors.momentum import warmup_steps_for


def test_automatic_warm_up_is_the_least_that_the_paper_allows():
    assert warmup_steps_for(0.9) == 54
    for beta in (0.0, 0.3, 0.5, 0.8, 0.95, 0.99):
        # C / 2 b^C <= 1 / (1 - b^2) / (C + 1), from C on.
        c = np.arange(1, 10_000)
        fails = c / 2 * beta**c > 1 / (1 - beta**2) / (c + 1)
        assert warmup_steps_for(beta) == 1 + max(c[fails], default=0)


@pytest.mark.parametrize("kind", [Momentum, NesterovMomentum])
@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_a_momentum_out_of_range_raises(kind, momentum):
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        kind(Identity(), momentum)
