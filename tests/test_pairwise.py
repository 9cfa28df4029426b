"""The combinations of parameters that other tests run through."""

import itertools

import pytest

from tests.pairwise import pairwise, parametrize_pairwise


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        ((4,), 4),
        ((3, 5), 15),
        ((2, 2, 2), 5),
        ((33, 5, 9), 33 * 9 + 9),
        ((3, 3, 3, 3), 13),
        ((1, 4, 2, 2), 9),
    ],
    ids=str,
)
def test_every_two_values_meet(lengths, most):
    axes = [[f"{place}{i}" for i in range(n)] for place, n in enumerate(lengths)]
    chosen = pairwise(*axes)
    assert len(chosen) == len({*chosen}) <= most
    for i, j in itertools.combinations(range(len(axes)), 2):
        meet = {(one[i], one[j]) for one in chosen}
        assert meet == set(itertools.product(axes[i], axes[j]))
    assert {one[0] for one in chosen} == {*axes[0]}
    assert chosen == pairwise(*axes)


def test_tests_are_named_by_the_values():
    mark = parametrize_pairwise(size=[1, 30], rule={"first": len, "second": max})
    assert mark.args[0] == ("size", "rule")
    assert [case.id for case in mark.args[1]] == [
        "1-first",
        "1-second",
        "30-first",
        "30-second",
    ]
    assert mark.args[1][1].values == (1, max)
