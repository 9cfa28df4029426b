"""What time_to_accuracy.py makes of its two measurements."""

import numpy as np
import pytest

from tests.benchmarks.scripts import import_script


def test_seconds_are_steps_of_the_median_seed_times_a_step():
    script = import_script("time_to_accuracy")
    looks = [
        {"way": way, "seed": seed, "step": step, "accuracy": accuracy}
        for way, seed, accuracies in (
            ("A", 0, (0.5, 0.9, 0.8)),
            ("A", 1, (0.5, 0.6, 0.9)),
            ("A", 2, (0.5, 0.6, 0.85)),
            ("B", 0, (0.1, 0.2, 0.3)),
        )
        for step, accuracy in zip((16, 32, 48), accuracies, strict=True)
    ]
    assert script.steps_to(looks, 0.85) == {"A": [32, 48, 48], "B": [None]}
    links = [
        {"way": way, "rate": "1gbit", "step_ms": ms}
        for way, ms in (("A", 250), ("B", 9))
    ]
    of_a, of_b = script.table(looks, links, 0.85)[2:]
    assert of_a == "| A | 32, 48, 48 | 250 | 12.0 |"
    assert of_b == "| B | never | 9 |  |"


def test_the_small_table_names_the_baselines():
    script = import_script("time_to_accuracy")
    accuracies = {"TernGrad": 0.9, "float32": 0.9, "Signum": 0.1}
    looks = [
        {"way": way, "seed": 0, "step": 100, "accuracy": accuracy}
        for way, accuracy in accuracies.items()
    ]
    links = [
        {"way": way, "rate": "1gbit", "step_ms": ms}
        for way, ms in (("float32", 500.0), ("TernGrad", 100.0), ("Signum", 90.0))
    ]
    assert script.summary(looks, links, 0.85)[2:] == [
        "| TensorFlow's float32 | 50.0 |",
        "| `TernGrad` | 10.0 |",
    ]


def test_workers_share_the_examples_and_end_together(tmp_path):
    learning = import_script("learning")
    y = np.arange(10)
    images = np.broadcast_to(y[:, None, None], (10, 2, 2)).astype(np.uint8)
    path = tmp_path / "data.npz"
    np.savez(path, x=images, y=y, test_x=images, test_y=y)
    task = {"data": str(path), "seed": 3, "batch_size": 2, "steps": 9}
    task |= {"every": 2, "target": 0.5}
    of_workers = [learning.Examples(task, rank, 2) for rank in range(2)]
    seen = [examples.batch(step) for examples in of_workers for step in range(2)]
    labels = np.concatenate([y for _, y in seen])
    assert len(set(labels)) == 8
    for x, y in seen:
        np.testing.assert_allclose(x, np.repeat(y[:, None], 4, 1) / 255 - 0.5)
    hits = iter((4, 5))
    answer = learning.train(task, of_workers[0], lambda x, y: None, lambda: next(hits))
    assert answer["accuracies"] == [(2, pytest.approx(0.4)), (4, pytest.approx(0.5))]
    assert len(answer["seconds"]) == 4
