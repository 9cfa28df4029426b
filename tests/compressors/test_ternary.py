"""TernGrad's codes, one by one, and the blocks on which a naive one goes wrong."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import make_context
from tfgradcomp.compressors import Clip, Ternary
from tfgradcomp.core import Layout
from tfgradcomp.testing import inputs

pytestmark = pytest.mark.python_ops

SIZES = [35, 1, 64, 3]
SPLITS = [0, 35, 36, 100, 103]
TERNGRAD = Clip(Ternary(), 2.5)


def gradient(seed=0):
    x = np.random.default_rng(seed).normal(size=103).astype(np.float32)
    x[[3, 40]] = 0.0, -0.0
    return x


def compress(compressor, x, sizes=tuple(SIZES), reduce=tf.identity, **context):
    layout = Layout.from_sizes(list(sizes))
    payload, _, _ = inputs.compress(
        compressor,
        tf.constant(x, tf.float32),
        (),
        layout,
        make_context(**context),
        lambda name, part: reduce(part),
    )
    return payload, compressor.decompress(payload, layout).numpy()


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("step", [0, 17])
def test_codes_are_those_of_the_reference(rank, step):
    x = gradient()
    payload, vector = compress(Ternary(), x, step=step, rank=rank, seed=6)
    scale = reference.largest(x, SPLITS)
    codes = reference.ternary_codes(x, scale, SPLITS, 6, step, rank)
    np.testing.assert_array_equal(payload["codes"], reference.pack(codes + 1, 3))
    np.testing.assert_array_equal(payload["scale"], scale)
    np.testing.assert_array_equal(vector, codes * reference.spread(scale, SPLITS))


def test_clipping_comes_before_the_scale():
    x = gradient()
    x[50] = 100
    payload, _ = compress(TERNGRAD, x, step=2, rank=1, seed=6)
    clipped = reference.clip(x, SPLITS)
    scale = reference.largest(clipped, SPLITS)
    assert scale[2] < 50
    np.testing.assert_allclose(payload["scale"], scale, rtol=1e-6)
    np.testing.assert_array_equal(
        payload["codes"],
        reference.pack(reference.ternary_codes(clipped, scale, SPLITS, 6, 2, 1) + 1, 3),
    )


def test_a_shared_scale_is_the_maximum_over_workers():
    x = gradient()
    shared = tf.constant([5.0, 4.0, 3.0, 50.0])

    def maximum(scale):
        return tf.maximum(scale, shared)

    payload, _ = compress(Ternary(), x, reduce=maximum)
    np.testing.assert_array_equal(payload["scale"], shared)
    np.testing.assert_array_equal(
        payload["codes"],
        reference.pack(
            reference.ternary_codes(x, shared.numpy(), SPLITS, 0, 0, 0) + 1, 3
        ),
    )
    alone, _ = compress(Ternary(share_scaler=False), x, reduce=maximum)
    np.testing.assert_array_equal(alone["scale"], reference.largest(x, SPLITS))


def test_the_largest_element_is_always_sent():
    x = gradient()
    for step in range(50):
        _, vector = compress(Ternary(), x, step=step)
        for block in reference.blocks(SPLITS):
            top = np.argmax(np.abs(x[block]))
            assert vector[block][top] == x[block][top]


@pytest.mark.parametrize(
    "block",
    [
        np.array([0.5]),
        np.array([-1e-30]),
        np.full(20, -3.0),
        np.full(2, 1e-20),
        100 + np.linspace(-1, 1, 50),
        -1 + np.linspace(-1e-4, 1e-4, 50),
    ],
    ids=["one", "one small", "constant", "constant small", "mean", "negative mean"],
)
def test_no_block_with_a_gradient_has_expectation_zero(block):
    # Clipped at the deviation around the mean, these are sent as 0 for ever, or
    # shrunk by up to 2500 times.
    for step in range(5):
        _, vector = compress(TERNGRAD, block, [len(block)], step=step)
        np.testing.assert_allclose(vector.mean(), block.mean(), rtol=0.05)


def test_about_seven_in_ten_of_gaussian_codes_are_zero():
    # E|g| / (2.5 sigma) = 0.3 of the elements are kept.
    x = np.random.default_rng(5).normal(size=100_000)
    _, vector = compress(TERNGRAD, x, [100_000])
    assert 0.67 < np.mean(vector == 0) < 0.71


def test_zeros_are_sent_as_zeros():
    payload, vector = compress(Ternary(), np.zeros(103))
    np.testing.assert_array_equal(payload["codes"], reference.pack([1] * 103, 3))
    np.testing.assert_array_equal(vector, 0)
