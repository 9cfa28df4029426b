"""Runs of N workers with different gradients, and their comparison with NumPy.

The workers are threads, each with an optimizer and weights of its own. Gradients go
in as Keras hands them over: g / N for a worker's mean gradient g. The references hold
float64; TensorFlow's float32 differs from them by roundings, about 1e-7 of a weight a
step, and by nothing else.
"""

import keras
import numpy as np

from tests import reference
from tests.harness import Worker
from tests.helpers import Rates, bits, flat, make_variables, named
from tfgradcomp.transports import Loopback
from tfgradcomp.transports.all_gather import AllGather

SHAPES = [(7, 5), (33,), (1,), (2, 3, 5)]
SPLITS = [0, 35, 68, 69, 99]
# Two tensors are above the default `min_size`, with small ones around.
MIXED = [(5,), (40, 30), (1,), (8, 130), (30,)]
RATES = [0.1, 0.1, 0.05, 0.05, 0.0, 0.05, 0.2, 0.2, 0.0, 0.0, 0.02, 0.04]
SEED = 0x123456789ABCDE4


class Run:
    """The steps of N workers.

    Attributes:
        gradients: Mean gradients `[steps, N, size]` as the workers see them.
        start: Weights before the first step.
        weights: Weights after each step, `[steps, size]`, the same on all workers.
        optimizers: One a worker, as the last step left them.
        moments: Second moments of the gradients, in their units; None where the
            method needs none.
        watched: After each step, what each worker has in the variables of `watch`.

    Args:
        make: Function of `transport` that makes an optimizer.
        workers: N.
        shapes: Shapes of the variables.
        transport: Function from collectives to a transport.
        rates: Learning rates, for the number of steps.
        watch: Names of variables of the optimizer.
        moments: Whether the method needs second moments.
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
        self.moments, squares = None, [[None] * workers] * len(rates)
        if moments:
            # Some terms agree, others cancel.
            spread = np.exp(rng.normal(size=wanted.shape) - 1).astype(np.float32)
            squares = shares**2 * spread + np.float32(1e-3)
            self.moments = squares * np.float32(workers) ** 2

        def run(rank, collectives):
            worker = Worker(make(transport=transport(collectives)), shapes)
            weights, watched = [], []
            for step in range(len(rates)):
                worker.step(shares[step, rank], squares[step][rank])
                weights.append(worker.weights())
                watched.append([named(worker.optimizer, name) for name in watch])
            return np.stack(weights), worker.optimizer, watched

        results = Loopback(workers, timeout=60).run(run)
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
            gradients = self.gradients[step].astype(np.float64)
            v = momentum * v - rate * update_of(step, gradients, x.copy(), rate)
            x = x + v
            np.testing.assert_allclose(
                self.weights[step], x, rtol=0, atol=atol * (step + 1), err_msg=str(step)
            )


def reference_of(method, workers, shapes, min_size=1, block_size=None):
    """Returns the function of a step by which a method updates variables in NumPy.

    Args:
        method: The method.
        workers: N.
        shapes: Shapes of the variables.
        min_size: Elements from which on a variable is compressed.
        block_size: Elements a block, `"model"` for all, None for those of a variable.
    """
    sizes = np.array([int(np.prod(shape)) for shape in shapes])
    is_compressed = np.repeat(sizes >= min_size, sizes)
    splits = np.cumsum([0, *sizes[sizes >= min_size]]).tolist()
    if block_size:
        count = splits[-1] if block_size == "model" else block_size
        splits = [*range(0, splits[-1], count), splits[-1]]
    parts = [(is_compressed, reference.Workers(method, workers, splits, SEED))]
    if not is_compressed.all():
        whole = [0, np.count_nonzero(~is_compressed)]
        plain = reference.Workers(method, workers, whole, SEED, is_plain=True)
        parts.append((~is_compressed, plain))

    def update_of(step, gradients, weights, rate):
        update = np.zeros(len(weights))
        for where, rule in parts:
            given = gradients[:, where], weights[where]
            update[where] = rule.update(step, *given, rate)
        return update

    return update_of


def sgd(momentum=0.0):
    return keras.optimizers.SGD(Rates(RATES), momentum=momentum)
