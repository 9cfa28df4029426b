"""A training on several workers whose threshold is too low, or finds itself."""

import keras
import numpy as np

import tfgradcomp
from tests.cluster import strategy_and_rank


def train(threshold):
    """Trains for two epochs by `Hybrid`."""
    strategy, rank = strategy_and_rank()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(40)])
        inner = keras.optimizers.SGD(1e-3)
        model.compile(
            tfgradcomp.Hybrid(inner, threshold=threshold, transport="all_gather"),
            "mse",
        )
    rng = np.random.default_rng(rank)
    x, y = rng.normal(size=(96, 8)) + 1, rng.normal(size=(96, 40)) + 3
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
