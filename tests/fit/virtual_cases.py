"""Trainings for the tests of virtual workers: in N processes, and in one."""

import hashlib

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.fit.fit_models import SGD, local_values, scope, sequential, strategy
from tfgradcomp.collectives import for_strategy
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable

random = np.random.default_rng(7)
X = random.normal(size=(97, 12, 12, 2)).astype("float32")
Y = random.normal(size=(97, 3)).astype("float32")


def arrays(model, **arguments):
    """Trains on arrays, with a last batch of another size."""
    workers = model.distribute_strategy.num_replicas_in_sync
    return model.fit(X, Y, batch_size=7 * workers, epochs=2, verbose=0, **arguments)


def dataset(model, size, shuffles=False, **arguments):
    """Trains on a dataset of batches of some size."""
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    data = data.shuffle(len(X)) if shuffles else data
    return model.fit(data.batch(size, **arguments), epochs=2, verbose=0)


def stock():
    """SGD without a wrapper, whose gradients the strategy adds up."""
    tfgradcomp.enable_multi_worker_fit()
    return SGD(0.02, momentum=0.9)


# An optimizer, and how the model is trained.
CASES = {
    "codes, batches that do not divide": (
        lambda: tfgradcomp.TernGrad(
            SGD(0.02, momentum=0.9), transport="all_gather", min_size=50
        ),
        lambda model: dataset(model, 20),
    ),
    "residuals in shards, shuffled arrays": (
        lambda: tfgradcomp.DistEFBlockSGDM(
            SGD(0.02), transport="sharded", min_size=50, weight_decay=1e-3
        ),
        lambda model: arrays(model, shuffle=True),
    ),
    "sums of numbers, sizes known to the graph": (
        lambda: tfgradcomp.HalfPrecision(
            SGD(0.02, momentum=0.9), transport="all_reduce", min_size=50
        ),
        lambda model: dataset(model, 21, drop_remainder=True),
    ),
    "random ties, a shuffled dataset": (
        lambda: tfgradcomp.SignSGD(
            SGD(1e-3), transport="all_gather", min_size=50, tie="random"
        ),
        lambda model: dataset(model, 15, shuffles=True),
    ),
    "sizes that vary, by second moments": (
        lambda: tfgradcomp.VarianceBased(SGD(0.02), min_size=50, alpha=1.0),
        lambda model: dataset(model, 20),
    ),
    "local steps with Adam, an exchange of residuals": (
        lambda: tfgradcomp.LocalSteps(
            keras.optimizers.Adam(1e-3),
            tfgradcomp.DistEFBlockSGD(SGD(0.9), transport="sharded", min_size=50),
            every=3,
        ),
        lambda model: dataset(model, 20),
    ),
    "0/1 Adam": (
        lambda: tfgradcomp.ZeroOneAdam(
            keras.optimizers.AdamW(1e-3),
            4,
            refresh=2,
            local_steps=3,
            double_every=4,
            transport="all_gather",
            min_size=50,
        ),
        lambda model: dataset(model, 20),
    ),
    "1-bit LAMB": (
        lambda: tfgradcomp.OneBitLAMB(
            keras.optimizers.Lamb(1e-2), 4, transport="all_gather", min_size=50
        ),
        lambda model: dataset(model, 20),
    ),
    "uncompressed": (stock, lambda model: arrays(model, shuffle=False)),
}


def train(name):
    """Trains a case; returns hashes of each local worker's values, and the logs."""
    make_optimizer, fit = CASES[name]
    with scope():
        model = sequential(
            lambda: [
                keras.layers.Conv2D(8, 3, activation="relu"),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(40, activation="relu"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(3),
            ],
            inputs=(12, 12, 2),
            seed=5,
        )
        model.compile(make_optimizer(), "mse", metrics=["mae"])
    history = fit(model).history
    logs = model.evaluate(X[:31], Y[:31], batch_size=21, verbose=0)

    def hashes(variable):
        is_own = isinstance(variable, PerReplicaVariable)
        values = variable.local_values() if is_own else local_values(variable)
        return [hashlib.sha256(np.asarray(v).tobytes()).hexdigest() for v in values]

    everything = [*model.weights, *model.optimizer.variables]
    return [hashes(variable) for variable in everything], history, logs


def ranks():
    """The order of ranks in collectives and in the data."""
    collectives = for_strategy(strategy())
    count = collectives.num_workers

    @tf.function
    def exchange():
        def of_replica():
            rank = collectives.rank
            rows = 100 * rank + tf.range(count)[:, tf.newaxis]
            own = tf.constant([rank])
            return (
                collectives.gather(own, "ranks/gather"),
                collectives.all_to_all(rows, "ranks/all_to_all"),
            )

        return strategy().run(of_replica)

    data = tf.data.Dataset.range(2 * count + 1).batch(2 * count)
    first = next(iter(strategy().experimental_distribute_dataset(data)))
    again = tfgradcomp.virtual_workers(count).num_replicas_in_sync
    try:
        tfgradcomp.virtual_workers(count + 1)
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    results = [
        [
            value.numpy().tolist()
            for value in strategy().experimental_local_results(nest)
        ]
        for nest in (*exchange(), first)
    ]
    return *results, again, error


def two_tables():
    """Trains two tables of embeddings; returns the hash of all weights."""
    keras.utils.set_random_seed(5)
    with scope():
        words = keras.Input((8,), dtype="int32")
        tables = [keras.layers.Embedding(rows, 16)(words) for rows in (50, 60)]
        x = keras.layers.Flatten()(tables[0] + tables[1])
        model = keras.Model(words, keras.layers.Dense(3)(x))
        optimizer = tfgradcomp.SignSGD(SGD(0.1), min_size=0, transport="all_gather")
        model.compile(optimizer, "mse")
    rows = np.random.default_rng(0).integers(0, 50, (32, 8))
    model.fit(rows, Y[:32], batch_size=8, shuffle=False, verbose=0)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return hashlib.sha256(weights).hexdigest()
