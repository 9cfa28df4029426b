"""Programs of other people's kinds, with nothing changed but the optimizer."""

import numpy as np
import pytest

from tests.programs import workers
from tests.programs.kinds import KINDS

pytestmark = pytest.mark.timeout(600)

RULES = {
    "plain": {},
    "mixed": {"policy": "mixed_float16"},
    "accumulating": {"gradient_accumulation_steps": 2},
}
CASES = [
    pytest.param(
        kind,
        rules,
        count,
        id=f"{kind}-{name}-{count}",
        # The programs learn as well in the comparison below, which is quicker.
        marks=pytest.mark.slow,
    )
    for kind in KINDS
    for name, rules in RULES.items()
    for count in (2, 3)
]


@pytest.mark.parametrize(("kind", "rules", "num_workers"), CASES)
def test_it_learns_and_workers_agree(pools, kind, rules, num_workers):
    first, *others = pools(num_workers).run(run_with, kind, rules).answers
    for other in others:
        assert other["digest"] == first["digest"]
        assert other["losses"] == first["losses"]
    losses = first["losses"]
    assert np.isfinite(losses).all() and min(losses[1:]) < losses[0]
    assert all(np.isfinite(w).all() for w in first["weights"])


def run_with(kind, rules):
    return workers.run(kind, **rules)


# Quick for a step that creates the variables of Keras' optimizer. Two adversaries train
# so in `tests/fit/test_own_loops.py`.
QUICK = ("variational_autoencoder",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_the_identity_is_plain_keras(pools, kind):
    (stock, _), (identity, _) = (
        pools(2).run(workers.run, kind, wrapper).answers
        for wrapper in ("stock", "identity")
    )
    for got, want in zip(identity["weights"], stock["weights"], strict=True):
        # Up to the order of summation.
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
