"""Rows of a table, of workers that are threads, against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine import row_cases as cases
from tests.helpers import bits
from tfgradcomp.transports import Loopback
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.sharded import Sharded


def run(name, workers, steps=range(cases.STEPS), transport=AllGather, **arguments):
    """Each worker's tables after each step, and its optimizer."""

    def worker(rank, collectives):
        inner = arguments.get("inner", lambda: keras.optimizers.SGD(cases.RATE))
        given = {k: v for k, v in arguments.items() if k != "inner"}
        table, optimizer = cases.make_table(
            name, inner(), transport=transport(collectives), **given
        )
        tables = []
        for step in steps:
            indices, values = cases.slices_of(step, rank)
            cases.apply(optimizer, table, indices, values / workers)
            tables.append(table.numpy())
        return tables, optimizer

    results = Loopback(workers, timeout=60).run(worker)
    for tables in zip(*(tables for tables, _ in results), strict=True):
        assert len({bits(table) for table in tables}) == 1
    return results[0][0], [optimizer for _, optimizer in results]


@pytest.mark.sample(1)
@pytest.mark.python_ops(workers=(3,))
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", cases.METHODS)
def test_the_union_of_rows_is_the_layout_of_a_step(name, workers):
    tables, optimizers = run(name, workers)
    expected, state = cases.lazily(name, workers)
    for got, wanted in zip(tables, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
    for rank, optimizer in enumerate(optimizers):
        (bucket,) = optimizer.stepper.buckets
        kept = {
            "table_0.worker.momentum": state.m[rank],
            "table_0.worker.inner.residual": state.e[rank],
            "table_0.worker.residual": state.e[rank],
            "table_0.server.residual": state.server_e,
            "table_0.local.decay_momentum": state.decay_m,
        }
        for leaf in tf.nest.flatten(bucket.state):
            np.testing.assert_allclose(
                leaf.numpy(), kept[leaf.name], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("name", ["identity", "TernGrad", "DistEFBlockSGDM"])
def test_a_dense_gradient_of_a_table_goes_the_way_of_all_others(name, caplog):
    caplog.set_level("INFO", "tfgradcomp")

    def train(rank, collectives, sparse):
        table, optimizer = cases.make_table(
            name,
            transport=Sharded(collectives),
            sparse=sparse,
        )
        for step in (0, 2):
            dense = tf.constant(cases.dense_of(step, rank) / 2, tf.float32)
            optimizer.apply([dense], [table])
        return table.numpy(), type(optimizer.stepper.buckets[0]).__name__

    for sparse in ("table", "dense"):
        results = Loopback(2).run(lambda *worker, s=sparse: train(*worker, s))
        if sparse == "table":
            first = results[0]
            assert first[1] == "RowsBucket"
        assert [bits(table) for table, _ in results] == [bits(first[0])] * 2
    (said,) = [text for text in caplog.messages if "dense" in text]
    assert said.startswith("The gradient of table is dense")


def test_an_infinity_on_one_worker_skips_the_step_on_all():
    def worker(rank, collectives):
        table, optimizer = cases.make_table(
            "DistEFBlockSGDM", transport=AllGather(collectives), nonfinite="skip"
        )
        cases.apply(optimizer, table, *cases.slices_of(0, rank))
        state = tf.nest.flatten(optimizer.stepper.buckets[0].state)
        before = [bits(v.numpy()) for v in (table, *state)]
        indices, values = cases.slices_of(2, rank)
        cases.apply(optimizer, table, indices, values * (np.inf if rank == 0 else 1))
        after = [bits(v.numpy()) for v in (table, *state)]
        return before == after, optimizer.skipped_steps

    assert Loopback(2).run(worker) == [(True, 1)] * 2


def test_an_error_names_the_table_and_the_worker():
    def worker(rank, collectives):
        table, optimizer = cases.make_table(
            "TernGrad", transport=AllGather(collectives)
        )
        indices, values = cases.slices_of(0, rank)
        cases.apply(optimizer, table, indices, values * (np.nan if rank == 1 else 1))

    with pytest.raises(tf.errors.InvalidArgumentError, match="gradient of table"):
        Loopback(2).run(worker)


def test_clipping_and_windows_are_those_of_dense_gradients():
    def inner():
        return keras.optimizers.SGD(
            cases.RATE, global_clipnorm=0.25, gradient_accumulation_steps=2
        )

    tables, _ = run("identity", 2, steps=(0, 4), inner=inner)
    means = []
    for rank in range(2):
        mean = (cases.dense_of(0, rank) + cases.dense_of(4, rank)) / 2
        assert np.linalg.norm(mean) > 0.25
        means.append(mean * 0.25 / np.linalg.norm(mean))
    np.testing.assert_array_equal(tables[0], cases.first_table())
    expected = cases.first_table() - cases.RATE * np.mean(means, 0)
    np.testing.assert_allclose(tables[1], expected, rtol=1e-5, atol=1e-6)


def test_what_was_saved_goes_on_with_the_same_bits():
    whole, _ = run("DistEFBlockSGDM", 2)

    def worker(rank, collectives):
        transport = AllGather(collectives)
        table, first = cases.make_table("DistEFBlockSGDM", transport=transport)
        for step in range(cases.STEPS):
            if step == 3:
                store = {}
                first.save_own_variables(store)
                copy, second = cases.make_table(
                    "DistEFBlockSGDM", transport=AllGather(collectives)
                )
                copy.assign(table)
                second.build([copy])
                second.load_own_variables(
                    {name: np.asarray(value) for name, value in store.items()}
                )
                second.inner_optimizer.iterations.assign(first.iterations)
                table, first = copy, second
            indices, values = cases.slices_of(step, rank)
            cases.apply(first, table, indices, values / 2)
        return table.numpy()

    for table in Loopback(2).run(worker):
        assert bits(table) == bits(whole[-1])


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({}, "RowsBucket"),
        ({"sparse": "dense"}, "GradientBucket"),
        ({"exclude": "table"}, "RowsBucket"),
        ({"min_size": 1000}, "GradientBucket"),
    ],
)
def test_the_plan_says_once_what_travels_as_rows(arguments, kind):
    table, optimizer = cases.make_table("TernGrad", **arguments)
    optimizer.build([table])
    (bucket,) = optimizer.stepper.buckets
    assert type(bucket).__name__ == kind
    assert bucket.is_compressed == (arguments in ({}, {"sparse": "dense"}))
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.sparse == optimizer.sparse


def test_tables_of_layers_are_found_by_name():
    model = keras.Sequential(
        [keras.layers.Embedding(50, 8), keras.layers.Dense(50, name="embeddings")]
    )
    model.build((None, 3))
    _, optimizer = cases.make_table("TernGrad", sparse="rows")
    optimizer.build(model.trainable_variables)
    names = {
        bucket.vector: type(bucket).__name__ for bucket in optimizer.stepper.buckets
    }
    assert names == {"compressed": "GradientBucket", "table_0": "RowsBucket"}


def test_a_rule_of_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"sparse takes .* Received: sparse=3"):
        cases.make_table("TernGrad", sparse=3)
