"""Models with embeddings that a pool's workers train, on different sequences each."""

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.engine import row_cases
from tests.fit.fit_models import recorded

ROWS, WIDTH, RATE = 40, 3, 0.5
LENGTHS = ((3, 5), (7, 2), (4, 6))


class Positions(keras.layers.Layer):
    """Adds a row for each place, those of the front: their gradient is a padded one."""

    def build(self, shape):
        self.table = self.add_weight((8, shape[-1]), "normal", name="table")

    def call(self, x):
        size = (keras.ops.shape(x)[1], x.shape[-1])
        table = keras.ops.convert_to_tensor(self.table)
        return x + keras.ops.slice(table, (0, 0), size)


def sequences(rank, workers):
    """Batches of a sequence for each worker, of other lengths in each, with targets."""
    rng = np.random.default_rng(rank)
    return [
        (
            rng.integers(ROWS, size=(workers, length)).astype(np.int32),
            rng.normal(size=(workers, 1)).astype(np.float32),
        )
        for length in LENGTHS[rank]
    ]


def dataset(batches):
    """The batches, of a length that no graph knows; a step takes a sequence of each."""
    data = tf.data.Dataset.from_generator(
        lambda: batches,
        output_signature=(
            tf.TensorSpec([None, None], tf.int32),
            tf.TensorSpec([None, 1], tf.float32),
        ),
    )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    return data.with_options(options)


def make_model():
    """Embeddings of tokens and of places, whose mean goes into a layer."""
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(ROWS, WIDTH),
            Positions(),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )


def stock_weights(workers):
    """The weights after steps of stock SGD on the mean gradient of all workers."""
    model = make_model()
    steps = [
        [
            (x[i : i + 1], y[i : i + 1])
            for x, y in sequences(rank, workers)
            for i in range(workers)
        ]
        for rank in range(workers)
    ]
    for batches in zip(*steps, strict=True):
        with tf.GradientTape() as tape:
            losses = [tf.reduce_mean((model(x) - y) ** 2) for x, y in batches]
            loss = tf.add_n(losses) / workers
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(
            model.trainable_variables, gradients, strict=True
        ):
            variable.assign_sub(RATE * tf.convert_to_tensor(gradient))
    return model.get_weights()


def case_unknown_length(how):
    """Trains with nothing lost on sequences whose length no graph knows."""
    strategy, rank = strategy_and_rank()
    data = dataset(sequences(rank, strategy.num_replicas_in_sync))
    with strategy.scope():
        model = make_model()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(RATE),
            tfgradcomp.compressors.Identity(),
            tfgradcomp.servers.Mean(),
            min_size=1,
            transport="all_reduce",
        )
        model.compile(optimizer, "mse", jit_compile=False)
    if how == "fit":
        model.fit(data, epochs=1, shuffle=False, verbose=0)
        return model.get_weights()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
            loss /= strategy.num_replicas_in_sync
        optimizer.apply_gradients(
            zip(
                tape.gradient(loss, model.trainable_variables),
                model.trainable_variables,
                strict=True,
            )
        )

    distributed = strategy.experimental_distribute_dataset(data)
    run = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    for x, y in distributed:
        run(x, y)
    return model.get_weights()


def case_rows(name):
    """The table after each step on slices, and what the collectives were given."""
    strategy, rank = strategy_and_rank()
    workers = strategy.num_replicas_in_sync
    with recorded() as (_, varying):
        with strategy.scope():
            table, optimizer = row_cases.make_table(name, transport="auto")
            optimizer.build([table])

        @tf.function(
            input_signature=[
                tf.TensorSpec([None], tf.int32),
                tf.TensorSpec([None, row_cases.WIDTH], tf.float32),
            ]
        )
        def step(indices, values):
            strategy.run(
                lambda: row_cases.apply(optimizer, table, indices, values / workers)
            )

        tables = []
        for number in range(row_cases.STEPS):
            step(*row_cases.slices_of(number, rank))
            tables.append(np.array(table))
    return {
        "tables": tables,
        "traces": step.experimental_get_tracing_count(),
        "given": sum(varying),
        "sent": optimizer.traffic.words_sent * row_cases.STEPS,
    }
