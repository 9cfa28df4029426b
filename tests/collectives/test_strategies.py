"""Several strategies in one process: each group of devices has a key of its own."""

import numpy as np
import pytest

from tests.collectives import strategies_cases


@pytest.mark.slow
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
