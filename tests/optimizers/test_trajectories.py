"""Every method beside NumPy, step by step."""

import keras
import numpy as np
import pytest

import tfgradcomp
from tests import reference
from tests.helpers import Rates, bits, named
from tests.methods import ROWS, Row, halves_of, row
from tests.optimizers.trajectories import (
    MIXED,
    RATES,
    SEED,
    SHAPES,
    SPLITS,
    Run,
    reference_of,
    sgd,
)
from tests.pairwise import parametrize_pairwise
from tfgradcomp.compressors import (
    ORQ,
    QSGD,
    BinGrad,
    Clip,
    ErrorFeedback,
    Hybrid,
    Momentum,
    NesterovMomentum,
    OptimalScale,
    ScaledSign,
    Sign,
    Strom,
    Ternary,
    WeightDecay,
)
from tfgradcomp.methods import Method
from tfgradcomp.servers import CodeSum, MajorityVote, Mean, Recompress, Requantize

SIGNS = ErrorFeedback(ScaledSign())
# Arguments that meet in no row of the table of methods.
# fmt: off
OTHERS = [
    row("SignSGD, mean of signs", {"aggregate": "mean"}, Sign(), CodeSum(Sign()),
        kind="sign"),
    Row("SignSGD, noise", {"noise_std": 0.25},
        Method(Sign(), MajorityVote(), None, 0.25), kind="sign"),
    row("Signum, short warm-up", {"momentum": 0.8, "warmup_steps": 7},
        Momentum(Sign(), 0.8, 7), MajorityVote(), kind="sign", holds_momentum=True),
    row("DistEFSGD, weight decay", {"weight_decay": 0.1},
        SIGNS, Recompress(ScaledSign()), WeightDecay(0.1), kind="contracting"),
    row("DistEFSGD, BinGrad", {"compressor": "bingrad"},
        ErrorFeedback(BinGrad()), Recompress(BinGrad()), kind="contracting"),
    row("DistEFBlockSGDM, no decay", {"momentum": 0.7},
        NesterovMomentum(SIGNS, 0.7), Recompress(ScaledSign()),
        kind="contracting", holds_momentum=True),
    row("TernGrad, clipped own scales", {"clip_factor": 1.0, "share_scaler": False},
        Clip(Ternary(False), 1.0), Mean(Clip(Ternary(False), 1.0)), kind="unbiased"),
    row("ORQ, clipped with error feedback",
        {"levels": 5, "clip_factor": 1.7, "error_feedback": True},
        ErrorFeedback(OptimalScale(Clip(ORQ(5), 1.7))), Mean(OptimalScale(ORQ(5))),
        kind="unbiased"),
    row("BinGrad, clipped", {"clip_factor": 2.5},
        Clip(BinGrad(), 2.5), Mean(BinGrad()), kind="contracting"),
    row("QSGD, shared l2 norms", {"norm": "l2", "reply": "shared"},
        QSGD(9, "l2", True), CodeSum(QSGD(9, "l2", True)), kind="unbiased"),
    row("ScaledSign, requantized", {"reply": "requantize"},
        ScaledSign(), Requantize(ScaledSign()), kind="contracting"),
    row("Hybrid, auto", {"threshold": "auto", "alpha": 1.2, "zeta": 0.9},
        Hybrid("auto", 1.2, 0.9), Mean(Hybrid("auto", 1.2, 0.9)),
        kind="late", needs_second_moments=True),
    row("Hybrid, high threshold", {"threshold": 1.5, "alpha": 1.2, "zeta": 0.9},
        Hybrid(1.5, 1.2, 0.9), Mean(Hybrid(1.5, 1.2, 0.9)),
        kind="late", needs_second_moments=True),
    row("Strom, high threshold", {"threshold": 1.5}, Strom(1.5), Mean(Strom(1.5)),
        kind="late"),
]
# fmt: on
# Methods that know shapes have trajectories of their own (test_power_sgd.py, ...).
SHAPELESS = [
    row for row in (*ROWS.values(), *OTHERS) if not row.method.needs_whole_tensors
]
METHODS, SPARSE = (
    [row for row in SHAPELESS if (row.kind == "late") == is_late]
    for is_late in (False, True)
)
# All methods leave variables that are not compressed to the same code.
PLAIN = [*{row.method.uncompressed(): row for row in METHODS}.values()]


