"""The table of versions: rows of combinations, replaced one by one."""

import pytest

from tests import matrix

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


def test_the_list_of_tests_is_there():
    assert all((matrix.ROOT / path).exists() for path in matrix.TESTS)
    text = matrix.TABLE.read_text()
    assert matrix.BEGIN in text and matrix.END in text
