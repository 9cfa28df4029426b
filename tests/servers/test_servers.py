"""What the server computes, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import bits, make_context
from tfgradcomp.compressors import (
    ORQ,
    BinGrad,
    ErrorFeedback,
    Identity,
    ScaledSign,
    Sign,
    Ternary,
    TopK,
)
from tfgradcomp.core import Layout
from tfgradcomp.core.contracts import check_fields
from tfgradcomp.servers import (
    CodeSum,
    MajorityVote,
    Mean,
    MeanOfSigns,
    Recompress,
    Requantize,
    SignOfMean,
)
from tfgradcomp.testing.compressor_contracts import check_message

pytestmark = pytest.mark.python_ops(workers=(1, 2, 3), num_workers=(1, 2, 3))

LAYOUT = Layout.from_sizes([70, 1, 30])
SPLITS = LAYOUT.row_splits


def combine(server, payloads, state=(), **context):
    """The reply; what it stands for must be what `update` gives at once."""
    num_workers = len(next(iter(payloads.values())))
    context = make_context(num_workers=num_workers, **context)
    reply, new_state = server.combine(payloads, state, LAYOUT, context)
    update, same_state = server.update(payloads, state, LAYOUT, context)
    assert bits(update) == bits(server.decompress(reply, LAYOUT, num_workers))
    for new, same in zip(
        tf.nest.flatten(new_state), tf.nest.flatten(same_state), strict=True
    ):
        assert bits(new) == bits(same)
    return reply, new_state


def check_reply(server, reply, workers):
    """The reply is as declared, and survives its own wire format."""
    fields = server.reply_fields(LAYOUT, workers)
    check_fields(server, "combine", reply, fields)
    check_message(reply, fields)
    return fields


def compressed(compressor, vectors, **context):
    """Payloads of all workers, stacked."""
    payloads = [
        compressor.compress(
            tf.constant(v, tf.float32), (), LAYOUT, make_context(rank=i, **context)
        ).payload
        for i, v in enumerate(vectors)
    ]
    return {name: tf.stack([p[name] for p in payloads]) for name in payloads[0]}


def packed(rows, base):
    """Codes of all workers, in words."""
    return tf.constant(np.stack([reference.pack(row, base) for row in rows]))


def vectors_of(workers, seed=0):
    rng = np.random.default_rng([seed, workers])
    return rng.normal(size=(workers, LAYOUT.size)).astype(np.float32)


@pytest.mark.parametrize("tie", ["zero", "random"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_votes(workers, tie):
    signs = np.sign(vectors_of(workers))
    server = MajorityVote(tie)
    payloads = {"codes": packed(signs > 0, 2)}
    reply, _ = combine(server, payloads, step=3, seed=8)
    fields = check_reply(server, reply, workers)
    has_zero = tie == "zero" and workers % 2 == 0
    assert fields["votes"].base == (3 if has_zero else 2)
    votes = server.decompress(reply, LAYOUT, workers).numpy()
    np.testing.assert_array_equal(votes, reference.vote(signs, tie, 8, 3))
    tied = signs.sum(0) == 0
    assert tied.any() == (workers % 2 == 0)
    assert (votes[tied] == 0).all() == has_zero or not tied.any()
    assert not np.signbit(votes[votes == 0]).any()


def test_random_ties_are_shared_and_unbiased():
    server, steps = MajorityVote("random"), 60
    codes = {"codes": packed([[0] * LAYOUT.size, [1] * LAYOUT.size], 2)}
    total = np.zeros(LAYOUT.size)
    for step in range(steps):
        replies = [
            combine(server, codes, step=step, seed=2, rank=rank)[0] for rank in (0, 1)
        ]
        assert bits(replies[0]["votes"]) == bits(replies[1]["votes"])
        total += server.decompress(replies[0], LAYOUT, 2).numpy()
    z = total / np.sqrt(steps)
    assert abs(z.sum()) < 5 * np.sqrt(LAYOUT.size)
    assert abs(np.sum(z**2) - LAYOUT.size) < 5 * np.sqrt(2 * LAYOUT.size)


def test_an_unknown_tie_is_refused():
    with pytest.raises(
        ValueError, match=r"tie must be one of \('zero', 'random'\).*up"
    ):
        MajorityVote("up")


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_ternary_codes_add_up_as_integers(workers):
    rng = np.random.default_rng(workers)
    codes = rng.integers(-1, 2, size=(workers, LAYOUT.size))
    codes[:, 0], codes[:, 1] = 1, -1
    scale = np.array([0.3, 1e-20, 7.0], np.float32)
    server = CodeSum(Ternary())
    payloads = {
        "codes": packed(codes + 1, 3),
        "scale": tf.constant(np.tile(scale, [workers, 1])),
    }
    reply, _ = combine(server, payloads)
    fields = check_reply(server, reply, workers)
    assert fields["codes"].base == 2 * workers + 1
    np.testing.assert_array_equal(
        reply["codes"], reference.pack(codes.sum(0) + workers, 2 * workers + 1)
    )
    np.testing.assert_array_equal(reply["scale"], scale)
    np.testing.assert_allclose(
        server.decompress(reply, LAYOUT, workers),
        reference.spread(scale.astype(np.float64), SPLITS) * codes.mean(0),
        rtol=1e-6,
        atol=0,
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_the_sum_of_signs_is_their_mean(workers):
    signs = np.sign(vectors_of(workers))
    server = CodeSum(Sign())
    reply, _ = combine(server, {"codes": packed(signs > 0, 2)})
    assert check_reply(server, reply, workers)["codes"].base == workers + 1
    np.testing.assert_array_equal(
        server.decompress(reply, LAYOUT, workers),
        signs.sum(0, dtype=np.float32) * (np.float32(1) / np.float32(workers)),
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "compressor",
    [Identity(), Identity("bfloat16"), ScaledSign(), Ternary(False), TopK(0.3)],
    ids=str,
)
def test_the_mean_is_that_of_what_was_decoded(workers, compressor):
    payloads = compressed(compressor, vectors_of(workers))
    decoded = [
        compressor.decompress({k: v[i] for k, v in payloads.items()}, LAYOUT).numpy()
        for i in range(workers)
    ]
    server = Mean(compressor)
    reply, _ = combine(server, payloads)
    check_reply(server, reply, workers)
    np.testing.assert_allclose(
        server.decompress(reply, LAYOUT, workers),
        np.mean(decoded, 0, np.float64),
        rtol=1e-5,
        atol=1e-7,
    )


def test_the_sign_of_the_mean():
    vectors = vectors_of(3)
    vectors[:, :2] = [[1, 0], [-0.5, 0], [-0.5, 0]]
    reply, _ = combine(SignOfMean(), {"values": tf.constant(vectors)})
    expected = np.sign(vectors.astype(np.float64).mean(0))
    assert expected[0] == expected[1] == 0
    np.testing.assert_array_equal(SignOfMean().decompress(reply, LAYOUT, 3), expected)


@pytest.mark.parametrize(
    ("compressor", "rule"),
    [
        (ScaledSign(), lambda v: reference.scaled_sign(v, SPLITS)),
        (TopK(0.1), lambda v: reference.top_k(v, 0.1)),
        (Identity(), lambda v: v),
    ],
    ids=["scaled sign", "top-k", "identity"],
)
def test_the_mean_is_compressed_again_with_a_residual(compressor, rule):
    server, state = Recompress(compressor), Recompress(compressor).init(LAYOUT)
    e, unit, rates = np.zeros(LAYOUT.size), 0.0, [0.1, 0.4, 0.0, 0.2, 0.2]
    for step, rate in enumerate(rates):
        vectors = vectors_of(3, step)
        reply, state = combine(
            server,
            compressed(compressor, vectors),
            state,
            step=step,
            rate=rate,
            previous_rate=unit,
        )
        check_reply(server, reply, 3)
        p = np.mean([rule(v.astype(np.float64)) for v in vectors], 0)
        p += unit / rate * e if rate else 0.0
        sent = rule(p)
        if rate:
            e, unit = p - sent, rate
        np.testing.assert_allclose(
            server.decompress(reply, LAYOUT, 3), sent, rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(state["residual"], e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("compressor", "rule"),
    [
        (ScaledSign(), lambda v, coins: reference.scaled_sign(v, SPLITS)),
        (BinGrad(), lambda v, coins: reference.bingrad_b(v, SPLITS)),
        (
            ORQ(5),
            lambda v, coins: reference.quantize(
                v, SPLITS, lambda u: reference.optimal_levels(u, 5), coins
            ),
        ),
    ],
    ids=["scaled sign", "BinGrad", "ORQ"],
)
def test_the_mean_is_compressed_again_and_nothing_is_kept(compressor, rule):
    server = Requantize(compressor)
    assert server.init(LAYOUT) == ()
    for step in range(3):
        payloads = compressed(compressor, vectors_of(3, step))
        reply, state = combine(server, payloads, step=step, seed=5, rank=2)
        check_reply(server, reply, 3)
        assert state == ()
        mean = compressor.mean(payloads, LAYOUT)
        # The server's numbers are nobody's own: those of rank -1.
        coins = reference.uniform(LAYOUT.size, 5, step, -1)
        np.testing.assert_allclose(
            server.decompress(reply, LAYOUT, 3),
            rule(np.asarray(mean, np.float64), coins),
            rtol=1e-6,
            atol=1e-7,
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


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("quorum", [0, 1, 2, 3])
@pytest.mark.parametrize("tie", ["zero", "random"])
def test_votes_with_abstention_and_quorum(num_workers, quorum, tie):
    rng = np.random.default_rng(num_workers)
    size, threshold = 400, 0.8
    vectors = rng.normal(size=(num_workers, size)).astype(np.float32)
    layout = Layout.from_sizes([150, 250])
    sign = Sign(abstain_below=threshold)
    server = MajorityVote(tie, quorum, sign)
    context = make_context(num_workers=num_workers)
    payloads = [sign.compress(v, (), layout, context).payload for v in vectors]
    stacked = {"codes": tf.stack([payload["codes"] for payload in payloads])}
    reply, _ = server.combine(stacked, (), layout, context)
    got = server.decompress(reply, layout, num_workers).numpy()

    means = [
        np.abs(part).mean(1, keepdims=True)
        for part in (vectors[:, :150], vectors[:, 150:])
    ]
    limits = np.concatenate([means[0].repeat(150, 1), means[1].repeat(250, 1)], 1)
    net = np.where(np.abs(vectors) < threshold * limits, 0, np.sign(vectors)).sum(0)
    want = np.where(np.abs(net) < quorum, 0, np.sign(net))
    decided = net != 0
    np.testing.assert_array_equal(got[decided], want[decided])
    split = got[~decided]
    assert len(split) > 5
    if tie == "zero" or quorum:
        np.testing.assert_array_equal(split, 0)
    else:
        assert set(split) == {-1.0, 1.0}
    base = server.reply_fields(layout, num_workers)["votes"].base
    assert base == (3 if tie == "zero" or quorum else 2)
    codes = (got + 1) / (1 if base == 3 else 2)
    np.testing.assert_array_equal(reply["votes"], reference.pack(codes, base))


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_a_fused_server_gives_the_same_bits(workers, rate):
    server = Recompress(ScaledSign())
    alone = server.fused()
    assert type(alone) is not type(server)
    payloads = compressed(ScaledSign(), vectors_of(workers))
    state = {"residual": tf.constant(vectors_of(1, 9)[0])}
    reply, left = combine(server, payloads, state, rate=rate, previous_rate=0.1)
    same, same_left = combine(alone, payloads, state, rate=rate, previous_rate=0.1)
    assert bits(left["residual"]) == bits(same_left["residual"])
    assert {k: bits(v) for k, v in reply.items()} == {
        k: bits(v) for k, v in same.items()
    }


def test_what_no_kernel_does_at_once_stays_as_it_is():
    for server in (Recompress(TopK()), Requantize(ScaledSign()), MajorityVote()):
        assert server.fused() is server
