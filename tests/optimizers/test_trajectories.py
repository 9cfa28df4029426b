"""Every method beside NumPy, step by step: signs, error feedback and codes."""

import statistics

import numpy as np
import pytest

import tfgradcomp
from tests import reference
from tests.optimizers.trajectories import (
    RATES,
    SEED,
    SHAPES,
    Run,
    in_parts,
    on_models,
    parts_of,
    sgd,
)

# Of the operations, a model with plain parts and other numbers of workers show nothing
# new; tests/ops compares both kinds of them bit for bit.
python_ops = pytest.mark.python_ops(workers=(3,), min_size=(1,))


class SignRule:
    """signSGD and Signum, of one part of the vector."""

    def __init__(self, tie, aggregate, beta=0.0, warmup=0, is_plain=False):
        self.tie, self.aggregate, self.beta = tie, aggregate, beta
        self.warmup, self.is_plain, self.m = warmup, is_plain, 0.0

    def __call__(self, step, gradients, weights, rate):
        self.m = self.beta * self.m + (1 - self.beta) * gradients
        sent = gradients if step < self.warmup else self.m
        if self.is_plain and self.aggregate == "mean":
            return np.sign(sent).mean(0)
        if self.is_plain:
            mean = sent.mean(0)
            # Exact zeros stay zeros; nothing else is small enough to become one.
            assert not ((mean != 0) & (np.abs(mean) < 1e-8)).any()
            return np.sign(mean)
        signs = np.stack([reference.sign(row, SEED, step) for row in sent])
        if self.aggregate == "mean":
            return signs.mean(0)
        return reference.vote(signs, self.tie, SEED, step)


@python_ops
@on_models(
    "workers, tie, aggregate",
    [
        (2, "zero", "vote"),
        (2, "random", "vote"),
        (3, "zero", "vote"),
        (3, "zero", "mean"),
        (4, "random", "vote"),
    ],
    [(2, "zero", "mean"), (3, "random", "vote"), (4, "zero", "vote")],
)
def test_signsgd(workers, tie, aggregate, shapes, size_argument, min_size):
    run = Run(
        lambda transport: tfgradcomp.SignSGD(
            sgd(),
            aggregate=aggregate,
            tie=tie,
            seed=SEED,
            transport=transport,
            **size_argument,
        ),
        workers,
        shapes,
    )
    rules = [SignRule(tie, aggregate, is_plain=plain) for plain in (False, True)]
    run.follows(in_parts(shapes, min_size, *rules))


@python_ops
@on_models("workers, warmup", [(2, 0), (3, 7), (4, 7)], [(2, 0), (3, 7)])
def test_signum(workers, warmup, shapes, size_argument, min_size):
    run = Run(
        lambda transport: tfgradcomp.Signum(
            sgd(),
            momentum=0.8,
            warmup_steps=warmup,
            tie="random",
            seed=SEED,
            transport=transport,
            **size_argument,
        ),
        workers,
        shapes,
    )
    rules = [SignRule("random", "vote", 0.8, warmup, plain) for plain in (False, True)]
    run.follows(in_parts(shapes, min_size, *rules))


