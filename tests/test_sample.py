"""The choice of the cases that `make test` takes."""

from types import SimpleNamespace

import pytest

from tests import sample

ROWS, SIZES = [object() for _ in range(6)], [0, 31, 1000]


def cases(test, count=None, **marks):
    """Returns a test's cases as pytest collects them: all rows with all sizes."""
    if count is not None:
        marks["sample"] = pytest.mark.sample(count).mark
    return [
        SimpleNamespace(
            nodeid=f"{test}[{i}-{size}]",
            callspec=SimpleNamespace(params={"row": row, "size": size}),
            get_closest_marker=marks.get,
        )
        for i, row in enumerate(ROWS)
        for size in SIZES
    ]


def kept(items):
    removed = {item.nodeid for item in sample.left_out(items)}
    return [item for item in items if item.nodeid not in removed]


def test_a_sample_has_as_many_values_as_it_can():
    items = cases("test_a", 3)
    chosen = kept(items)
    assert len(chosen) == 3
    assert {item.callspec.params["size"] for item in chosen} == {*SIZES}
    assert len({id(item.callspec.params["row"]) for item in chosen}) == 3
    assert [item.nodeid for item in kept(items[::-1])] == [
        item.nodeid for item in chosen[::-1]
    ]


def test_named_cases_come_first():
    items = cases("test_a", 2)
    items[0].get_closest_marker = {"sample": pytest.mark.sample(2, "4-31").mark}.get
    chosen = [item.nodeid for item in kept(items)]
    assert len(chosen) == 2 and "test_a[4-31]" in chosen


def test_a_named_case_that_does_not_exist_is_an_error():
    items = cases("test_a", 2)
    items[0].get_closest_marker = {"sample": pytest.mark.sample(2, "9-31").mark}.get
    with pytest.raises(pytest.UsageError, match="9-31"):
        sample.left_out(items)


def test_other_tests_have_other_rows():
    rows = {
        id(item.callspec.params["row"])
        for number in range(20)
        for item in kept(cases(f"test_{number}", 1))
    }
    assert len(rows) == len(ROWS)


def test_slow_and_unmarked_cases_are_no_part_of_it():
    slow = cases("test_slow", 2, slow=pytest.mark.slow.mark)
    whole, few = cases("test_whole"), cases("test_few", 100)
    assert sample.left_out([*slow, *whole, *few]) == []
