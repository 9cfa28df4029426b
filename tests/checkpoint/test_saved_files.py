"""Files that earlier versions saved load, and training goes on from them."""

from pathlib import Path

import keras
import numpy as np
import pytest

import tfgradcomp
from tests.helpers import KERAS

FOLDER = Path(__file__).parent
# The number of vectors of state in each file.
FILES = {
    "saved_by_0_1": {"terngrad": 0, "dist_ef_block_sgdm": 4, "composed": 4},
    "saved_by_0_2": {
        "policy": 2,
        "two_way": 2,
        "hybrid": 2,
        "local_steps": 2,
        "zero_one_adam": 2,
        "signum": 1,
    },
}
CASES = [(folder, name) for folder, names in FILES.items() for name in names]


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 3)).astype("float32")
    return x, rng.normal(size=(16, 4)).astype("float32")


@pytest.mark.sample(1)
@pytest.mark.skipif(
    KERAS < (3, 15), reason="The files are of Keras 3.15, whose layers it cannot read."
)
@pytest.mark.parametrize(("folder", "name"), CASES)
def test_a_model_of_an_earlier_version_resumes_to_the_same_weights(folder, name):
    assert tfgradcomp.__version__
    # The weights after more training; for 0.1 with what 0.2 draws.
    expected = np.load(FOLDER / folder / "expected.npz")
    model = keras.models.load_model(FOLDER / folder / f"{name}.keras")
    state = {v.name: v.numpy() for v in model.optimizer.variables}
    vectors = ("/compressed.", "/policy_0.")
    saved = [
        key
        for key in expected
        if key.startswith(f"{name}/") and any(vector in key for vector in vectors)
    ]
    for key in saved:
        np.testing.assert_array_equal(state[key.partition("/")[2]], expected[key])
    assert len(saved) == FILES[folder][name]
    model.fit(*data(), batch_size=8, epochs=1, shuffle=False, verbose=0)
    after = [value for key, value in expected.items() if f"{name}/after/" in key]
    assert len(after) == len(model.weights)
    for weight, value in zip(model.weights, after, strict=True):
        # Another processor may add up gradients in another order.
        np.testing.assert_allclose(weight.numpy(), value, rtol=1e-5, atol=1e-8)
