"""Strategies of different sizes that take turns in one process."""

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank


def take_turns():
    """Trains a model under each strategy in turn; returns the replicas' weights."""
    strategy_and_rank()
    three = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    others = tf.distribute.MirroredStrategy(["CPU:1", "CPU:2"])
    models = []
    for strategy in (three, two, others):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
            optimizer = tfgradcomp.TernGrad(
                keras.optimizers.SGD(0.1), min_size=0, transport="all_gather"
            )
            model.compile(optimizer, "mse")
        models.append((strategy, model))
    x = np.random.default_rng(0).normal(size=(24, 6))
    for _ in range(2):
        for _, model in models:
            model.fit(x, x[:, :2], batch_size=6, shuffle=False, verbose=0)
    return [
        [
            replica.numpy()
            for replica in strategy.experimental_local_results(model.weights[0].value)
        ]
        for strategy, model in models
    ]
