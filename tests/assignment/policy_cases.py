"""A policy in `fit`, in graphs, on real workers."""

import hashlib

import keras
import numpy as np

import tfgradcomp
from tests.cluster import strategy_and_rank


def by_width(variable):
    """Other methods for the wide layers, whose blocks are of one size."""
    methods = {
        300: tfgradcomp.QSGD.for_layers(block_size=64),
        200: tfgradcomp.DistEFBlockSGD.for_layers(block_size=128),
    }
    return methods.get(variable.shape[-1])


def train(transport):
    """Returns a digest of the weights after a fit, and the vectors that there were."""
    strategy, rank = strategy_and_rank()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), *(keras.layers.Dense(n) for n in (300, 200, 10))]
        )
        optimizer = tfgradcomp.TernGrad(
            keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
            block_size=32,
            exclude="norms_and_biases",
            policy=by_width,
            min_size=0,
            transport=transport,
        )
        model.compile(optimizer, "mse", steps_per_execution=2)

    rng = np.random.default_rng(rank)
    x, y = (rng.normal(size=(96, n)) for n in (8, 10))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    weights = b"".join(v.numpy().tobytes() for v in model.trainable_variables)
    vectors = sorted({bucket.vector for bucket in optimizer.stepper.buckets})
    return hashlib.sha256(weights).hexdigest(), vectors
