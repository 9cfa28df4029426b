"""Second moments in `fit` on two devices and on two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.cluster import run_workers
from tests.per_example.brute_force import Keep, brute_force, sequential

layers = keras.layers
pytestmark = pytest.mark.timeout(600)

WORKER = Path(__file__).with_name("moments_worker.py")


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    """What two processes answer."""
    folder = tmp_path_factory.mktemp("two")
    return run_workers(WORKER, 2, folder, timeout=580)[0]


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """What two devices of one process answer."""
    folder = tmp_path_factory.mktemp("mirrored")
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / "answer-0.json").read_text())]


@pytest.mark.parametrize("strategy", ["mirrored", "two_workers"])
def test_moments_do_not_change_the_bits_of_training_on_workers(strategy, request):
    for answer in request.getfixturevalue(strategy):
        assert answer["plain"] == answer["with_moments"]


@pytest.mark.parametrize("manner", ["several_steps", "mixed"])
@pytest.mark.parametrize("strategy", ["mirrored", "two_workers"])
def test_each_worker_has_the_moments_of_its_own_examples(strategy, manner, request):
    answers = [answer[manner] for answer in request.getfixturevalue(strategy)]
    got = [moments for answer in answers for moments in answer["moments"]]
    model = sequential(
        (8, 8, 2),
        layers.Conv2D(4, 3, activation="relu"),
        layers.PReLU(shared_axes=[1, 2]),
        layers.Flatten(),
        layers.Dense(3, kernel_regularizer="l2"),
    )
    model.compile(Keep(), "mse")
    model.set_weights([np.array(w) for w in answers[0]["weights"]])
    rng = np.random.default_rng(7)
    x, y = (rng.normal(size=s).astype("float32") for s in ((16, 8, 8, 2), (16, 3)))
    rtol = 0.05 if manner == "mixed" else 1e-4
    for rank, moments in enumerate(got):
        mine = slice(8 + 4 * rank, 12 + 4 * rank)
        # Keras divides by the number of replicas.
        expected = [e / 4 for e in brute_force(model, x[mine], y[mine])]
        for one, other in zip(moments, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol, 1e-3 * np.max(other))
    assert len(got) == 2
