"""Twenty steps of N workers with different gradients, followed in NumPy.

The workers are threads, each with an optimizer and weights of its own. Gradients go
in as Keras hands them over: g / N for a worker's mean gradient g. The references hold
float64; TensorFlow's float32 differs from them by roundings, about 1e-7 of a weight a
step, and by nothing else.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests import reference
from tests.helpers import Rates, bits, flat, make_variables, named, split
from tfgradcomp.compressors import ErrorFeedback, Identity, NesterovMomentum
from tfgradcomp.servers import Recompress
from tfgradcomp.transports import DirectExchange, Loopback
from tfgradcomp.transports.all_gather import AllGather

# Four workers, and a model with plain parts, show nothing new of the operations.
pytestmark = pytest.mark.python_ops(workers=(2, 3), min_size=(1,))

STEPS = 20
SHAPES = [(7, 5), (33,), (1,), (2, 3, 5)]
SPLITS = [0, 35, 68, 69, 99]
# Two tensors are above the default `min_size`, with small ones around.
MIXED = [(5,), (40, 30), (1,), (8, 130), (30,)]
RATES = [0.1, 0.1, 0.05, 0.05, 0.0, 0.05, 0.2, 0.2, 0.0, 0.0, 0.02, 0.04]
RATES += [0.1, 0.3, 0.3, 0.1, 0.01, 0.01, 0.02, 0.05]
SEED = 0x123456789ABCDE4


class Run:
    """What N workers did.

    Attributes:
        gradients: Mean gradients `[steps, N, size]` as the workers see them.
        start: Weights before the first step.
        weights: Weights after each step, `[steps, size]`, the same on all workers.
        optimizers: One a worker, as the last step left them.
        moments: Second moments of the gradients, in their units; None where the
            method needs none.
        watched: After each step, what each worker has in the variables of `watch`.
    """

    def __init__(
        self,
        make,
        workers,
        shapes,
        transport=AllGather,
        rates=RATES,
        watch=(),
        moments=False,
    ):
        rng = np.random.default_rng([workers, len(shapes)])
        size = sum(int(np.prod(shape)) for shape in shapes)
        wanted = rng.normal(size=(len(rates), workers, size)).astype(np.float32)
        wanted += rng.normal(size=size).astype(np.float32)
        # Dead units: zero at times, and everywhere; of both signs.
        wanted[rng.random(wanted.shape) < 0.1] = 0.0
        wanted[:, :, 3::11], wanted[:, :, 4::33] = 0.0, -0.0
        shares = wanted / np.float32(workers)
        self.gradients = shares * np.float32(workers)
        self.start = flat([v.numpy() for v in make_variables(shapes)])
        self.rates = rates
        self.moments, squares = None, None
        if moments:
            # Some terms agree, others cancel.
            spread = np.exp(rng.normal(size=wanted.shape) - 1).astype(np.float32)
            squares = shares**2 * spread + np.float32(1e-3)
            self.moments = squares * np.float32(workers) ** 2

        def worker(rank, collectives):
            variables = make_variables(shapes)
            optimizer = make(transport=transport(collectives))
            weights, watched = [], []
            for step in range(len(rates)):
                parts = [tf.constant(p) for p in split(shares[step, rank], shapes)]
                given = {}
                if moments:
                    given["second_moments"] = split(squares[step, rank], shapes)
                optimizer.apply(parts, variables, **given)
                weights.append(flat([v.numpy() for v in variables]))
                watched.append([named(optimizer, name) for name in watch])
            return np.stack(weights), optimizer, watched

        results = Loopback(workers, timeout=60).run(worker)
        self.weights = results[0][0]
        for step in range(len(rates)):
            assert len({bits(weights[step]) for weights, _, _ in results}) == 1, step
        self.optimizers = [optimizer for _, optimizer, _ in results]
        self.watched = [
            [watched[step] for _, _, watched in results] for step in range(len(rates))
        ]

    def follows(self, update_of, momentum=0.0, atol=2e-6):
        """Checks the weights against x += momentum * v - rate * update."""
        x, v = self.start.astype(np.float64), np.zeros(len(self.start))
        for step, rate in enumerate(self.rates):
            rate = float(np.float32(rate))
            update = update_of(
                step, self.gradients[step].astype(np.float64), x.copy(), rate
            )
            v = momentum * v - rate * update
            x = x + v
            np.testing.assert_allclose(
                self.weights[step], x, rtol=0, atol=atol * (step + 1), err_msg=str(step)
            )


def parts_of(shapes, min_size):
    """Positions in the flat vector that are compressed, their splits, and the rest."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    sizes = np.diff([0, *ends])
    which = np.repeat(sizes >= min_size, sizes)
    splits = np.cumsum([0, *sizes[sizes >= min_size]])
    return np.flatnonzero(which), splits.tolist(), np.flatnonzero(~which)


