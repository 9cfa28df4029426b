"""Helpers of tests that compare sentences of the documentation with measured results.

A claim is a tuple: the path of a page, a sentence that stands on it, and a function
that returns whether the results still support the sentence.
"""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rows(path):
    """Returns the rows of a CSV file, whose path begins at the repository's root."""
    with open(ROOT / path, newline="") as file:
        return list(csv.DictReader(file))


def each_of(claims):
    """Runs a test for each claim."""
    return pytest.mark.parametrize(
        "page, sentence, holds", claims, ids=[f"{p}: {s[:40]}" for p, s, _ in claims]
    )


def check(page, sentence, holds):
    """Checks that the sentence stands on its page, and that the results hold it."""
    assert sentence in " ".join((ROOT / page).read_text().split())
    assert holds()
