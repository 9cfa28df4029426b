"""Gradients of embeddings, `IndexedSlices`, on real workers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.engine import row_cases
from tests.fit.fit_models import recorded
from tests.harness import unsharded

ROWS, WIDTH, RATE = 40, 3, 0.5
LENGTHS = ((3, 5), (7, 2))


class Positions(keras.layers.Layer):
    """Adds a row for each place, those of the front: their gradient is a padded one."""

    def build(self, shape):
        self.table = self.add_weight((8, shape[-1]), "normal", name="table")

    def call(self, x):
        size = (keras.ops.shape(x)[1], x.shape[-1])
        table = keras.ops.convert_to_tensor(self.table)
        return x + keras.ops.slice(table, (0, 0), size)


def sequences(rank):
    """Two batches of a sequence for each worker, of other lengths in each."""
    rng = np.random.default_rng(rank)
    return [
        (
            rng.integers(ROWS, size=(2, length)).astype(np.int32),
            rng.normal(size=(2, 1)).astype(np.float32),
        )
        for length in LENGTHS[rank]
    ]


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


def stock_weights():
    """The weights after steps of stock SGD on the mean gradient of two workers."""
    model = make_model()
    weights = model.trainable_variables
    for step in range(2):
        batches = [sequences(rank)[step] for rank in range(2)]
        for i in range(2):
            with tf.GradientTape() as tape:
                rows = [(x[i : i + 1], y[i : i + 1]) for x, y in batches]
                losses = [tf.reduce_mean((model(x) - y) ** 2) for x, y in rows]
                loss = tf.add_n(losses) / 2
            gradients = tape.gradient(loss, weights)
            for variable, gradient in zip(weights, gradients, strict=True):
                variable.assign_sub(RATE * tf.convert_to_tensor(gradient))
    return model.get_weights()


def train_on_sequences():
    """Trains with nothing lost on sequences whose length no graph knows."""
    strategy, rank = strategy_and_rank()
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
    signature = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(
        lambda: sequences(rank), output_signature=signature
    )
    model.fit(unsharded(data), shuffle=False, verbose=0)
    return model.get_weights()


def test_gradients_of_unknown_length_train_as_stock_keras_does(pools):
    expected = stock_weights()
    for weights in pools(2).run(train_on_sequences).answers:
        for got, stock in zip(weights, expected, strict=True):
            np.testing.assert_allclose(got, stock, rtol=1e-5, atol=1e-6)


def step_on_rows(name):
    """The table after each step on slices, and what the collectives were given."""
    strategy, rank = strategy_and_rank()
    workers = strategy.num_replicas_in_sync
    with recorded() as (_, varying):
        with strategy.scope():
            table, optimizer = row_cases.make_table(name, transport="all_gather")
            optimizer.build([table])

        signature = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, WIDTH])

        @tf.function(input_signature=signature, autograph=False)
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


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("TernGrad", 2),
        # `test_rows` has state, and the unions of three, exchanged between threads.
        pytest.param("DistEFBlockSGDM", 3, marks=pytest.mark.slow),
    ],
)
def test_only_touched_rows_travel_and_change(pools, name, workers):
    answers = pools(workers).run(step_on_rows, name).answers
    tables, _ = row_cases.lazily(name, workers)
    for answer in answers:
        for got, first, expected in zip(
            answer["tables"], answers[0]["tables"], tables, strict=True
        ):
            assert got.tobytes() == first.tobytes()
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
        assert answer["traces"] == 1
        # Besides what varies: a size in each step, and TernGrad's scale.
        fixed = row_cases.STEPS * (2 if name == "TernGrad" else 1)
        assert answer["sent"] == (workers - 1) * (answer["given"] + fixed)
