"""Files that version 0.1 saved load, and training goes on from them."""

from pathlib import Path

import keras
import numpy as np
import pytest

import tfgradcomp
from tests.helpers import KERAS

FOLDER = Path(__file__).parent / "saved_by_0_1"


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 3)).astype("float32")
    return x, rng.normal(size=(16, 4)).astype("float32")


@pytest.mark.skipif(
    KERAS < (3, 15), reason="The files are of Keras 3.15, whose layers it cannot read."
)
@pytest.mark.parametrize("name", ["terngrad", "dist_ef_block_sgdm", "composed"])
def test_a_model_of_version_0_1_resumes_to_the_same_weights(name):
    assert tfgradcomp.__version__
    # The weights after training, with what 0.2 draws: codes were made by the reference
    # in NumPy.
    expected = np.load(FOLDER / "expected.npz")
    model = keras.models.load_model(FOLDER / f"{name}.keras")
    state = {v.name: v.numpy() for v in model.optimizer.variables}
    saved = [key for key in expected if key.startswith(f"{name}/compressed.")]
    for key in saved:
        np.testing.assert_array_equal(state[key.partition("/")[2]], expected[key])
    assert len(saved) == (0 if name == "terngrad" else 4)
    model.fit(*data(), batch_size=8, epochs=1, shuffle=False, verbose=0)
    after = [value for key, value in expected.items() if f"{name}/after/" in key]
    for weight, value in zip(model.weights, after, strict=True):
        # Another processor may add up gradients in another order.
        np.testing.assert_allclose(weight.numpy(), value, rtol=1e-5, atol=1e-8)
