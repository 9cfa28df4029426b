"""Deep Gradient Compression beside NumPy: workers, their mean, and what waits."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits, make_context
from tfgradcomp.compressors import DGC
from tfgradcomp.core import Layout
from tfgradcomp.servers import Mean
from tfgradcomp.transports.messages import padded

WORKERS, SIZE, STEPS = 3, 101, 12
LAYOUT = Layout.from_sizes([40, 61])
# Step 5 moves nothing, steps 3 and 8 are uncompressed.
ZERO_RATE, UNCOMPRESSED = 5, (3, 8)


def gradients():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(STEPS, WORKERS, SIZE))
    return (noise + rng.normal(size=SIZE)).astype(np.float32)


def in_numpy(mu, density_of, clip_norm):
    """The mean update of each step, and u and v after it, by the paper."""
    u, v = np.zeros((2, WORKERS, SIZE))
    for step, g in enumerate(gradients().astype(np.float64)):
        if clip_norm is not None:
            # The paper's gradients are parts of a sum: g / N is at most c N**-0.5.
            norm = np.linalg.norm(g / WORKERS, axis=1, keepdims=True)
            g = g * np.minimum(1, clip_norm * WORKERS**-0.5 / norm)
        new_u = mu * u + g
        new_v, sent = v, new_u
        if step not in UNCOMPRESSED:
            new_v, sent = v + new_u, np.zeros_like(v)
            k = max(1, math.ceil(density_of(step) * SIZE))
            for worker in range(WORKERS):
                largest = np.argsort(-np.abs(new_v[worker]))[:k]
                sent[worker, largest] = new_v[worker, largest]
                new_u[worker, largest] = new_v[worker, largest] = 0
        if step != ZERO_RATE:
            u, v = new_u, new_v
        yield sent.mean(0), u, v


def in_tensorflow(dgc):
    """The same of the package; messages are as long as the longest worker's."""
    states = [dgc.init(LAYOUT)] * WORKERS
    for step, g in enumerate(gradients()):
        compressor, server = dgc, Mean(dgc)
        if step in UNCOMPRESSED:
            compressor, server = dgc.uncompressed_step(), server.uncompressed_step()
        rate = 0.0 if step == ZERO_RATE else 0.1
        context = make_context(step, num_workers=WORKERS, rate=rate)
        made = [
            compressor.compress(tf.constant(x), state, LAYOUT, context)
            for x, state in zip(g, states, strict=True)
        ]
        states = [one.state for one in made]
        payloads = {
            name: tf.stack([one.payload[name] for one in made])
            for name in made[0].payload
        }
        update, _ = server.update(payloads, (), LAYOUT, context)
        yield np.asarray(update), [np.stack([s[n] for s in states]) for n in states[0]]


@pytest.mark.parametrize(
    ("arguments", "density_of"),
    [
        ({"ratio": 0.05}, lambda step: 0.05),
        ({"ratio": 1.0, "momentum": 0.5}, lambda step: 1.0),
        (
            {"ratio": 0.02, "density_steps": 2},
            lambda step: [0.25, 0.0625, 0.02][min(step // 2, 2)],
        ),
        ({"ratio": 0.05, "clip_norm": 4.0}, lambda step: 0.05),
    ],
    ids=["plain", "all", "ramp", "clipped"],
)
def test_steps_of_three_workers_follow_numpy(arguments, density_of):
    dgc = DGC(**arguments)
    expected = in_numpy(dgc.momentum, density_of, dgc.clip_norm)
    for (update, u, v), (found, state) in zip(
        expected, in_tensorflow(dgc), strict=True
    ):
        np.testing.assert_allclose(found, update, rtol=0, atol=2e-5)
        np.testing.assert_allclose(state[0], u, rtol=0, atol=2e-5)
        np.testing.assert_allclose(state[1], v, rtol=0, atol=5e-5)


def test_clipping_shortens_gradients_in_the_test_above():
    norms = np.linalg.norm(gradients(), axis=2)
    most = 4.0 * WORKERS**0.5
    assert (norms > 1.2 * most).all()
    # Only those that are too long.
    x, context = tf.constant(gradients()[0, 0]), make_context(num_workers=WORKERS)
    payloads = [
        dgc.compress(x, dgc.init(LAYOUT), LAYOUT, context).payload["pairs"]
        for dgc in (DGC(0.1), DGC(0.1, clip_norm=100.0))
    ]
    assert bits(payloads[0]) == bits(payloads[1])


def test_uncompressed_variables_have_plain_momentum():
    dgc = DGC(0.1, 0.75)
    plain, m = dgc.uncompressed(), np.zeros(SIZE)
    state = plain.init(LAYOUT)
    assert state.keys() == {"momentum"}
    for step in range(4):
        g = gradients()[step, 0]
        m = 0.75 * m + g
        payload, state, _ = plain.compress(
            tf.constant(g), state, LAYOUT, make_context(step)
        )
        np.testing.assert_allclose(payload["values"], m, rtol=1e-6, atol=1e-6)


def test_a_message_takes_64_bits_an_element_and_ignores_padding():
    ramp = DGC(0.02, density_steps=1)
    assert ramp.densities == (0.25, 0.0625, 0.02)
    assert DGC(0.5, density_steps=9).densities == DGC(0.5).densities == (0.5,)
    assert [f.count for f in ramp.fields(LAYOUT).values()] == [2 * 26]
    x = tf.constant(gradients()[0, 0])
    for step, count in enumerate((26, 7, 3, 3)):
        context = make_context(step)
        payload = ramp.compress(x, ramp.init(LAYOUT), LAYOUT, context).payload
        assert payload["pairs"].shape == [2 * count]
        longer = {"pairs": padded(payload["pairs"], 60)}
        assert bits(ramp.decompress(longer, LAYOUT)) == bits(
            ramp.decompress(payload, LAYOUT)
        )
        assert ramp.elements_sent(longer, LAYOUT) == count


def test_a_momentum_that_overflows_is_told():
    dgc, state = DGC(0.1), DGC(0.1).init(LAYOUT)
    x = tf.fill([SIZE], 3e38)
    _, state, is_finite = dgc.compress(x, state, LAYOUT, make_context())
    assert is_finite
    assert not dgc.compress(x, state, LAYOUT, make_context(1)).is_finite
