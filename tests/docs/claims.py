"""What the tests of claims share: a claim is a page, a sentence of it, and a check."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rows(path):
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
