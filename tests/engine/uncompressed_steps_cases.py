"""Steps as float32 in `fit`, with accumulation and several steps an execution."""

import hashlib

import keras
import numpy as np

import tfgradcomp
from tests.cluster import strategy_and_rank


def train(transport):
    """Returns a digest of the weights, and what is owed after each of three fits.

    The fits take 11 steps, the 12th and the 13th.
    """
    strategy, rank = strategy_and_rank()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(300), keras.layers.Dense(2)]
        )
        inner = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
        optimizer = tfgradcomp.DistEFBlockSGD(
            inner,
            min_size=100,
            transport=transport,
            bucket_bytes=2000,
            warmup_steps=3,
            dense_every=4,
        )
        model.compile(optimizer, "mse", steps_per_execution=2)
    rng = np.random.default_rng(rank)
    x, y = rng.normal(size=(144, 8)), rng.normal(size=(144, 2))
    owed = []
    for batches in (22, 2, 2):
        rows = 6 * batches
        model.fit(x[:rows], y[:rows], batch_size=6, shuffle=False, verbose=0)
        residuals = [v for v in optimizer.variables if "residual" in v.name]
        owed.append(np.concatenate([v.numpy().ravel() for v in residuals]))
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return hashlib.sha256(weights).hexdigest(), owed
