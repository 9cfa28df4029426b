"""The cases of long parametrized tests that `make test` takes.

    pytest -m "not slow"             # every case
    pytest -m "not slow" --sample    # of tests marked `sample(n)`, n cases

The cases are the same in each run: those in which most values of the test's parameters
occur, and of rows of the table of methods most kinds of compressors and servers. Other
tests' samples have other rows, since ties go by a hash of the names.
"""

from __future__ import annotations

import zlib

import pytest

MARKER = "sample(n, *ids): `make test` takes n of this test's cases, first those named"


def add_options(parser) -> None:
    """Adds the option of this module to pytest's."""
    parser.getgroup("sample").addoption(
        "--sample", action="store_true", help="take few cases of long tests"
    )


def left_out(items) -> list:
    """Returns the tests that a run with `--sample` does not take."""
    cases: dict[str, list] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    removed: list = []
    for group in cases.values():
        count, *named = group[0].get_closest_marker("sample").args
        first = [item for item in group if item.nodeid[:-1].endswith(tuple(named))]
        if len(first) < len(named):
            text = f"sample: each of {named} must end the name of a case. "
            raise pytest.UsageError(text + f"Received: {[one.nodeid for one in group]}")
        chosen = _choose(group, count, first)
        removed += [item for item in group if item not in chosen]
    return removed


def _choose(items, count, first):
    """Returns these first cases, then such with most values not seen before."""
    values = {item.nodeid: _values(item) for item in items}
    rest = sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))
    chosen: list = []
    seen: set = set()
    while rest and len(chosen) < count:
        if len(chosen) < len(first):
            best = first[len(chosen)]
        else:
            best = max(rest, key=lambda item: len(values[item.nodeid] - seen))
        rest.remove(best)
        chosen.append(best)
        seen |= values[best.nodeid]
    return chosen


def _values(item):
    found: set = set()
    for name, value in item.callspec.params.items():
        # By identity: parameters may be of any type.
        found.add((name, id(value)))
        # Of a row of `tests.methods`.
        found.update(getattr(value, "classes", ()))
        found.add(getattr(value, "needs", None))
    return found
