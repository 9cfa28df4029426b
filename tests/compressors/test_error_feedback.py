"""Residuals that decay, on workers and server, beside NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import bits, make_context
from tests.optimizers.trajectories import SEED, SHAPES, Run, reference_of, sgd
from tfgradcomp.compressors import (
    ErrorFeedback,
    LowRank,
    MeanErrorFeedback,
    NesterovMomentum,
    ScaledSign,
    TopK,
)
from tfgradcomp.core import Layout
from tfgradcomp.methods import Method
from tfgradcomp.servers import Recompress
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.sharded import Sharded

LAYOUT = Layout.from_sizes([40])


def two_way(compressor, momentum=None):
    sent = ErrorFeedback(compressor, decay=0.75)
    if momentum:
        sent = NesterovMomentum(sent, momentum)
    return Method(sent, Recompress(compressor, decay=0.5), block_size=16)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "transport"),
    [
        (two_way(TopK(0.2)), AllGather),
        (two_way(ScaledSign()), Sharded),
        (two_way(ScaledSign(), 0.5), AllGather),
    ],
    ids=["top-k", "signs by shards", "signs with momentum"],
)
def test_steps_of_three_workers_follow_numpy(method, transport):
    def make(transport):
        settings = {"seed": SEED, "min_size": 1, "allow_inner_momentum": True}
        return tfgradcomp.CompressedOptimizer(
            sgd(0.6), method, transport=transport, **settings
        )

    rule = reference_of(method, 3, SHAPES, block_size=16)
    Run(make, 3, SHAPES, transport).follows(rule, momentum=0.6, atol=1e-5)


@pytest.mark.parametrize("kind", [ErrorFeedback, MeanErrorFeedback])
def test_what_waits_decays_once_a_step(kind):
    """e <- decay e + x - sent, as long as nothing of it is sent."""
    feedback, largest = kind(TopK(1 / 40), decay=0.5), np.zeros(40, np.float32)
    largest[7] = 100.0
    x = largest + np.float32(np.random.default_rng(0).uniform(size=40))
    state, expected = feedback.init(LAYOUT), np.zeros(40)
    for step in range(5):
        context = make_context(step, rate=0.1, previous_rate=0.1 * (step > 0))
        payload, state, _ = feedback.compress(tf.constant(x), state, LAYOUT, context)
        update = feedback.decompress(payload, LAYOUT)
        if feedback.hears_reply:
            state = feedback.received(state, update, LAYOUT, context)
        expected = 0.5 * expected + x
        expected[7] = 0
        np.testing.assert_allclose(state["residual"], expected, rtol=1e-6)


def test_an_uncompressed_step_leaves_the_residual():
    feedback = ErrorFeedback(TopK(0.1), decay=0.5)
    state = {"residual": tf.ones([40]), "inner": ()}
    context = make_context(1, rate=0.1, previous_rate=0.1)
    waiting = feedback.uncompressed_step()
    _, after, _ = waiting.compress(tf.zeros([40]), state, LAYOUT, context)
    assert bits(after["residual"]) == bits(np.ones(40, np.float32))


@pytest.mark.parametrize("part", [ErrorFeedback(TopK(0.1)), Recompress(TopK(0.1))])
def test_what_was_saved_before_there_was_a_decay_loads(part):
    config = part.get_config()
    assert config.pop("decay") == 1.0
    assert type(part).from_config(config) == part
    # Policies in saved files are compared by this text.
    assert "decay" not in repr(part)
    other = type(part)(TopK(0.1), decay=0.5)
    assert other != part
    saved = keras.saving.serialize_keras_object(other)
    assert keras.saving.deserialize_keras_object(saved) == other


@pytest.mark.parametrize("kind", [ErrorFeedback, MeanErrorFeedback, Recompress])
@pytest.mark.parametrize("decay", [0, -0.5, 1.5, float("nan")])
def test_a_decay_out_of_range_raises(kind, decay):
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\].*Received: decay"):
        kind(TopK(0.1), decay=decay)


@pytest.mark.parametrize(
    "compressor",
    [
        MeanErrorFeedback(ScaledSign()),
        NesterovMomentum(MeanErrorFeedback(ScaledSign()), 0.5),
        MeanErrorFeedback(LowRank(1), decay=0.9),
    ],
    ids=repr,
)
def test_feedback_of_the_reply_has_the_same_state_when_it_is_fused(compressor):
    layout = Layout.from_shapes([(8, 5), (3,)])
    x = tf.sin(tf.range(43.0))
    states = []
    for form in (compressor, compressor.fused()):
        state = form.init(layout)
        for step, rate in enumerate([0.1, 0.2, 0.2]):
            context = make_context(step, rate=rate, previous_rate=0.1)
            prepared = form.prepare((step + 1) * x, state, layout, context)
            context = context._replace(prepared=prepared)
            payload, state, _ = form.compress((step + 1) * x, state, layout, context)
            update = 0.5 * form.decompress(payload, layout)
            state = form.received(state, update, layout, context)
        states.append(state)
    expected, fused = (tf.nest.flatten(state) for state in states)
    assert [*map(bits, fused)] == [*map(bits, expected)]