def in_parts(shapes, min_size, of_compressed, of_plain):
    """An update made of those of two parts of the vector."""
    compressed, _, plain = parts_of(shapes, min_size)

    def update_of(step, gradients, weights, rate):
        update = np.zeros(len(weights))
        for part, rule in ((compressed, of_compressed), (plain, of_plain)):
            if len(part):
                update[part] = rule(step, gradients[:, part], weights[part], rate)
        return update

    return update_of


MODELS = {
    "compressed": (SHAPES, {"min_size": 1}, 1),
    "some plain": (MIXED, {}, 1024),
}
every_model = pytest.mark.parametrize(
    ("shapes", "size_argument", "min_size"), MODELS.values(), ids=MODELS
)


def sgd(momentum=0.0):
    return keras.optimizers.SGD(Rates(RATES), momentum=momentum)


class SignRule:
    """signSGD and Signum, of one part of the vector."""

    def __init__(self, tie, aggregate, beta=0.0, warmup=0, is_plain=False):
        self.tie, self.aggregate, self.beta = tie, aggregate, beta
        self.warmup, self.is_plain, self.m = warmup, is_plain, 0.0

    def __call__(self, step, gradients, weights, rate):
        self.m = self.beta * self.m + (1 - self.beta) * gradients
        sent = gradients if step < self.warmup else self.m
        if self.is_plain:
            mean = sent.mean(0)
            # Exact zeros stay zeros; nothing else is small enough to become one.
            assert not ((mean != 0) & (np.abs(mean) < 1e-8)).any()
            return np.sign(mean)
        signs = np.stack([reference.sign(row, SEED, step) for row in sent])
        if self.aggregate == "sum":
            return signs.mean(0)
        return reference.vote(signs, self.tie, SEED, step)


