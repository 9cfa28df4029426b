"""OneBitLAMB against NumPy, over the warm-up's end and the bounds of its factors."""

import functools
import json
from itertools import pairwise

import keras
import numpy as np
import pytest

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.harness import digest, fit, make_model
from tests.helpers import bits, flat, make_variables
from tests.optimizers.test_onebit_adam import (
    SHAPES,
    check_resumed,
    check_warm_up,
    train,
)
from tests.optimizers.test_onebit_adam import gradients_of as unscaled_gradients_of
from tests.reference.methods import scaled_sign
from tfgradcomp.optimizers.onebit_lamb import ScalingSteps
from tfgradcomp.transports import AllGather, Sharded

RATE, BETA_1, BETA_2, EPSILON, DECAY = 0.01, 0.9, 0.99, 1e-7, 0.1
WARM_UP, STEPS = 4, 12
# Some of the squares lie below the floor; one coefficient is cut.
FLOOR, BETA_C, COEFFICIENTS = 0.5, 0.8, (0.01, 0.9)
# Factors reach both bounds, and the largest change.
FACTORS, THRESHOLD = (0.92, 1.2), 0.05


def lamb(**arguments):
    return keras.optimizers.Lamb(
        RATE, BETA_1, BETA_2, EPSILON, weight_decay=DECAY, **arguments
    )


def onebit(transport):
    return tfgradcomp.OneBitLAMB(
        lamb(),
        WARM_UP,
        BETA_C,
        COEFFICIENTS,
        FACTORS,
        THRESHOLD,
        FLOOR,
        transport=transport,
        min_size=100,
    )


def norm(values):
    return np.sqrt(np.sum(values**2))


def denominator(variance):
    root = np.sqrt(variance)
    return np.maximum(root, FLOOR * np.sqrt(np.mean(variance))) + EPSILON


def trajectory(workers, gradients_of):
    """Li et al. 2021, Algorithm 1, with the corrections of Keras' LAMB.

    Yields the weights and the layers' factors after each step.
    """
    x = flat(v.numpy() for v in make_variables(SHAPES)).astype(float)
    cuts = np.cumsum([0, *(int(np.prod(shape)) for shape in SHAPES)])
    layers = [slice(a, b) for a, b in pairwise(cuts)]
    m, v, fresh, server = np.zeros([4, x.size])
    e = np.zeros([workers, x.size])
    c, factors = np.zeros(len(layers)), np.ones(len(layers))
    # The second variable is too small to be compressed.
    small = layers[1]

    for step in range(STEPS):
        g = np.stack([flat(gradients_of(step, r)) for r in range(workers)])
        x -= RATE * DECAY * x
        first, second = 1 - BETA_1 ** (step + 1), 1 - BETA_2 ** (step + 1)
        if step < WARM_UP:
            m = BETA_1 * m + (1 - BETA_1) * g.mean(0)
            v = BETA_2 * v + (1 - BETA_2) * g.mean(0) ** 2
            fresh = v
            for i, own in enumerate(layers):
                u = (m[own] / first) / (np.sqrt(v[own] / second) + EPSILON)
                ratio = norm(x[own]) / norm(u)
                c[i] = BETA_C * c[i] + (1 - BETA_C) * np.clip(ratio, *COEFFICIENTS)
                x[own] -= RATE * ratio * u
        else:
            before, sent_by = m, BETA_1 * m + (1 - BETA_1) * g
            p = sent_by + e
            sent = np.stack([scaled_sign(one, cuts) for one in p])
            e, whole = p - sent, sent.mean(0) + server
            m = scaled_sign(whole, cuts)
            server = whole - m
            m[small] = sent_by.mean(0)[small]
            e[:, small] = server[small] = 0
            estimate = (m - BETA_1 * before) / (1 - BETA_1)
            fresh = BETA_2 * fresh + (1 - BETA_2) * estimate**2
            for i, own in enumerate(layers):
                frozen = denominator(v[own] / (1 - BETA_2**WARM_UP))
                factor = np.max(frozen / denominator(fresh[own] / second))
                factor = min(max(factor, FACTORS[0]), FACTORS[1])
                lowest, highest = (1 - THRESHOLD), (1 + THRESHOLD)
                factor = max(factor, lowest * factors[i])
                factors[i] = factor = min(factor, highest * factors[i])
                scale = c[i] / (1 - BETA_C**WARM_UP) * factor
                x[own] -= RATE * scale * (m[own] / first) / frozen
        yield x.copy(), factors.copy()


