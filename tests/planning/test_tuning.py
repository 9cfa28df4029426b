"""`tfgradcomp.tune` measures candidates, chooses one and restores the model."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tfgradcomp.planning import tuning

CANDIDATES = [
    ("HalfPrecision", {"min_size": 0}),
    ("Strom", {"threshold": "auto"}),
    ("Strom", {"threshold": 1e6}),
    ("Hybrid", {"threshold": "auto", "index_coding": "delta"}),
]
SIZE = 3 * 8 + 8 + 8 + 8 + 8 * 4 + 4


def make_model():
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5, seed=3),
        keras.layers.Dense(4),
    ]
    model = keras.Sequential([keras.layers.Input((3,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def make_batches(broken=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 3)).astype(np.float32)
    y = rng.integers(0, 4, 24)
    if broken:
        x[-1] = np.nan
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


def gradients_of(model, batches):
    """Yields the gradients of each batch, flat."""
    for x, y in batches:
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        found = tape.gradient(loss, model.trainable_variables)
        yield np.concatenate([g.numpy().ravel() for g in found])


def to_bfloat16(x):
    return tf.cast(tf.cast(x, tf.bfloat16), tf.float32).numpy()


def test_the_fewest_bits_within_the_error_are_chosen():
    model, batches = make_model(), make_batches()
    before = [v.numpy() for v in model.variables]
    found = tfgradcomp.tune(
        model, batches, target_error=0.99, steps=3, candidates=CANDIDATES
    )
    # Weights, moving statistics, and the states of dropout, metrics and optimizer.
    assert len(before) > 8
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    rows = {row.name: row for row in found.table}
    assert len(rows) == 4
    assert [r.bits for r in found.table] == sorted(r.bits for r in found.table)

    g = [*gradients_of(make_model(), batches)]
    assert g[0].size == SIZE
    half = rows["HalfPrecision(min_size=0)"]
    lost = [to_bfloat16(x) - x for x in g]
    whole = np.linalg.norm(np.sum(g, 0))
    assert half.bits == 16
    assert half.error == pytest.approx(np.linalg.norm(np.sum(lost, 0)) / whole, 1e-3)
    pairs = zip(lost, g, strict=True)
    by_step = [np.linalg.norm(e) / np.linalg.norm(x) for e, x in pairs]
    assert half.step_error == pytest.approx(np.mean(by_step), 1e-3)
    # No element exceeds the threshold: the residual keeps all of them.
    idle = rows["Strom(threshold=1000000.0)"]
    assert (idle.bits, idle.error, idle.step_error) == (0, 1, 1)

    best = found.best
    fit = [row for row in found.table if row.error <= 0.99]
    assert best is fit[0] and best.wrapper in ("Strom", "Hybrid")
    for text in (best.name, f"{best.bits:.2f} bits", "3 batches", "neither accuracy"):
        assert text in found.reason and text in str(found)
    optimizer = found.optimizer(keras.optimizers.SGD(0.1), exclude="last")
    assert type(optimizer).__name__ == best.wrapper
    assert optimizer.threshold == "auto" and optimizer.exclude == "last"


def test_candidates_without_second_moments_are_still_measured(monkeypatch):
    def fail(*args):
        raise ValueError("Examples cannot be told apart. Received: a layer")

    monkeypatch.setattr(tuning, "step_of", fail)
    found = tfgradcomp.tune(make_model(), make_batches(), 1.0, 2, CANDIDATES[1:])
    assert {row.wrapper for row in found.table} == {"Strom"}
    assert "second moments were left out: Examples cannot be told" in found.reason


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"steps": 1}, "steps must be an integer, at least 2.*steps=1"),
        ({"target_error": 0.0}, "target_error must be positive.*target_error=0.0"),
        ({"target_error": 1e-9}, "(?s)No candidate.*float32.*target_error=1e-09.*Half"),
        ({"candidates": [("tune", {})]}, "name of a wrapper.*'tune'"),
        ({"candidates": []}, r"candidates must be.*candidates=\[\]"),
        ({"dataset": np.zeros(3)}, "must be a tf.data.Dataset.*ndarray"),
        ({"dataset": make_batches().take(1)}, "two batches.*Received: 1 batches"),
        ({"dataset": make_batches(True)}, "NaN or infinite.*batch 2 of the dataset"),
        ({"model": keras.Sequential()}, "compiled model.*model="),
    ],
)
def test_bad_arguments(arguments, text):
    given = {
        "model": make_model(),
        "dataset": make_batches(),
        "candidates": CANDIDATES[:1],
        "steps": 3,
        **arguments,
    }
    with pytest.raises(ValueError, match=text):
        tfgradcomp.tune(**given)


def test_several_workers_raise(monkeypatch):
    model = make_model()
    two = types.SimpleNamespace(num_replicas_in_sync=2)
    monkeypatch.setattr(type(model), "distribute_strategy", two)
    with pytest.raises(ValueError, match="one process.*a model of 2 replicas"):
        tfgradcomp.tune(model, make_batches(), candidates=CANDIDATES[:1])