@every_model
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(
    ("tie", "aggregate"), [("zero", "vote"), ("random", "vote"), ("zero", "sum")]
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


@every_model
@pytest.mark.parametrize(("workers", "warmup"), [(2, 0), (3, 7), (4, 7)])
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


@every_model
@pytest.mark.parametrize(
    ("workers", "name"),
    [(2, "scaled_sign"), (3, "scaled_sign"), (4, "scaled_sign")]
    + [(3, "top_k"), (2, "identity"), (2, "bingrad")],
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


@every_model
@pytest.mark.parametrize(
    ("workers", "block_size"), [(2, None), (3, None), (4, None), (3, 40)]
)
@pytest.mark.parametrize("transport", [AllGather, DirectExchange])
def test_dist_ef_block_sgd(
    workers, block_size, transport, shapes, size_argument, min_size
):
    run = Run(
        lambda transport: tfgradcomp.DistEFBlockSGD(
            sgd(), block_size=block_size, transport=transport, **size_argument
        ),
        workers,
        shapes,
        transport,
    )

    def compress(v, splits):
        if block_size:
            splits = [*range(0, len(v), block_size), len(v)]
        return reference.scaled_sign(v, splits)

    run.follows(dist_ef_rules(workers, shapes, min_size, compress), atol=1e-5)


@every_model
@pytest.mark.parametrize(
    ("workers", "decay"), [(2, None), (3, None), (4, None), (2, 0.1), (3, 0.1)]
)
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


@every_model
@pytest.mark.parametrize(
    ("workers", "arguments"),
    [
        (2, {}),
        (3, {}),
        (4, {}),
        (3, {"block_size": 16}),
        (2, {"clip_factor": None}),
        (3, {"share_scaler": False, "clip_factor": 1.0}),
    ],
    ids=str,
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


@every_model
@pytest.mark.parametrize(
    ("workers", "name", "block_size", "arguments"),
    [
        (2, "ORQ", 16, {}),
        (3, "ORQ", 40, {"reply": "requantize"}),
        (2, "ORQ", None, {"clip_factor": 1.7}),
        (3, "ORQ", 16, {"error_feedback": True, "reply": "requantize"}),
        (2, "BinGrad", 16, {"reply": "requantize"}),
        (3, "BinGrad", 40, {"clip_factor": 2.5, "variant": "b"}),
        (4, "BinGrad", 16, {"variant": "b", "reply": "requantize"}),
        (2, "BinGrad", None, {"variant": "b", "error_feedback": True}),
        (3, "QSGD", 16, {}),
        (2, "QSGD", None, {"reply": "requantize"}),
        (2, "QSGD", 40, {"norm": "max", "levels": 9, "error_feedback": True}),
        (2, "LinearQuantization", 16, {"reply": "requantize"}),
        (3, "ScaledSign", 16, {"reply": "requantize"}),
        (2, "ScaledSign", None, {"error_feedback": True}),
    ],
    ids=str,
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

    def compress(v, step, rank):
        if "clip_factor" in own and rank >= 0:
            v = reference.clip(v, splits, own["clip_factor"])
        if name == "ScaledSign":
            return reference.scaled_sign(v, splits)
        if own.get("variant") == "b":
            return reference.bingrad_b(v, splits)
        coins = reference.uniform(len(v), SEED, step, rank)
        return reference.quantize(v, splits, levels, coins)

    feeds_back = "error_feedback" in own
    requantizes = "reply" in own
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


def half(values, dtype):
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float64)
    # bfloat16 is the upper half of a float32, rounded to nearest, ties to even.
    words = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    words += 0x7FFF + (words >> np.uint64(16) & np.uint64(1))
    words &= np.uint64(0xFFFF0000)
    return words.astype(np.uint32).view(np.float32).astype(np.float64)


@every_model
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("workers", [2, 3])
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


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("rates", [RATES, [0.0, 0.0, 0.1, 0.3, 0.0, 0.1]])
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


@pytest.mark.parametrize("workers", [2, 3])
def test_the_identity_is_plain_sgd_on_the_mean_gradient(workers):
    run = Run(
        lambda transport: tfgradcomp.DistEFSGD(
            sgd(), compressor="identity", transport=transport, min_size=1
        ),
        workers,
        SHAPES,
    )
    check_against_keras(run, sgd())


@pytest.mark.parametrize("workers", [2, 3])
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
            where &= np.abs(r) > self.threshold
            values = np.where(where, np.sign(r) * self.threshold, 0)
            less = v - 2 * np.abs(r) * self.threshold + self.threshold**2
            left = r - values, np.where(where, np.maximum(less, 0), v)
        self.sent.append(np.count_nonzero(values, axis=1))
        if rate:
            self.r, self.v = left[0], left[1] * (self.zeta or 0)
        return values.mean(0)

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


@pytest.mark.parametrize(
    ("workers", "coding"), [(1, "fixed"), (2, "delta"), (3, "fixed"), (4, "delta")]
)
@pytest.mark.parametrize("method", ["VarianceBased", "Strom", "Hybrid"])
def test_what_is_late(method, workers, coding):
    arguments = {
        "VarianceBased": {"alpha": 1.2, "zeta": 0.9},
        "Strom": {"threshold": 1.5},
        "Hybrid": {"threshold": 1.5, "alpha": 1.2, "zeta": 0.9},
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
    assert (means > 5).all() and (means < 90).all()
    for rank, optimizer in enumerate(run.optimizers):
        assert optimizer.traffic.elements_sent == pytest.approx(means[rank])
        residual = named(optimizer, "compressed.worker.residual")
        np.testing.assert_allclose(residual, rule.r[rank], rtol=0, atol=1e-4)
