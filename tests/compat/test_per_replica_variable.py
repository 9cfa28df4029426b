"""Variables that have another value on each replica."""

from tests.compat import per_replica_cases


def test_first_values_that_all_workers_know_are_not_sent(pools):
    for of_variable, of_optimizer, state in (
        pools(2).run(per_replica_cases.sends_of_state).answers
    ):
        assert of_variable == 3000
        # Momentum and residuals begin with zeros: 3000 each.
        assert state > 6000
        assert of_optimizer < 100
