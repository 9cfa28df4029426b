"""Random-k: what is drawn, what travels, and three workers beside NumPy."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests import reference
from tests.helpers import bits, make_context
from tests.optimizers.trajectories import SEED, SHAPES, Run, reference_of, sgd
from tfgradcomp import methods
from tfgradcomp.compressors import RandomK
from tfgradcomp.core import Layout
from tfgradcomp.testing.exchanges import run
from tfgradcomp.testing.inputs import decoded_step, first_step, gradient_of
from tfgradcomp.testing.promises import draw
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce
from tfgradcomp.transports.messages import message_words

LAYOUT = Layout.from_sizes([70, 1, 32])
X = gradient_of(LAYOUT)


@pytest.mark.sample(1)
@pytest.mark.parametrize("transport", [AllGather, AllReduce])
def test_steps_of_three_workers_follow_numpy(transport):
    def make(transport):
        return tfgradcomp.RandomK(
            sgd(0.6),
            0.2,
            transport=transport,
            seed=SEED,
            min_size=1,
            allow_inner_momentum=True,
        )

    rule = reference_of(methods.random_k(0.2), 3, SHAPES)
    Run(make, 3, SHAPES, transport).follows(rule, momentum=0.6, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ratio", [1e-9, 0.01, 0.1, 0.33, 0.7, 1.0])
def test_one_element_of_each_range_is_drawn(ratio):
    count = max(1, math.ceil(ratio * LAYOUT.size))
    for step in range(20):
        found = decoded_step(RandomK(ratio), X, LAYOUT, step=step, seed=3).numpy()
        sizes = reference.drawn(LAYOUT.size, ratio, 3, step)
        np.testing.assert_array_equal(found, np.where(sizes > 0, X, 0))
        assert np.count_nonzero(found) == count
        assert {*sizes[sizes > 0]} <= {LAYOUT.size // count, -(-LAYOUT.size // count)}
        scaled = decoded_step(RandomK(ratio, True), X, LAYOUT, step=step, seed=3)
        np.testing.assert_allclose(scaled, sizes * X, rtol=1e-6)


def test_all_workers_draw_the_same_elements_and_others_in_each_step():
    seen = [
        bits(
            decoded_step(RandomK(0.1), X, LAYOUT, step=step, seed=seed, rank=rank) != 0
        )
        for step, seed in ((0, 0), (1, 0), (0, 1))
        for rank in range(3)
    ]
    assert [seen.index(one) for one in seen] == [0, 0, 0, 3, 3, 3, 6, 6, 6]


def test_parts_of_a_vector_draw_for_themselves():
    x = tf.constant(X[:64])
    layout = Layout.from_sizes([64])
    first, second = (
        RandomK(0.5).compress(x, (), layout, make_context()._replace(offset=o))
        for o in (0, 128)
    )
    assert bits(first.payload["values"]) != bits(second.payload["values"])


def test_multiplied_values_are_unbiased():
    draws, ratio = 4000, 0.23
    samples = draw(methods.random_k(ratio, False), X, LAYOUT, draws)
    count = math.ceil(ratio * LAYOUT.size)
    edges = np.arange(count + 1) * LAYOUT.size // count
    size = np.repeat(np.diff(edges), np.diff(edges))
    # An element has w times its value with probability 1 / w, else 0.
    x = X.astype(np.float64)
    deviation = np.abs(x) * np.sqrt(size - 1)
    z = (samples.mean(0) - x) / (deviation / np.sqrt(draws))
    assert np.abs(z).max() < 5
    assert abs(np.sum(z**2) - len(z)) < 5 * np.sqrt(2 * len(z))
    np.testing.assert_allclose(samples.std(0), deviation, rtol=0.15)


def test_elements_of_two_ranges_are_drawn_independently():
    draws = 2000
    drawn = draw(methods.random_k(2 / LAYOUT.size, False), X, LAYOUT, draws) != 0
    first, second = (np.argmax(part, axis=1) for part in np.split(drawn, [51], axis=1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(draws)


@pytest.mark.parametrize("workers", [2, 3])
def test_values_alone_travel(workers):
    method, count = methods.random_k(0.1), math.ceil(0.1 * LAYOUT.size)
    # A server that is no worker gets the stream of 192 bits as well.
    assert message_words(method.compressor.fields(LAYOUT)) == count + 6
    for transport, slots in ((AllGather, 1), (AllReduce, 3 * workers)):
        # Flags travel as well: a word, or digits of numbers for each worker.
        (worker, *_) = run(workers, transport, method, LAYOUT, steps=1)
        assert [call.words for call in worker.route.calls] == [count + slots]
        assert [size for _, size in worker.calls] == [4 * (count + slots)]


def test_values_that_overflow_are_told():
    x = np.full(LAYOUT.size, 1e38, np.float32)
    assert first_step(RandomK(0.1), x, LAYOUT).is_all_finite(tf.constant(x))
    overflown = first_step(RandomK(0.1, True), x, LAYOUT)
    assert not overflown.is_all_finite(tf.constant(x))


def test_vectors_beyond_31_bits_raise():
    with pytest.raises(ValueError, match="at most 2147483647 elements.*Received"):
        RandomK().fields(Layout((0, 2**31)))
