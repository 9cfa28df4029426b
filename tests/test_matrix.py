"""The table of versions: rows of combinations, replaced one by one."""

import argparse
import itertools
import re

import pytest

from tests import matrix
from tfgradcomp.compat import versions

TEXT = f"Before.\n\n{matrix.BEGIN}\n{matrix.END}\n\nAfter.\n"
OLD = matrix.Combination("python3.10", "2.21", "3.15.1")
NEW = matrix.Combination("python3.9", "2.20", "3.10.0")


def rows_of(text):
    assert text.startswith("Before.\n") and text.endswith("After.\n")
    return [line for line in text.splitlines() if line.startswith("| python")]


def test_rows_are_replaced_and_in_order():
    text = matrix.with_row(TEXT, OLD, "3 passed", "2026-01-01, abc")
    text = matrix.with_row(text, NEW, "1 failed, 2 passed", "2026-01-01, abc")
    text = matrix.with_row(text, OLD, "4 passed", "2026-01-02, def")
    assert rows_of(text) == [
        "| python3.9 | 2.20 | 3.10.0 | 1 failed, 2 passed | 2026-01-01, abc |",
        "| python3.10 | 2.21 | 3.15.1 | 4 passed | 2026-01-02, def |",
    ]
    assert matrix.HEAD in text
    with pytest.raises(ValueError, match="must hold"):
        matrix.with_row("nothing", OLD, "3 passed", "today")


@pytest.mark.parametrize(
    ("output", "result"),
    [
        ("...\n12 passed, 1 skipped in 3.20s\n", "12 passed, 1 skipped"),
        ("= 1 failed, 2 passed in 75.00s (0:01:15) =\n", "1 failed, 2 passed"),
        ("3 passed in 1.00s inside\n4 passed in 2.00s\n", "4 passed"),
        ("Segmentation fault\n", "ended without a result"),
    ],
)
def test_the_result_is_the_last_line_of_pytest(output, result):
    assert matrix.result_of(output) == result


def test_a_python_that_is_not_here_is_skipped():
    assert not matrix.Combination("python9.9", "2.21", "3.15.1").has_python()


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("python3.10", "2.20", "3.10.0"), None),
        (("python3.10", "2.21", "3.12.4"), None),
        (("python3.12", "2.21", "3.11.3"), "TensorFlow 2.21 needs Keras 3.12 or newer"),
        (("python3.10", "2.20", "3.13.2"), "Keras 3.13 needs Python 3.11 or newer"),
    ],
)
def test_what_pip_cannot_install_together_is_known(names, reason):
    assert matrix.Combination(*names).conflict == reason


def chosen(**named):
    arguments = dict.fromkeys(("all", "python", "tensorflow", "keras"), None)
    return matrix.chosen(argparse.Namespace(**{**arguments, **named}))


def test_the_default_covers_versions_and_pairs():
    covering = chosen()
    assert covering == list(matrix.COVERING)
    assert all(one.conflict is None for one in covering)
    assert sorted(one.keras for one in covering) == sorted(matrix.KERAS)
    pairs = {(one.python, one.tensorflow) for one in covering}
    assert pairs == {*itertools.product(matrix.PYTHONS, matrix.TENSORFLOWS)}
    # The oldest with the oldest, the newest with the newest.
    assert covering[0] == (matrix.PYTHONS[0], matrix.TENSORFLOWS[0], matrix.KERAS[0])
    assert covering[-1] == (
        matrix.PYTHONS[-1],
        matrix.TENSORFLOWS[-1],
        matrix.KERAS[-1],
    )


def test_arguments_choose_of_all_that_can_be_installed():
    everything = chosen(all=True)
    assert {*matrix.COVERING} < {*everything}
    assert len(everything) == len({*everything}) == 24
    assert chosen(tensorflow=["2.21"], keras=["3.10.0"]) == []
    one = ("python3.12", "2.20", "3.10.0")
    assert chosen(python=[one[0]], tensorflow=[one[1]], keras=[one[2]]) == [one]
    assert [c.python for c in chosen(tensorflow=["2.20"], keras=["3.13.2"])] == [
        "python3.11",
        "python3.12",
    ]


def test_the_versions_are_those_of_the_package():
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
        python.removeprefix("python3.")
        for python in (matrix.PYTHONS[0], matrix.PYTHONS[-1])
    )
    assert f'requires-python = ">=3.{first},<3.{int(last) + 1}"' in text


@pytest.mark.parametrize("path", matrix.TESTS)
def test_the_tests_are_there(path):
    file, _, test = path.partition("::")
    text = (matrix.ROOT / file).read_text()
    assert f"\ndef {test.partition('[')[0]}" in text


def test_the_table_is_there():
    text = matrix.TABLE.read_text()
    assert matrix.BEGIN in text and matrix.END in text
