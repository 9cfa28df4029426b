"""Which rows of the table of methods a test takes."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import tfgradcomp
from tests.methods import ROWS, Row


def select(
    where: Callable[[Row], bool] = lambda row: True,
    by: Callable[[Row], Any] = lambda row: row.name,
) -> list[Row]:
    """Returns the rows that a test takes.

    Args:
        where: Function that says which rows are taken.
        by: Function of a row; of rows for which it gives the same, only the first is
            taken. Every row by itself, if not given.
    """
    first: dict[Any, Row] = {}
    for one in filter(where, ROWS.values()):
        first.setdefault(by(one), one)
    return [*first.values()]


def rows(where=lambda row: True, by=lambda row: row.name) -> pytest.MarkDecorator:
    """Returns a decorator that runs a test for each row of `select`, as `row`."""
    return pytest.mark.parametrize("row", select(where, by), ids=lambda row: row.name)


def rows_by_compressor(where: Callable[[Row], bool] = lambda row: True):
    """Returns a decorator as `rows` does, of all rows with one compressor the first."""
    return rows(where, by=lambda row: row.compressor)


def rows_by_needs(where: Callable[[Row], bool] = lambda row: True):
    """Returns a decorator as `rows` does, of all rows with equal needs for the first.

    For tests of what optimizers, files and parameter servers do for a method.
    """
    return rows(where, by=lambda row: row.needs)


def rows_in_turns(
    name: str,
    values: Sequence,
    where: Callable[[Row], bool],
    by: Callable[[Row], Any],
    slow: Callable[[Row], bool] = lambda row: False,
) -> pytest.MarkDecorator:
    """Returns a decorator that runs a test for each row of `select`, as `row`.

    Args:
        name: Name of another argument of the test.
        values: Values of it, which the rows take in turns.
        where: As in `select`.
        by: As in `select`.
        slow: Says for which rows the test is slow.
    """
    return pytest.mark.parametrize(
        (name, "row"),
        [
            pytest.param(value, row, marks=[pytest.mark.slow] if slow(row) else [])
            for value, row in zip(
                itertools.cycle(values), select(where, by), strict=False
            )
        ],
        ids=lambda value: getattr(value, "name", value),
    )


def required_arguments(wrapper: str) -> dict[str, Any]:
    """Returns a wrapper's arguments for which there is no default, with values."""
    (row,) = select(lambda row: row.wrapper == wrapper, by=lambda row: row.wrapper)
    parameters = inspect.signature(getattr(tfgradcomp, wrapper)).parameters.values()
    return {
        parameter.name: row.arguments[parameter.name]
        for parameter in [*parameters][1:]
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
    }
