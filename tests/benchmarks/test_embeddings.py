"""The bytes of an embedding's gradient on links between hosts: as root only."""

import csv

import numpy as np
import pytest

from tests.benchmarks.scripts import import_script, run

FEW = ("--rows", 20000, "--steps", 5)


@pytest.mark.slow  # `tests/engine/test_embeddings.py` counts what is handed over.
def test_compressed_rows_take_little_more_than_indices_and_codes(permitted, tmp_path):
    code, output, errors = run("embeddings.py", *FEW, "--output", tmp_path)
    assert code == 0, errors
    with open(tmp_path / "embeddings.csv", newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    sent = {name: float(row["sent"]) for name, row in rows.items()}
    of_needed = float(rows["TernGrad, rows"]["of_indices_and_codes"])
    # A step of two workers: about 630 of 20,000 rows each, other ones.
    task = {"rows": 20000, "width": 32, "batch": 32, "length": 20, "steps": 5}
    assert 0.5 < of_needed < 1.2
    needed = import_script("embeddings").needed(task, 2)
    own = 20000 * (1 - (1 - 1 / 20000) ** 640)
    union = 20000 * (1 - (1 - 1 / 20000) ** 1280)
    np.testing.assert_allclose(needed, 4 * (own + union * 32 / 20), rtol=0.02)
    assert sent["TernGrad, rows"] < sent["TernGrad, dense"]
    assert 4 * sent["TernGrad, rows"] < sent["TensorFlow, float32 rows"]
