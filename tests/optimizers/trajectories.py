"""A dozen steps of N workers with different gradients, followed in NumPy.

The workers are threads, each with an optimizer and weights of its own. Gradients go
in as Keras hands them over: g / N for a worker's mean gradient g. The references hold
float64; TensorFlow's float32 differs from them by roundings, about 1e-7 of a weight a
step, and by nothing else.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import Rates, bits, flat, make_variables, named, split
from tfgradcomp.transports import Loopback
from tfgradcomp.transports.all_gather import AllGather

STEPS = 12
SHAPES = [(7, 5), (33,), (1,), (2, 3, 5)]
SPLITS = [0, 35, 68, 69, 99]
# Two tensors are above the default `min_size`, with small ones around.
MIXED = [(5,), (40, 30), (1,), (8, 130), (30,)]
RATES = [0.1, 0.1, 0.05, 0.05, 0.0, 0.05, 0.2, 0.2, 0.0, 0.0, 0.02, 0.04]
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


def on_models(names, compressed, some_plain):
    """Returns a decorator that runs a test on two models.

    Args:
        names: Names of the test's arguments, besides those of a model; the number of
            workers first. Four show little that two and three do not: they are slow.
        compressed: Values of them for the model that is compressed as a whole.
        some_plain: Those for the model with plain parts, which all methods leave to
            the same code: a few are enough.
    """
    cases = {"compressed": compressed, "some plain": some_plain}
    return pytest.mark.parametrize(
        ("shapes", "size_argument", "min_size", *names.split(", ")),
        [
            pytest.param(
                *MODELS[model],
                *case,
                id=f"{model}-{case}",
                marks=[pytest.mark.slow] if case[0] == 4 else [],
            )
            for model, several in cases.items()
            for case in several
        ],
    )


def sgd(momentum=0.0):
    return keras.optimizers.SGD(Rates(RATES), momentum=momentum)
