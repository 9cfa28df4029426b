"""The table of choices in the docs is what its script writes."""

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def chooser(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import chooser

    yield chooser
    del sys.modules["chooser"]


@pytest.mark.parametrize("name, workers, link", [("lenet", 16, "1gbit")])
def test_a_line_of_the_table_is_as_published(chooser, name, workers, link):
    # The whole table takes two minutes.
    assert f"\n{chooser.line(name, workers, link)}\n" in chooser.PAGE.read_text()


@pytest.mark.slow
def test_the_table_is_as_published(chooser):
    text = chooser.PAGE.read_text()
    assert chooser.updated(text) == text
