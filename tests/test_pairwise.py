"""The combinations of parameters that other tests run through."""

import itertools

import pytest

from tests.pairwise import pairwise


@pytest.mark.parametrize(
    ("lengths", "most"),
    [((4,), 4), ((3, 5), 15), ((33, 5, 9), 33 * 9 + 9), ((3, 3, 3, 3), 13)],
)
def test_any_two_values_meet(lengths, most):
    axes = [[f"{place}{i}" for i in range(n)] for place, n in enumerate(lengths)]
    chosen = pairwise(*axes)
    assert len(chosen) == len({*chosen}) <= most
    for i, j in itertools.combinations(range(len(axes)), 2):
        meet = {(one[i], one[j]) for one in chosen}
        assert meet == set(itertools.product(axes[i], axes[j]))
    assert {one[0] for one in chosen} == {*axes[0]}
    assert chosen == pairwise(*axes)
