"""OneBitLAMB against NumPy, over the warm-up's end and the bounds of its factors."""

import functools
from itertools import pairwise

import keras
import numpy as np
import pytest

import tfgradcomp
from tests.harness import fit, make_model
from tests.helpers import bits, flat, make_variables
from tests.optimizers.test_onebit_adam import SHAPES, check_resumed, train
from tests.optimizers.test_onebit_adam import gradients_of as unscaled_gradients_of
from tests.reference.methods import scaled_sign
from tfgradcomp.transports import AllGather, Sharded

RATE, BETA_1, BETA_2, EPSILON, DECAY = 0.01, 0.9, 0.99, 1e-7, 0.1
WARM_UP, STEPS = 4, 12
# Some of the squares lie below the floor; one coefficient is cut.
FLOOR, BETA_C, COEFFICIENTS = 0.5, 0.8, (0.01, 0.9)
# Factors reach both bounds, and the largest change.
FACTORS, THRESHOLD = (0.9, 1.2), 0.05


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
    """Gradients that shrink after the warm-up and grow again, unlike in layers."""
    scales = {4: (0.2, 0.5, 3.0), 5: (0.1, 0.5, 3.0), 6: (0.1, 1.0, 9.0)}
    factors = scales.get(step, (1.0, 1.0, 1.0))
    given = unscaled_gradients_of(step, rank)
    return [np.float32(f) * g for f, g in zip(factors, given, strict=True)]


train_lamb = functools.partial(train, make=onebit, gradients_of=gradients_of)


@pytest.mark.parametrize(("workers", "transport"), [(3, AllGather), (2, Sharded)])
def test_weights_are_those_of_the_paper(workers, transport):
    trained = train_lamb(workers, steps=range(STEPS), transport=transport)
    seen_factors = []
    for index, (expected, factors) in enumerate(trajectory(workers, gradients_of)):
        for _, seen in trained:
            np.testing.assert_allclose(seen[index], expected, rtol=1e-4, atol=1e-5)
        seen_factors.append(factors)
    assert len({bits(seen) for _, seen in trained}) == 1
    print(np.array(seen_factors))