def gradients_of(step, rank):
    """Gradients that shrink in some layers after the warm-up, and grow in the last."""
    given, is_late = unscaled_gradients_of(step, rank), step >= WARM_UP
    scales = (0.2, 2.0, 12.0) if is_late else (1.0, 1.0, 1.0)
    return [np.float32(s) * g for s, g in zip(scales, given, strict=True)]


train_lamb = functools.partial(train, make=onebit, gradients_of=gradients_of)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("workers", "transport"), [(3, AllGather), (2, Sharded)])
def test_weights_are_those_of_the_paper(workers, transport):
    trained = train_lamb(workers, steps=range(STEPS), transport=transport)
    seen_factors = []
    for index, (expected, factors) in enumerate(trajectory(workers, gradients_of)):
        for _, seen in trained:
            np.testing.assert_allclose(seen[index], expected, rtol=1e-4, atol=1e-5)
        seen_factors.append(factors)
    assert len({bits(seen) for _, seen in trained}) == 1
    changes = np.divide(seen_factors[1:], seen_factors[:-1])
    # The run has shown both bounds, the largest change, and factors of their own.
    assert {*FACTORS} <= {*np.ravel(seen_factors)}
    assert changes.max() == pytest.approx(1 + THRESHOLD)
    assert ((np.abs(changes - 1) < 0.04) & (changes != 1)).any()


def test_the_warm_up_is_stock_lamb_to_the_bit():
    check_warm_up(lamb(), train_lamb, gradients_of)


@pytest.mark.sample(1)
@pytest.mark.parametrize("middle", [2, 7])
def test_a_resumed_run_has_the_same_bits(middle):
    check_resumed(onebit, middle, STEPS)


def train_and_load(path):
    """Digests of a model that trains on, and of one that is loaded in the middle."""
    make = functools.partial(tfgradcomp.OneBitLAMB, min_size=100, warmup_steps=2)
    model = fit(make_model(lambda: make(keras.optimizers.Lamb(0.01))), rows=40)
    model.save(path)
    with strategy_and_rank()[0].scope():
        again = keras.saving.load_model(path)
    return digest(fit(model)), digest(fit(again))


@pytest.mark.slow
def test_a_saved_model_trains_on_in_the_same_bits(pools, tmp_path):
    path = str(tmp_path / "saved.keras")
    ((expected, found),), _ = pools(2, "virtual").run(train_and_load, path)
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_steps": 0}, "warmup_steps must be an integer, at least 1"),
        ({"inner_optimizer": "adam"}, r"keras.optimizers.Lamb.* inner_optimizer=Adam"),
        ({"coefficient_beta": 1.0}, "coefficient_beta=1.0"),
        ({"coefficient_range": (0.0, 1.0)}, r"coefficient_range=\(0.0, 1.0\)"),
        ({"factor_range": (2.0, 1.0)}, r"factor_range=\(2.0, 1.0\)"),
        ({"factor_threshold": 1.5}, "factor_threshold=1.5"),
        ({"refresh": 16}, "OneBitLAMB has .* Received: refresh=16"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfgradcomp.OneBitLAMB(
            **{"inner_optimizer": lamb(), "warmup_steps": 5, **arguments}
        )


def test_an_inner_optimizer_that_has_trained_is_refused():
    variables, trained = make_variables(SHAPES), lamb()
    trained.build(variables)
    with pytest.raises(ValueError, match="from the first step on.* built=True"):
        tfgradcomp.OneBitLAMB(trained, 5).build(variables)


def test_it_is_no_method_of_single_layers():
    with pytest.raises(ValueError, match="Received: OneBitLAMB.for_layers"):
        tfgradcomp.OneBitLAMB.for_layers(warmup_steps=5)


def test_arguments_are_saved_and_nothing_is_warned_of(recwarn):
    optimizer = onebit("all_gather")
    again = type(optimizer).from_config(json.loads(json.dumps(optimizer.get_config())))
    assert again.get_config() == optimizer.get_config()
    assert again.uncompressed_steps == optimizer.uncompressed_steps
    assert again.uncompressed_steps == ScalingSteps(
        WARM_UP,
        variance_floor=FLOOR,
        coefficient_beta=BETA_C,
        coefficient_range=COEFFICIENTS,
        factor_range=FACTORS,
        factor_threshold=THRESHOLD,
    )
    assert not [one for one in recwarn if "Error feedback" in str(one.message)]
