"""Local steps on real workers, each with gradients of its own."""

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tfgradcomp.compressors import Identity
from tfgradcomp.servers import Mean

SGD = keras.optimizers.SGD
SHAPES = {"kernel": (5, 4), "bias": (4,)}
# Three groups of a size, the second one of two variables.
GROUPED = {"wide": (3, 4), "bias": (4,), "kernel": (2, 4), "last": (12,)}


def identity(rate=1.0):
    """An outer optimizer that loses nothing."""
    parts = Identity(), Mean(Identity())
    return tfgradcomp.CompressedOptimizer(
        SGD(rate), *parts, transport="all_gather", min_size=0, nonfinite="skip"
    )


def dist_ef(rate=0.7):
    """An outer optimizer of one bit, with all of its state."""
    return tfgradcomp.DistEFBlockSGDM(SGD(rate), transport="all_gather", min_size=0)


INNER = {"sgd": lambda: SGD(0.125), "adam": lambda: keras.optimizers.Adam(0.05)}
OUTER = {"identity": identity, "dist_ef": dist_ef}


def gradients_of(steps, workers, shapes=SHAPES):
    """Gradients by steps, workers and variables; eighths, which add up exactly."""
    rng = np.random.default_rng([steps, workers])
    return [
        [
            [rng.integers(-8, 9, shape).astype("float32") for shape in shapes.values()]
            for _ in range(workers)
        ]
        for _ in range(steps)
    ]


def start(shapes=SHAPES):
    rng = np.random.default_rng(1)
    return [rng.integers(-8, 9, shape) / 8 for shape in shapes.values()]


def run(inner, outer, every, steps, spoiled=None, ends=True, shapes=SHAPES, **options):
    """The weights of this worker's replicas after each step, and what is counted.

    Args:
        inner: Key of `INNER`.
        outer: Key of `OUTER`.
        every: H.
        steps: Number of steps.
        spoiled: A step and a rank that has a NaN then.
        ends: Whether `synchronize` comes last.
        shapes: Those of the variables.
        options: Further arguments of the optimizer.
    """
    strategy, _ = strategy_and_rank()
    number = strategy.num_replicas_in_sync
    with strategy.scope():
        weights = [
            keras.Variable(value.astype("float32"), name=name)
            for name, value in zip(shapes, start(shapes), strict=True)
        ]
        optimizer = tfgradcomp.LocalSteps(
            INNER[inner](), OUTER[outer](), every, **options
        )
        optimizer.build(weights)

    @tf.function
    def step(gradients):
        strategy.run(
            lambda g: optimizer.apply_gradients(zip(g, weights, strict=True)),
            args=(gradients,),
        )

    def values():
        results = strategy.experimental_local_results
        return [[one.numpy() for one in results(w.value)] for w in weights]

    seen = []
    for index, workers in enumerate(gradients_of(steps, number, shapes)):

        def own(context, index=index, workers=workers):
            rank = context.replica_id_in_sync_group
            factor = np.nan if spoiled == (index, rank) else 1.0
            return [tf.constant(g * factor / number, tf.float32) for g in workers[rank]]

        step(strategy.experimental_distribute_values_from_function(own))
        seen.append(values())
    if ends:
        optimizer.synchronize()
        optimizer.verify()
        seen.append(values())
    exchanges = int(optimizer.outer.iterations.numpy())
    return seen, optimizer.skipped_steps, exchanges, optimizer.local_steps


def runs(cases):
    """Runs several cases in one call."""
    return [run(**case) for case in cases]


def error_of_different_arguments():
    """The sentence that a worker gets where H is its rank plus one."""
    strategy, rank = strategy_and_rank()
    with strategy.scope():
        weights = [keras.Variable(value) for value in start()]
        optimizer = tfgradcomp.LocalSteps("sgd", identity(), every=1 + rank)
        optimizer.build(weights)
    try:
        strategy.run(lambda: optimizer.apply([tf.zeros_like(w) for w in weights]))
    except ValueError as error:
        return str(error)
    return ""
