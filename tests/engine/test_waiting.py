"""A variable without a gradient takes no part: nothing of it changes."""

import numpy as np
import pytest

from tests.engine import waiting_cases
from tests.methods import ROWS

WAITS = waiting_cases.WAITS
# They differ in their state; each pair takes two trainings.
QUICK = {
    ("Strom", "all_gather"),
    ("DistEFBlockSGDM", "sharded"),
    ("LocalSteps, stagger", "auto"),
}
PAIRS = [
    (name, transport)
    for name, row in ROWS.items()
    for transport in dict.fromkeys((row.transports[0], row.transports[-1]))
] + [(name, "auto") for name in waiting_cases.OTHERS]
CASES = [
    pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
    for pair in PAIRS
]


def has_tensor_blocks(name):
    """Returns whether a block is a tensor, so that tensors have no common scale."""
    if name not in ROWS:
        return True
    method = ROWS[name].make_to_train().method
    return method.block_size is None and method.is_blockwise


@pytest.fixture(scope="module")
def virtual(pools):
    return pools(2, "virtual")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "transport"), CASES)
def test_what_has_no_gradient_waits(virtual, name, transport):
    (waiting,), _ = virtual.run(waiting_cases.run, name, transport, WAITS, timeout=120)
    (steady,), _ = virtual.run(waiting_cases.run, name, transport, (), timeout=120)
    # A synchronization stands before the first and after the last of these steps.
    before, after = waiting[WAITS.start], waiting[WAITS.stop + 1]
    np.testing.assert_array_equal(before[0][1], after[0][1])
    for (role, leaf, old), (_, _, new) in zip(before[1], after[1], strict=True):
        np.testing.assert_array_equal(old, new, err_msg=f"{role}: {leaf}")
    assert np.abs(waiting[-1][0][1] - after[0][1]).max() > 0
    for one, other in zip(waiting, steady, strict=True):
        if name in ROWS:
            np.testing.assert_array_equal(one[0][1], one[0][1][[0] * 2])
        if has_tensor_blocks(name):
            np.testing.assert_array_equal(one[0][0], other[0][0])
            np.testing.assert_array_equal(one[0][2], other[0][2])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["TernGrad", "DistEFBlockSGDM"])
def test_workers_with_several_devices_leave_it_alone(pools, name):
    (history,), _ = pools(4, "mirrored").run(
        waiting_cases.run, name, "auto", WAITS, [0, 0, 1, 1], timeout=120
    )
    weights = [values[0][1] for values in history]
    np.testing.assert_array_equal(weights[WAITS.start], weights[WAITS.stop + 1])
    for values in weights:
        np.testing.assert_array_equal(values, values[[0] * 4])
    assert np.abs(weights[-1] - weights[WAITS.stop + 1]).max() > 0


def test_workers_compare_which_variables_have_a_gradient(pools):
    results, _ = pools(2, "multi_worker").run(waiting_cases.differ, timeout=120)
    for message in results:
        assert "has a gradient on workers [0] and none on the others" in message
        assert "weight_1" in message


def test_workers_compare_what_is_frozen_as_fit_begins(pools):
    results, _ = pools(2, "multi_worker").run(waiting_cases.freeze_on_one, timeout=120)
    for message in results:
        assert "dense/kernel is frozen on workers [1] and trained on the oth" in message
