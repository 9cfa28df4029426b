"""When each slow test passed last, in tests/slow_runs.csv, and which are due.

    pytest -m slow --due 30 --record    # those of half an hour that wait the longest

A change of the code takes back no row; its commit says what a pass is worth.
"""

import csv
import datetime
import functools
from pathlib import Path

import pytest

from benchmarks.report import commit, kept_rows, write_csv

TABLE = Path(__file__).with_suffix(".csv")
COLUMNS = ("test", "seconds", "date", "commit")
# Of a test that has never passed.
UNKNOWN_SECONDS = 60.0
# What a slow test may take beside other work; the others have pyproject.toml's limit.
LIMIT_SECONDS = 960


def read() -> dict[str, dict[str, str]]:
    """Returns the rows of the table, by the names of their tests."""
    if not TABLE.exists():
        return {}
    with open(TABLE, newline="") as file:
        return {row["test"]: row for row in csv.DictReader(file)}


def due(tests, minutes: float) -> set[str]:
    """Returns the tests of so many minutes that have passed the longest ago."""
    rows = read()

    def passed_on(test):
        return rows[test]["date"] if test in rows else ""

    chosen, left = set(), 60 * minutes
    for test in sorted(tests, key=passed_on):
        left -= float(rows[test]["seconds"]) if test in rows else UNKNOWN_SECONDS
        if left < 0:
            break
        chosen.add(test)
    return chosen


def record(row: dict[str, object]) -> None:
    """Writes a row at once: a run that is stopped keeps what has passed."""
    kept = kept_rows(TABLE, ("test",), [row])
    write_csv(TABLE, COLUMNS, sorted(kept, key=lambda row: row["test"]))


def add_options(parser) -> None:
    """Adds the options of this module to pytest's."""
    group = parser.getgroup("slow tests")
    group.addoption("--due", type=float, metavar="MINUTES", help="run those due")
    group.addoption("--record", action="store_true", help="write tests/slow_runs.csv")


class SlowRuns:
    """Chooses slow tests and notes their passes; a plugin of pytest."""

    def __init__(self, config):
        self._minutes = config.getoption("due")
        hands_on = hasattr(config, "workerinput")  # A process of xdist.
        self._records = config.getoption("record") and not hands_on
        self._reports: dict[str, list[pytest.TestReport]] = {}

    def pytest_report_header(self):
        rows = sorted(read().values(), key=lambda row: row["date"])
        if not rows:
            return "slow tests: none has passed"
        oldest, newest = rows[0], rows[-1]
        return (
            f"slow tests: {len(rows)} have passed, from {oldest['date']} "
            f"({oldest['commit']}) to {newest['date']} ({newest['commit']})"
        )

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        slow = [item for item in items if item.get_closest_marker("slow")]
        for item in slow:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))
        if self._minutes is None:
            return
        chosen = due([item.nodeid for item in slow], self._minutes)
        removed = [item for item in items if item.nodeid not in chosen]
        config.hook.pytest_deselected(items=removed)
        items[:] = [item for item in items if item.nodeid in chosen]

    def pytest_runtest_logreport(self, report):
        if not self._records or "slow" not in report.keywords:
            return
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when == "teardown" and all(one.passed for one in reports):
            seconds = round(sum(one.duration for one in reports), 1)
            record({"test": report.nodeid, "seconds": seconds, **self._facts})

    @functools.cached_property
    def _facts(self):
        return {"date": datetime.date.today().isoformat(), "commit": commit()}
