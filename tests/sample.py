"""The cases of long parametrized tests that `make test` takes.

    pytest -m "not slow"             # every case
    pytest -m "not slow" --sample    # of tests marked `sample(n)`, n cases

The cases are the same in each run: those in which most values of the test's parameters
occur. Other tests' samples have other rows of the table of methods, since ties go by a
hash of the names.
"""

from __future__ import annotations

import zlib

MARKER = "sample(n): `make test` takes n of the cases of this test"


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
        (count,) = group[0].get_closest_marker("sample").args
        chosen = _choose(group, count)
        removed += [item for item in group if item not in chosen]
    return removed


def _choose(items, count):
    """Returns cases one after the other, each with most values not seen before."""
    rest = sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))
    chosen, seen = [], set()
    while rest and len(chosen) < count:
        best = max(rest, key=lambda item: len(_values(item) - seen))
        rest.remove(best)
        chosen.append(best)
        seen |= _values(best)
    return chosen


def _values(item):
    # By identity: parameters may be of any type.
    return {(name, id(value)) for name, value in item.callspec.params.items()}
