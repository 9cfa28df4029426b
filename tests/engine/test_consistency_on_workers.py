"""The comparison of real workers: their plans count, not the addresses of objects."""

import pytest

from tests.engine import consistency_cases


@pytest.mark.parametrize(
    ("case", "plain", "kind"),
    [
        ("function", 302, "AllGatherRoute"),
        ("functions", 902, "AllGatherRoute"),
        ("transport", 0, "ShardedRoute"),
    ],
)
def test_objects_with_an_address_are_taken(pools, case, plain, kind):
    first, second = pools(2).run(consistency_cases.train, case).answers
    assert first == second
    assert first[:2] == (plain, {kind})


@pytest.mark.parametrize(
    ("case", "transport"),
    [
        ("other functions", "auto"),
        ("other buckets", "all_gather"),
        ("other reactions", "auto"),
    ],
)
def test_other_plans_are_refused_by_all(pools, case, transport):
    for answer in pools(2).run(consistency_cases.train, case, transport).answers:
        assert "The optimizer arguments of workers [1] differ" in answer
