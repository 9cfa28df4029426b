"""`model.fit` with the methods that need second moments."""

import keras
import numpy as np
import pytest

from tests.helpers import flat, named, split
from tests.optimizers.test_variance_based import make


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 12)).astype(np.float32)
    return x, (x @ rng.normal(size=(12, 2))).astype(np.float32)


def fitted(optimizer, policy="float32", epochs=3, **kwargs):
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense(2, dtype="float32")
        model = keras.Sequential(
            [keras.Input((12,)), keras.layers.Dense(16, activation="tanh"), dense]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(optimizer, "mse", **kwargs)
    x, y = data()
    history = model.fit(
        x, y, batch_size=16, epochs=epochs, verbose=0, shuffle=False
    ).history
    return history["loss"], flat(model.get_weights())


@pytest.mark.slow
def test_manners_of_fit():
    """In loops, compiled by XLA and with a loss scale: the same training."""

    def run(policy="float32", **manner):
        optimizer = make("VarianceBased", index_coding="delta")
        return fitted(optimizer, policy, epochs=1, **manner)

    expected, weights = run(jit_compile=False)
    for manner in (
        {"jit_compile": False, "steps_per_execution": 3},
        {"jit_compile": True},
    ):
        _, got = run(**manner)
        np.testing.assert_allclose(got, weights, rtol=0, atol=1e-4, err_msg=str(manner))
    loss, _ = run("mixed_float16", jit_compile=False)
    np.testing.assert_allclose(loss, expected, rtol=0.1)


def test_microbatches_stand_for_examples():
    fine, coarse = (make("VarianceBased", microbatches=k) for k in (None, 4))
    losses = [fitted(optimizer, jit_compile=False)[0] for optimizer in (fine, coarse)]
    assert losses[0] != losses[1] and losses[1][-1] < losses[1][0]


def test_embedding_model_learns():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(20, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    optimizer = make("VarianceBased", keras.optimizers.Adam(0.05))
    model.compile(optimizer, "mse", jit_compile=False)
    tokens = np.random.default_rng(0).integers(0, 15, (64, 4))
    target = np.cos(tokens).sum(1, keepdims=True)
    history = model.fit(tokens, target, batch_size=16, epochs=20, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    # Unused tokens leave no variance.
    variance = named(optimizer, "compressed.worker.variance")
    table = split(variance, [v.shape for v in model.trainable_variables])[0]
    assert not table[15:].any() and table[:15].any()