def follow(row, workers, block_size, shapes, min_size):
    """Compares a run with the row's method in NumPy."""
    blocks, momentum = {}, 0.0 if row.holds_momentum else 0.6
    if row.takes("block_size"):
        blocks["block_size"] = block_size = row.arguments.get("block_size", block_size)
    else:
        block_size = None
    if "chunk" in row.arguments:
        block_size = row.arguments["chunk"]
    if row.wrapper == "DistEFSGD":
        block_size = block_size or "model"

    def make(transport):
        given = {**blocks, "seed": SEED, "min_size": min_size}
        given["allow_inner_momentum"] = not row.holds_momentum
        return row.make(sgd(momentum), transport=transport, **given)

    run = Run(make, workers, shapes)
    assert halves_of(run.optimizers[0].method) == row.method
    rule = reference_of(row.method, workers, shapes, min_size, block_size)
    # What is random or fed back adds up.
    run.follows(
        rule, momentum, 1e-5 if row.kind in ("unbiased", "contracting") else 2e-6
    )


# Four workers show nothing that two and three do not; tests/ops compares both kinds of
# operations bit for bit.
@pytest.mark.sample(24, "auto-TernGrad")
@pytest.mark.python_ops(workers=(3,))
@pytest.mark.parametrize(
    ("row", "workers", "block_size"),
    [
        pytest.param(row, 2 + i % 2, (None, 16, 40)[i % 3], id=row.name)
        for i, row in enumerate(METHODS)
    ],
)
def test_methods_follow_numpy(row, workers, block_size):
    follow(row, workers, block_size, SHAPES, min_size=1)


@pytest.mark.sample(2, "[Signum")
@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.name)
def test_small_variables_follow_numpy(row):
    follow(row, 2 + len(row.name) % 2, 40, MIXED, min_size=1024)


@parametrize_pairwise(
    momentum=[None, 0.9],
    workers=[2, 3],
    rates={"many": RATES, "few": [0.0, 0.0, 0.1, 0.3, 0.0, 0.1]},
)
def test_residuals_complete_the_uncompressed_run(momentum, workers, rates):
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
        left = np.mean([own for own, _ in run.watched[step]], 0, np.float64)
        left += run.watched[step][0][1]
        # float32 roundings of p and x: 2**-24 of numbers below 100 times the rate,
        # and of weights below 10, a step.
        np.testing.assert_allclose(
            run.weights[step] - unit * left, z, rtol=0, atol=1e-5 * (step + 1) ** 0.5
        )
        servers = {bits(server) for _, server in run.watched[step]}
        assert len(servers) == 1
        workers_own = {bits(own) for own, _ in run.watched[step]}
        assert len(workers_own) == (workers if unit else 1)
        if rate == 0 and step:
            assert bits(run.weights[step]) == bits(run.weights[step - 1])
            assert bits(run.watched[step]) == bits(run.watched[step - 1])
    assert np.abs(unit * left).max() > 1e-3


@pytest.mark.sample(1)
@pytest.mark.python_ops(workers=(3,))
@pytest.mark.parametrize(
    ("row", "workers"),
    [pytest.param(row, 1 + i % 3, id=row.name) for i, row in enumerate(SPARSE)],
)
def test_sparse_methods_follow_numpy(row, workers):
    def make(transport):
        return row.make(sgd(momentum=0.5), transport=transport)

    run = Run(make, workers, SHAPES, moments=row.needs_second_moments)
    names = ("threshold", "alpha", "zeta")
    arguments = {name: getattr(row.compressor, name, None) for name in names}
    rule = reference.Late(run.moments, SPLITS, **arguments)
    run.follows(rule.update, momentum=0.5, atol=1e-5)
    means = np.mean(rule.sent, 0)
    least = 1 if arguments["threshold"] == "auto" else 5
    assert (means > least).all() and (means < 90).all()
    for rank, optimizer in enumerate(run.optimizers):
        assert optimizer.traffic.elements_sent == pytest.approx(means[rank])
        residual = named(optimizer, "compressed.worker.residual")
        np.testing.assert_allclose(residual, rule.r[rank], rtol=0, atol=1e-4)
