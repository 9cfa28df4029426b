"""Votes against NumPy; how servers are cut, and what they are without compression.

`tests/optimizers/test_trajectories.py` follows every server beside NumPy.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import make_context
from tests.pairwise import parametrize_pairwise
from tfgradcomp.compressors import (
    ORQ,
    ErrorFeedback,
    RandomK,
    ScaledSign,
    Sign,
    Ternary,
    TopK,
)
from tfgradcomp.core import Layout
from tfgradcomp.servers import (
    CodeSum,
    MajorityVote,
    Mean,
    MeanOfSigns,
    Recompress,
    Requantize,
    SignOfMean,
)


def test_a_server_that_compresses_needs_its_blocks_whole():
    for server in (Requantize(ORQ()), Recompress(ORQ())):
        assert server.shard_alignment(Layout((0, 10, 20, 25))) == 10
        assert server.shard_alignment(Layout((0, 25))) == 25
        assert server.shard_alignment(Layout((0, 10, 25, 30))) is None
    assert Requantize(TopK()).shard_alignment(Layout((0, 10))) is None
    with pytest.raises(ValueError, match="stateless.*ErrorFeedback"):
        Requantize(ErrorFeedback(ORQ()))


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (Requantize(ORQ()), Mean()),
        (MajorityVote(), SignOfMean()),
        (CodeSum(Sign()), MeanOfSigns()),
        (CodeSum(Ternary()), Mean()),
        (Mean(ScaledSign()), Mean()),
        (Recompress(ScaledSign()), Mean()),
    ],
    ids=str,
)
def test_what_becomes_of_the_rule_without_compression(server, expected):
    assert server.uncompressed() == expected
    assert type(server.uncompressed()) is type(expected)


@parametrize_pairwise(
    num_workers=[1, 2, 3, 4, 5],
    quorum=[0, 1, 2, 3],
    tie=["zero", "random"],
    abstain_below=[0.0, 0.8],
)
def test_votes_with_abstention_and_quorum(num_workers, quorum, tie, abstain_below):
    rng, layout = np.random.default_rng(num_workers), Layout.from_sizes([150, 250])
    vectors = rng.normal(size=(num_workers, layout.size)).astype(np.float32)
    sign = Sign(abstain_below)
    server = MajorityVote(tie, quorum, sign)
    context = make_context(num_workers=num_workers, step=3, seed=8)
    payloads = [sign.compress(v, (), layout, context).payload for v in vectors]
    stacked = {"codes": tf.stack([payload["codes"] for payload in payloads])}
    reply, _ = server.combine(stacked, (), layout, context)
    got = server.decompress(reply, layout, num_workers).numpy()

    blocks = np.split(np.abs(vectors), [150], axis=1)
    limits = [np.broadcast_to(b.mean(1, keepdims=True), b.shape) for b in blocks]
    abstains = np.abs(vectors) < abstain_below * np.concatenate(limits, 1)
    signs = np.where(abstains, 0, np.sign(vectors))
    can_tie = abstain_below > 0 or num_workers % 2 == 0
    assert (np.count_nonzero(signs.sum(0) == 0) > 5) == can_tie
    want = reference.vote(signs, tie, 8, 3)
    want[np.abs(signs.sum(0)) < quorum] = 0
    np.testing.assert_array_equal(got, want)
    assert not np.signbit(got[got == 0]).any()
    base = server.reply_fields(layout, num_workers)["votes"].base
    assert base == (3 if quorum or (tie == "zero" and can_tie) else 2)
    codes = (got + 1) / (1 if base == 3 else 2)
    np.testing.assert_array_equal(reply["votes"], reference.pack(codes, base))


def test_what_no_kernel_does_at_once_stays_as_it_is():
    for server in (Recompress(TopK()), Requantize(ScaledSign()), MajorityVote()):
        assert server.fused() is server


@pytest.mark.parametrize("server", [Mean(TopK(0.5)), Requantize(TopK(0.5))])
def test_weighted_payloads_have_a_weighted_mean(server):
    layout, weights = Layout((0, 6)), [3.0, 1.0, 0.5]
    assert server.takes_weights and not MajorityVote().takes_weights
    vectors = np.random.default_rng(0).normal(size=[3, 6]).astype(np.float32)
    payloads = [
        server.compressor.compress(tf.constant(x), (), layout, make_context()).payload
        for x in vectors
    ]
    stacked = {name: tf.stack([p[name] for p in payloads]) for name in payloads[0]}
    context = make_context(num_workers=3)._replace(weights=tf.constant(weights))
    update, _ = server.update(stacked, (), layout, context)

    def largest(x):
        return np.where(np.abs(x) >= np.sort(np.abs(x))[-3], x, 0)

    expected = np.average([largest(x) for x in vectors], axis=0, weights=weights)
    if isinstance(server, Requantize):
        expected = largest(expected)
    np.testing.assert_allclose(update, expected, rtol=1e-6, atol=1e-7)


def test_a_reply_that_would_be_multiplied_twice_is_refused():
    with pytest.raises(ValueError, match="multiplied already.*unbiased=True"):
        Requantize(RandomK(0.1, unbiased=True))


@pytest.mark.parametrize("weights", [None, np.ones(17, np.float32)])
def test_vectors_are_added_in_the_order_of_ranks_in_graphs_too(weights):
    values = np.random.default_rng(0).normal(size=(17, 1000)).astype(np.float32)
    context = make_context(num_workers=17)._replace(weights=weights)

    @tf.function(autograph=False)
    def mean(values):
        payloads, layout = {"values": values}, Layout.from_sizes([1000])
        return Mean().combine(payloads, (), layout, context)[0]["values"]

    expected = np.zeros(1000, np.float32)
    for one in values:
        expected += one
    np.testing.assert_array_equal(mean(values), expected / np.float32(17))
