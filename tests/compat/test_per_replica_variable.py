"""Variables that have another value on each replica."""

import pytest

from tests.compat import per_replica_cases


@pytest.mark.slow
def test_first_values_that_all_workers_know_are_not_sent(pools):
    for of_variable, of_optimizers, states in (
        pools(2).run(per_replica_cases.sends_of_state).answers
    ):
        assert of_variable == 3000
        dist_ef, adam, adagrad = of_optimizers
        # Two vectors of zeros: momentum and residuals, or Adam's momenta.
        assert min(states[:2]) > 6000
        assert max(dist_ef, adam) < 100
        # Adagrad's sums begin with a number.
        assert adagrad >= 3000
