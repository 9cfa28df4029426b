"""The study of federated training on slow links: its data, its table."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples/studies")]
import federated_links  # noqa: E402


def test_clients_share_all_images_unequally_and_by_the_seed():
    labels = np.random.default_rng(0).integers(0, 10, 5000)
    divided = federated_links.parts(labels, 8, seed=1)
    assert sorted(np.concatenate(divided)) == [*range(5000)]
    counts = np.array([np.bincount(labels[own], minlength=10) for own in divided])
    # An equal division would leave each client about 62 images of each class.
    assert counts.min() < 10 and counts.max() > 200
    assert min(map(len, divided)) >= 32
    again = federated_links.parts(labels, 8, seed=1)
    assert all(map(np.array_equal, divided, again))
    other = federated_links.parts(labels, 8, seed=2)
    assert not all(map(np.array_equal, divided, other))


def test_the_table_compares_seed_by_seed():
    def row(method, seed, accuracy, seconds):
        curve = " ".join(
            f"{n}:{n * seconds:.2f}:{accuracy + n / 10:.2f}" for n in range(1, 10)
        )
        given = {"method": method, "seed": seed, "up": 2.0, "down": 3.0}
        return given | {"compute": 0.25, "carried": "4:client-1", "curve": curve}

    rows = federated_links.Rows(
        [row("float32", 0, 70, 3), row("float32", 1, 80, 3)]
        + [row("1 bit", 0, 71, 1), row("1 bit", 1, 80, 1)]
    )
    head, _, plain, one_bit = rows.table().splitlines()
    # The means of rounds 2 to 9; all trainings reach 70 % in the first round.
    assert "s until 70 %" in head
    cells = [cell.strip() for cell in plain.split("|")]
    assert cells[2].startswith("75.55") and cells[4] == "client-1: 2"
    assert cells[5].startswith("27.00") and cells[6].startswith("3.00")
    cells = [cell.strip() for cell in one_bit.split("|")]
    assert cells[3].startswith("+0.50") and cells[7].startswith("1.00")
