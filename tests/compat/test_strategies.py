"""Several strategies in one process: each group of devices has a key of its own."""

import numpy as np

from tests.compat import strategies_cases


def test_strategies_of_different_sizes_take_turns(pools):
    ((three, two, others),) = (
        pools(4, "mirrored").run(strategies_cases.take_turns).answers
    )
    assert [len(three), len(two), len(others)] == [3, 2, 2]
    for weights in (three, two, others):
        for replica in weights:
            np.testing.assert_array_equal(replica, weights[0])
    # Two workers are two workers, on whichever devices; three share the batch anew.
    np.testing.assert_array_equal(two[0], others[0])
    assert np.any(three[0] != two[0])


def test_what_all_workers_know_is_not_sent(pools):
    for of_variable, of_optimizer, state in (
        pools(2).run(strategies_cases.sends_of_state).answers
    ):
        assert of_variable == 3000
        # Momentum and residuals begin with zeros: 3000 each.
        assert state > 6000
        assert of_optimizer < 100
