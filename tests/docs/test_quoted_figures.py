"""Figures that a text quotes by hand stand in a table that a script has written."""

import re

import pytest

from tests.docs.test_code_blocks import DOCUMENTS, ROOT

WRITTEN = re.compile(r"<!-- ([^>]*): begin -->\n(.*?)<!-- \1: end -->", re.S)
# An interval, or an accuracy. Rounder numbers are told in many ways.
FIGURE = re.compile(r"\d+\.\d\d ± \d+\.\d\d|\d\d\.\d\d(?= %)")


def tables():
    """All tables that scripts have written."""
    texts = [path.read_text() for path in DOCUMENTS]
    return "\n".join(match[2] for text in texts for match in WRITTEN.finditer(text))


def quoted(text):
    """The figures of a text that stand outside of such tables, with their lines."""
    outside = WRITTEN.sub(lambda match: "\n" * match[0].count("\n"), text)
    return [
        (outside[: match.start()].count("\n") + 1, match[0])
        for match in FIGURE.finditer(outside)
    ]


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if path.name != "CHANGELOG.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_quoted_figure_stands_in_a_table(path):
    written = tables()
    stale = [each for each in quoted(path.read_text()) if each[1] not in written]
    assert stale == []


def test_figures_are_found():
    text = "84.10 %\n<!-- a: begin -->\n99.00 %\n<!-- a: end -->\n+0.12 ± 0.34, 1.5 %"
    assert quoted(text) == [(1, "84.10"), (5, "0.12 ± 0.34")]
