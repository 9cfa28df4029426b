"""The versions that `make matrix` tests, and the table of its results."""

import itertools
import re

import pytest

from tests import matrix
from tfgradcomp.compat import versions

TEXT = f"Before.\n\n{matrix.BEGIN}\n{matrix.END}\n\nAfter.\n"
OLD = matrix.Combination("python3.10", "2.21", "3.15.1")
NEW = matrix.Combination("python3.9", "2.20", "3.10.0")


def test_table_replaces_the_row_of_a_combination():
    text = matrix.with_row(TEXT, OLD, "3 passed", "2026-01-01, abc")
    text = matrix.with_row(text, NEW, "1 failed, 2 passed", "2026-01-01, abc")
    text = matrix.with_row(text, OLD, "4 passed", "2026-01-02, def")
    assert [line for line in text.splitlines() if line.startswith("| python")] == [
        "| python3.9 | 2.20 | 3.10.0 | 1 failed, 2 passed | 2026-01-01, abc |",
        "| python3.10 | 2.21 | 3.15.1 | 4 passed | 2026-01-02, def |",
    ]
    with pytest.raises(ValueError, match="must hold"):
        matrix.with_row("nothing", OLD, "3 passed", "today")
    # The page has the markers.
    assert matrix.HEAD in matrix.with_row(matrix.TABLE.read_text(), OLD, "", "")


def test_default_combinations_cover_each_version_and_pair():
    covering = matrix.COVERING
    assert sorted(one.keras for one in covering) == sorted(matrix.KERAS)
    pairs = {(one.python, one.tensorflow) for one in covering}
    assert pairs == {*itertools.product(matrix.PYTHONS, matrix.TENSORFLOWS)}
    assert all(one.conflict is None for one in covering)


def test_tested_versions_are_those_of_the_package():
    for name, bounds in (
        ("KERAS", versions.KERAS),
        ("TENSORFLOWS", versions.TENSORFLOW),
    ):
        tested = [
            tuple(int(number) for number in version.split(".")[:2])
            for version in getattr(matrix, name)
        ]
        (major, first), (_, end) = bounds
        assert tested == [(major, minor) for minor in range(first, end)]
    text = (matrix.ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'"Programming Language :: Python :: (.+)"', text)
    assert [f"python{version}" for version in listed] == list(matrix.PYTHONS)
    first, last = (
        int(version.partition(".")[2]) for version in listed[:: len(listed) - 1]
    )
    assert f'requires-python = ">=3.{first},<3.{last + 1}"' in text


def test_named_tests_exist():
    missing = []
    for name in matrix.TESTS:
        file, _, test = name.partition("::")
        path = matrix.ROOT / file
        definition = f"\ndef {test.partition('[')[0]}"
        if not path.exists() or definition not in path.read_text():
            missing.append(name)
    assert missing == []
