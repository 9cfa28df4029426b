"""Quantizers, half floats and sparse methods beside NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests import reference
from tests.helpers import Rates, bits, flat, make_variables, named, split
from tests.optimizers.trajectories import (
    RATES,
    SEED,
    SHAPES,
    SPLITS,
    STEPS,
    Run,
    in_parts,
    on_models,
    parts_of,
    sgd,
)
from tests.pairwise import parametrize_pairwise
from tfgradcomp.compressors import ErrorFeedback, Identity, NesterovMomentum
from tfgradcomp.servers import Recompress
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce

# Of the operations, a model with plain parts and other numbers of workers show nothing
# new; tests/ops compares both kinds of them bit for bit.
python_ops = pytest.mark.python_ops(workers=(3,), min_size=(1,))

LEVELS = {
    "ORQ": lambda v: reference.optimal_levels(v, 5),
    "BinGrad": reference.symmetric_levels,
    "QSGD": lambda v: reference.even_levels(v, 7, "l2"),
    "LinearQuantization": lambda v: reference.quantile_levels(v, 4),
}
QUANTIZERS = {
    "ORQ": {"levels": 5},
    "BinGrad": {"variant": "pb"},
    "QSGD": {"levels": 7, "norm": "l2"},
    "LinearQuantization": {"levels": 4},
}


@python_ops
@on_models(
    "workers, name, block_size, arguments",
    [
        (2, "ORQ", 16, {}),
        (3, "ORQ", 40, {"reply": "requantize"}),
        (2, "ORQ", None, {"clip_factor": 1.7}),
        (3, "ORQ", 16, {"error_feedback": True, "reply": "requantize"}),
        (2, "BinGrad", 16, {"reply": "requantize"}),
        (3, "BinGrad", 40, {"clip_factor": 2.5, "variant": "b"}),
        (2, "BinGrad", 16, {"variant": "b", "reply": "requantize"}),
        (2, "BinGrad", None, {"variant": "b", "error_feedback": True}),
        (3, "QSGD", 16, {}),
        (2, "QSGD", None, {"reply": "requantize"}),
        (2, "QSGD", 40, {"norm": "max", "levels": 9, "error_feedback": True}),
        (2, "ORQ", 40, {"clip_factor": 1.7, "error_feedback": True}),
        (2, "LinearQuantization", 16, {"reply": "requantize"}),
        (3, "ScaledSign", 16, {"reply": "requantize"}),
        (2, "ScaledSign", None, {"error_feedback": True}),
    ],
    [
        (2, "ORQ", 16, {}),
        (3, "BinGrad", 40, {"clip_factor": 2.5, "variant": "b"}),
        (2, "LinearQuantization", 16, {"reply": "requantize"}),
        (3, "QSGD", 16, {"error_feedback": True, "reply": "requantize"}),
    ],
)
def test_quantizers(
    workers, name, block_size, arguments, shapes, size_argument, min_size
):
    own = {**QUANTIZERS.get(name, {}), **arguments}
    run = Run(
        lambda transport: getattr(tfgradcomp, name)(
            sgd(0.6),
            block_size=block_size,
            seed=SEED,
            transport=transport,
            **own,
            **size_argument,
        ),
        workers,
        shapes,
        # With more coins, some would be too close to call.
        rates=RATES[:8],
    )
    compressed, splits, _ = parts_of(shapes, min_size)
    if block_size is not None:
        splits = [*range(0, len(compressed), block_size), len(compressed)]

    def levels(v):
        if own.get("norm") == "max":
            return reference.even_levels(v, own["levels"])
        return LEVELS[name](v)

    feeds_back = "error_feedback" in own
    requantizes = "reply" in own

    def compress(v, step, rank):
        whole = v
        if "clip_factor" in own and rank >= 0:
            v = reference.clip(v, splits, own["clip_factor"])
        if name == "ScaledSign":
            return reference.scaled_sign(v, splits)
        if own.get("variant") == "b":
            return reference.bingrad_b(v, splits)
        coins = reference.uniform(len(v), SEED, step, rank)
        rounded = reference.quantize(v, splits, levels, coins)
        return reference.fitted(rounded, whole, splits) if feeds_back else rounded

    run.follows(
        in_parts(
            shapes,
            min_size,
            reference.Quantized(compress, requantizes, feeds_back),
            lambda step, gradients, weights, rate: gradients.mean(0),
        ),
        momentum=0.6,
        atol=2e-5,
    )


@python_ops
@on_models(
    "workers, norm, levels, transport",
    [(2, "max", 3, AllReduce), (3, "l2", 9, AllGather)],
    [(3, "max", 5, AllReduce)],
)
def test_shared_levels(
    workers, norm, levels, transport, shapes, size_argument, min_size
):
    run = Run(
        lambda transport: tfgradcomp.QSGD(
            sgd(0.6),
            levels=levels,
            norm=norm,
            block_size=40,
            reply="shared",
            seed=SEED,
            transport=transport,
            **size_argument,
        ),
        workers,
        shapes,
        transport,
        rates=RATES[:8],
    )
    compressed, _, _ = parts_of(shapes, min_size)
    splits = [*range(0, len(compressed), 40), len(compressed)]

    def shared(step, gradients, weights, rate):
        result = np.zeros_like(gradients)
        coins = [
            reference.uniform(len(g), SEED, step, i) for i, g in enumerate(gradients)
        ]
        for block in reference.blocks(splits):
            tables = [reference.even_levels(g[block], levels, norm) for g in gradients]
            table = max(tables, key=lambda table: table[-1])
            for i, g in enumerate(gradients):
                result[i, block] = reference.rounded_at_random(
                    g[block], table, coins[i][block]
                )
        return result.mean(0)

    run.follows(
        in_parts(
            shapes,
            min_size,
            shared,
            lambda step, gradients, weights, rate: gradients.mean(0),
        ),
        momentum=0.6,
        atol=2e-5,
    )


def half(values, dtype):
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float64)
    # bfloat16 is the upper half of a float32, rounded to nearest, ties to even.
    words = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    words += 0x7FFF + (words >> np.uint64(16) & np.uint64(1))
    words &= np.uint64(0xFFFF0000)
    return words.astype(np.uint32).view(np.float32).astype(np.float64)


@on_models(
    "workers, dtype",
    [(2, "bfloat16"), (3, "float16")],
    [(3, "bfloat16"), (2, "float16")],
)
def test_half_precision(workers, dtype, shapes, size_argument, min_size):
    run = Run(
        lambda transport: tfgradcomp.HalfPrecision(
            sgd(0.6), dtype=dtype, transport=transport, **size_argument
        ),
        workers,
        shapes,
    )
    run.follows(
        in_parts(
            shapes,
            min_size,
            lambda step, gradients, weights, rate: half(gradients, dtype).mean(0),
            lambda step, gradients, weights, rate: gradients.mean(0),
        ),
        momentum=0.6,
    )


@parametrize_pairwise(
    momentum=[None, 0.9],
    workers=[2, 3],
    rates={"many": RATES, "few": [0.0, 0.0, 0.1, 0.3, 0.0, 0.1]},
)
def test_what_is_owed_completes_the_uncompressed_run(workers, momentum, rates):
    """Lemmas 1 and 3: x - eta (server residual + mean residual) is that of SGD."""
    names = ["compressed.worker.residual", "compressed.server.residual"]

    def make(transport):
        inner = keras.optimizers.SGD(Rates(rates))
        settings = {"transport": transport, "min_size": 1}
        if momentum is None:
            return tfgradcomp.DistEFBlockSGD(inner, **settings)
        return tfgradcomp.DistEFBlockSGDM(inner, momentum, **settings)

    run = Run(make, workers, SHAPES, rates=rates, watch=names)
    z, unit = run.start.astype(np.float64), 0.0
    m = np.zeros_like(run.gradients[0], np.float64)
    for step, rate in enumerate(rates):
        rate = float(np.float32(rate))
        m = (momentum or 0.0) * m + run.gradients[step]
        z -= rate * ((momentum or 0.0) * m + run.gradients[step]).mean(0)
        unit = rate or unit
        owed = np.mean([own for own, _ in run.watched[step]], 0, np.float64)
        owed += run.watched[step][0][1]
        # float32 roundings of p and x: 2**-24 of numbers below 100 times the rate,
        # and of weights below 10, a step.
        np.testing.assert_allclose(
            run.weights[step] - unit * owed, z, rtol=0, atol=1e-5 * (step + 1) ** 0.5
        )
        servers = {bits(server) for _, server in run.watched[step]}
        assert len(servers) == 1
        workers_own = {bits(own) for own, _ in run.watched[step]}
        assert len(workers_own) == (workers if unit else 1)
    assert np.abs(unit * owed).max() > 1e-3


@pytest.mark.parametrize("workers", [3])
def test_the_identity_is_plain_sgd_on_the_mean_gradient(workers):
    run = Run(
        lambda transport: tfgradcomp.DistEFSGD(
            sgd(), compressor="identity", transport=transport, min_size=1
        ),
        workers,
        SHAPES,
    )
    check_against_keras(run, sgd())


@pytest.mark.parametrize("workers", [3])
def test_the_identity_with_momentum_is_nesterov_on_the_mean_gradient(workers):
    def make(transport):
        return tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.05),
            NesterovMomentum(ErrorFeedback(Identity()), 0.9),
            Recompress(Identity()),
            transport=transport,
            min_size=1,
        )

    run = Run(make, workers, SHAPES)
    # Keras' momentum holds the rate inside, so they agree where it is constant.
    check_against_keras(run, keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True))
    constant = [0.05] * STEPS
    run.rates = constant
    rule = reference.DistEF(lambda v: v, workers, SPLITS[-1], 0.9)
    run.follows(lambda step, g, x, rate: rule.update(g, x, rate), atol=1e-5)


def check_against_keras(run, optimizer):
    variables = make_variables(SHAPES)
    for step in range(STEPS):
        mean = run.gradients[step].astype(np.float64).mean(0)
        parts = split(mean.astype(np.float32), SHAPES)
        optimizer.apply([tf.constant(part) for part in parts], variables)
        np.testing.assert_allclose(
            run.weights[step],
            flat([v.numpy() for v in variables]),
            rtol=0,
            atol=2e-6 * (step + 1),
        )


def test_nothing_moves_in_a_step_without_a_rate():
    run = Run(
        lambda transport: tfgradcomp.DistEFBlockSGDM(
            sgd(), transport=transport, min_size=1
        ),
        2,
        SHAPES,
        watch=["compressed.worker.residual", "compressed.server.residual"],
    )
    still = [step for step, rate in enumerate(RATES) if rate == 0]
    assert len(still) == 3
    for step in still:
        assert bits(run.weights[step]) == bits(run.weights[step - 1])
        assert bits(run.watched[step]) == bits(run.watched[step - 1])


def squares_left(ranked, number):
    """The sum of squares that is left once some of the largest have paid.

    Args:
        ranked: What each element owes, the largest first.
        number: How many pay; each pays what the last of them owes.
    """
    paid = ranked[:number] - ranked[number - 1]
    return np.square(paid).sum() + np.square(ranked[number:]).sum()


class Late:
    """Variance-based compression, Strom's and the hybrid: N workers and their mean."""

    def __init__(self, run, shapes, threshold=None, alpha=None, zeta=None):
        self.run, self.shapes = run, shapes
        self.threshold, self.alpha, self.zeta = threshold, alpha, zeta
        self.r, self.v, self.sent = 0.0, 0.0, []

    def __call__(self, step, gradients, weights, rate):
        r = self.r + gradients
        v = 0.0 if self.alpha is None else self.v + self.run.moments[step]
        where = np.ones(r.shape, bool) if self.alpha is None else r**2 > self.alpha * v
        if self.threshold is None:
            blocks = reference.blocks(parts_of(self.shapes, 0)[1])
            pairs = zip(r, where, strict=True)
            values = np.array([self.powers(*pair, blocks) for pair in pairs])
            left = np.where(values != 0, 0, r), np.where(values != 0, 0, v)
        else:
            t = self.threshold
            if t == "auto":
                pairs = zip(r, where, strict=True)
                t = np.array([self.thresholds(*pair) for pair in pairs])
            where &= np.abs(r) > t
            values = np.where(where, np.sign(r) * t, 0)
            less = v - 2 * np.abs(r) * t + t**2
            left = r - values, np.where(where, np.maximum(less, 0), v)
        self.sent.append(np.count_nonzero(values, axis=1))
        if rate:
            self.r, self.v = left[0], left[1] * (self.zeta or 0)
        return values.mean(0)

    def thresholds(self, r, where):
        """Just below the k-th largest of a tensor's |r|; nothing exceeds a billion.

        Strom's k is that of one in 32, the hybrid's leaves least of the squares.
        """
        t = np.full(r.shape, 1e9)
        for block in reference.blocks(parts_of(self.shapes, 0)[1]):
            size = np.abs(r[block])
            ranked = -np.sort(-size[where[block] & (size != 0)])
            if not len(ranked):
                continue
            k = -(-len(ranked) // 32)
            if self.alpha is not None:
                number = range(1, min(len(ranked), -(-len(size) // 4)) + 1)
                k = min(number, key=lambda n: squares_left(ranked, n))
            t[block] = np.nextafter(np.float32(ranked[k - 1]), np.float32(0))
        return t

    @staticmethod
    def powers(r, where, blocks):
        """The nearer power of two, 2^-7 to 1 times the block's highest."""
        values = np.zeros(len(r))
        for block in blocks:
            chosen = np.flatnonzero(where[block]) + block.start
            if not len(chosen):
                continue
            size = np.abs(r[chosen])
            highest = 2 ** np.floor(np.log2(size.max()))
            low = 2 ** np.floor(np.log2(size))
            near = np.minimum(np.where(size < 1.5 * low, low, 2 * low), highest)
            near[near < highest / 128] = 0
            values[chosen] = np.sign(r[chosen]) * near
        return values


@python_ops
@pytest.mark.parametrize(
    ("method", "workers", "coding", "threshold"),
    [
        ("VarianceBased", 2, "delta", None),
        ("VarianceBased", 4, "fixed", None),
        ("Strom", 1, "fixed", 1.5),
        ("Strom", 3, "delta", 1.5),
        ("Strom", 3, "fixed", "auto"),
        ("Hybrid", 3, "fixed", 1.5),
        ("Hybrid", 2, "delta", 1.5),
        ("Hybrid", 2, "delta", "auto"),
    ],
)
def test_what_is_late(method, workers, coding, threshold):
    arguments = {
        "VarianceBased": {"alpha": 1.2, "zeta": 0.9},
        "Strom": {"threshold": threshold},
        "Hybrid": {"threshold": threshold, "alpha": 1.2, "zeta": 0.9},
    }[method]
    run = Run(
        lambda transport: getattr(tfgradcomp, method)(
            sgd(momentum=0.5), transport=transport, index_coding=coding, **arguments
        ),
        workers,
        SHAPES,
        moments=method != "Strom",
    )
    rule = Late(run, SHAPES, **arguments)
    run.follows(rule, momentum=0.5, atol=1e-5)
    means = np.mean(rule.sent, 0)
    assert (means > (1 if threshold == "auto" else 5)).all() and (means < 90).all()
    for rank, optimizer in enumerate(run.optimizers):
        assert optimizer.traffic.elements_sent == pytest.approx(means[rank])
        residual = named(optimizer, "compressed.worker.residual")
        np.testing.assert_allclose(residual, rule.r[rank], rtol=0, atol=1e-4)