def normal(count, step, stream):
    """The sum of two quantiles over sqrt 2, by the halves of a shared random word."""
    words = reference.random_bits(count, SEED, step, None, stream).astype(np.int64)
    halves = (np.concatenate([words % 2**16, words // 2**16]) + 0.5) / 2**16
    quantile = statistics.NormalDist().inv_cdf
    low, high = np.split(np.array([quantile(half) for half in halves]), 2)
    return (low + high) / np.sqrt(2)


@on_models("workers, wrapper", [(2, "SignSGD"), (3, "Signum")], [(2, "Signum")])
def test_shared_noise(workers, wrapper, shapes, size_argument, min_size):
    run = Run(
        lambda transport: getattr(tfgradcomp, wrapper)(
            sgd(), noise_std=0.25, seed=SEED, transport=transport, **size_argument
        ),
        workers,
        shapes,
        rates=RATES[:8],
    )
    beta = 0.9 if wrapper == "Signum" else 0.0
    rules = [SignRule("zero", "vote", beta, is_plain=plain) for plain in (False, True)]

    def noisy(rule, stream):
        def update_of(step, gradients, weights, rate):
            vote = rule(step, gradients, weights, rate)
            return vote + 0.25 * normal(len(vote), step, stream)

        return update_of

    run.follows(in_parts(shapes, min_size, noisy(rules[0], 3), noisy(rules[1], 4)))


def dist_ef_rules(workers, shapes, min_size, compress, momentum=None, decay=0.0):
    compressed, splits, plain = parts_of(shapes, min_size)
    first = reference.DistEF(
        lambda v: compress(v, splits), workers, len(compressed), momentum, decay
    )
    second = reference.DistEF(lambda v: v, workers, len(plain), momentum, decay)
    return in_parts(
        shapes,
        min_size,
        *[
            lambda step, g, x, rate, rule=rule: rule.update(g, x, rate)
            for rule in (first, second)
        ],
    )


RULES = {
    "bingrad": lambda v, splits: reference.bingrad_b(v, [0, len(v)]),
    "scaled_sign": lambda v, splits: reference.scaled_sign(v, [0, len(v)]),
    "top_k": lambda v, splits: reference.top_k(v, 0.01),
    "identity": lambda v, splits: v,
}


@python_ops
@on_models(
    "workers, name",
    [(2, "scaled_sign"), (3, "scaled_sign"), (4, "scaled_sign")]
    + [(3, "top_k"), (2, "identity"), (2, "bingrad")],
    [(2, "scaled_sign"), (3, "identity")],
)
def test_dist_ef_sgd(workers, name, shapes, size_argument, min_size):
    run = Run(
        lambda transport: tfgradcomp.DistEFSGD(
            sgd(), compressor=name, transport=transport, **size_argument
        ),
        workers,
        shapes,
    )
    run.follows(dist_ef_rules(workers, shapes, min_size, RULES[name]), atol=1e-5)


@python_ops
@on_models(
    "workers, block_size",
    [(2, None), (3, None), (4, None), (3, 40)],
    [(2, None), (3, 40)],
)
def test_dist_ef_block_sgd(workers, block_size, shapes, size_argument, min_size):
    run = Run(
        lambda transport: tfgradcomp.DistEFBlockSGD(
            sgd(), block_size=block_size, transport=transport, **size_argument
        ),
        workers,
        shapes,
    )

    def compress(v, splits):
        if block_size:
            splits = [*range(0, len(v), block_size), len(v)]
        return reference.scaled_sign(v, splits)

    run.follows(dist_ef_rules(workers, shapes, min_size, compress), atol=1e-5)


@python_ops
@on_models("workers, decay", [(2, None), (3, 0.1), (4, None)], [(2, 0.1), (3, None)])
def test_dist_ef_block_sgdm(workers, decay, shapes, size_argument, min_size):
    run = Run(
        lambda transport: tfgradcomp.DistEFBlockSGDM(
            sgd(), 0.7, weight_decay=decay, transport=transport, **size_argument
        ),
        workers,
        shapes,
    )
    run.follows(
        dist_ef_rules(
            workers, shapes, min_size, reference.scaled_sign, 0.7, decay or 0.0
        ),
        atol=1e-5,
    )


def test_dist_ef_sgd_in_buckets():
    run = Run(
        lambda transport: tfgradcomp.DistEFSGD(
            sgd(), "bingrad", block_size=40, transport=transport, min_size=1
        ),
        3,
        SHAPES,
    )
    rules = dist_ef_rules(
        3, SHAPES, 1, lambda v, splits: reference.bingrad_b(v, [0, 40, 80, 99])
    )
    run.follows(rules, atol=1e-5)


@pytest.mark.parametrize("workers", [2, 3])
def test_dist_ef_sgd_with_an_unbiased_compressor(workers):
    run = Run(
        lambda transport: tfgradcomp.DistEFSGD(
            sgd(), "ternary", block_size=40, seed=SEED, transport=transport, min_size=1
        ),
        workers,
        SHAPES,
        rates=RATES[:8],
    )
    splits = [0, 40, 80, 99]

    class OptimalScale(reference.Quantized):
        """Ternary codes of a scale that workers share, times the factor that fits."""

        def compress_all(self, rows, step):
            scales = np.stack([reference.largest(v, splits) for v in rows])
            if len(rows) > 1:
                scales[:] = scales.max(0)
            ranks = range(workers) if len(rows) > 1 else [-1]
            return np.stack(
                [
                    reference.fitted(
                        reference.ternary_codes(v, s, splits, SEED, step, rank)
                        * reference.spread(s, splits),
                        v,
                        splits,
                    )
                    for v, s, rank in zip(rows, scales, ranks, strict=True)
                ]
            )

    run.follows(OptimalScale(None, requantizes=True, feeds_back=True), atol=2e-5)


def test_dist_ef_weight_decay_without_momentum():
    for wrapper in (tfgradcomp.DistEFSGD, tfgradcomp.DistEFBlockSGD):
        run = Run(
            lambda transport, wrapper=wrapper: wrapper(
                sgd(), weight_decay=0.1, transport=transport, min_size=1
            ),
            2,
            SHAPES,
        )

        def compress(v, splits, wrapper=wrapper):
            whole = wrapper is tfgradcomp.DistEFSGD
            return reference.scaled_sign(v, [0, len(v)] if whole else splits)

        run.follows(dist_ef_rules(2, SHAPES, 1, compress, decay=0.1), atol=1e-5)


@python_ops
@on_models(
    "workers, arguments",
    [
        (2, {}),
        (3, {}),
        (4, {}),
        (3, {"block_size": 16}),
        (2, {"clip_factor": None}),
        (3, {"share_scaler": False, "clip_factor": 1.0}),
    ],
    [(2, {}), (3, {"block_size": 16})],
)
def test_terngrad(workers, arguments, shapes, size_argument, min_size):
    run = Run(
        lambda transport: tfgradcomp.TernGrad(
            sgd(momentum=0.6),
            seed=SEED,
            transport=transport,
            **arguments,
            **size_argument,
        ),
        workers,
        shapes,
    )
    compressed, splits, _ = parts_of(shapes, min_size)
    if "block_size" in arguments:
        step = arguments["block_size"]
        splits = [*range(0, len(compressed), step), len(compressed)]
    factor = arguments.get("clip_factor", 2.5)

    def ternary(step, gradients, weights, rate):
        if factor:
            gradients = np.stack([reference.clip(g, splits, factor) for g in gradients])
        scales = np.stack([reference.largest(g, splits) for g in gradients])
        if arguments.get("share_scaler", True):
            scales[:] = scales.max(0)
        decoded = [
            reference.ternary_codes(g, s, splits, SEED, step, rank)
            * reference.spread(s, splits)
            for rank, (g, s) in enumerate(zip(gradients, scales, strict=True))
        ]
        return np.mean(decoded, 0)

    def mean(step, gradients, weights, rate):
        return gradients.mean(0)

    run.follows(in_parts(shapes, min_size, ternary, mean), momentum=0.6, atol=1e-5)
