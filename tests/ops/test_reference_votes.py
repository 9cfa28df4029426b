"""Tests of votes in pure TensorFlow against NumPy, bit for bit."""

import pytest
import tensorflow as tf

from tests import reference as oracle
from tests.ops import cases
from tests.ops.cases import STREAMS, same, tensor
from tests.ops.implementations import reference as ops


@pytest.mark.sample(1)
@pytest.mark.parametrize("base", [2, 3])
@pytest.mark.parametrize("reply_base", [2, 3])
@pytest.mark.parametrize("workers", cases.WORKERS)
def test_votes(base, reply_base, workers):
    for size in (0, 1, 33, 1000):
        words = cases.words(base, workers, size)
        for quorum in (0, 1, 2, workers, workers + 1):
            for stream in (None, *STREAMS):
                reply = ops.majority_vote(
                    tf.constant(words),
                    size,
                    base,
                    reply_base,
                    quorum,
                    None if stream is None else tensor(stream),
                )
                expected = oracle.majority_vote(
                    words, size, base, reply_base, quorum, stream
                )
                same(reply, expected, (size, quorum, stream))


def test_votes_by_hand():
    minus, none, plus = 0, 1, 2
    ballots = [[plus, plus, minus, none, none], [plus, minus, minus, none, plus]]
    words = tf.stack([ops.pack_codes(tf.constant(b), 3) for b in ballots])

    def vote(reply_base, quorum=0, stream=None):
        reply = ops.majority_vote(words, 5, 3, reply_base, quorum, stream)
        return ops.unpack_codes(reply, reply_base, 5).numpy().tolist()

    assert vote(3) == [plus, none, minus, none, plus]
    assert vote(3, quorum=2) == [plus, none, minus, none, none]
    # One bit cannot say "none": a split vote is a minus.
    assert vote(2) == [1, 0, 0, 0, 1]
    coins = oracle.stream_coins(5, 7, 3, 0)
    assert vote(2, stream=tensor((7, 3, 0))) == [1, coins[1], 0, coins[3], 1]
    # A coin is no net vote: the quorum takes it back.
    assert vote(3, 1, tensor((7, 3, 0))) == [plus, none, minus, none, plus]
