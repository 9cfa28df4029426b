"""Rows of a table: layouts that vary between steps."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits, make_context
from tests.methods import ROWS
from tests.selection import rows_in_turns
from tfgradcomp.collectives import Collectives
from tfgradcomp.core import Layout, VaryingLayout
from tfgradcomp.transports import AllGather, Rows

WORKERS = 2


def exchanged(row, x, layout):
    """The update and all states after a step of two workers, in a graph."""
    method = row.method.fused()
    states = [method.compressor.init(layout) for _ in range(WORKERS)]

    # The first round, as both workers see it.
    prepared = [
        method.compressor.prepare(
            x[rank], states[rank], layout, make_context(3, 5, rank, WORKERS)
        )
        for rank in range(WORKERS)
    ]
    names = method.compressor.max_reduced_fields(layout)
    most = {name: tf.maximum(prepared[0][name], prepared[1][name]) for name in names}
    compressed = []
    for rank in range(WORKERS):
        context = make_context(3, 5, rank, WORKERS, previous_rate=0.2)
        context = context._replace(prepared={**prepared[rank], **most})
        compressed.append(
            method.compressor.compress(x[rank], states[rank], layout, context)
        )
    payloads = {
        name: tf.stack([one.payload[name] for one in compressed])
        for name in compressed[0].payload
    }
    update, state = method.server.update(
        payloads,
        method.server.init(layout),
        layout,
        make_context(3, 5, 0, WORKERS, previous_rate=0.2),
    )
    states = [one.state for one in compressed]
    return tf.convert_to_tensor(update), tf.nest.flatten([states, state])


@pytest.mark.sample(2)
@rows_in_turns(
    "block_size",
    [300, None],
    where=lambda row: "sharded" in row.transports,
    by=lambda row: row.compressor,
)
def test_a_variable_layout_gives_the_bits_of_a_fixed_layout(row, block_size):
    @tf.function(input_signature=[tf.TensorSpec([WORKERS, None])], autograph=False)
    def varying(x):
        return exchanged(row, x, VaryingLayout.from_size(tf.shape(x)[1], block_size))

    for size in (1100, 1):
        x = np.random.default_rng(size).normal(size=[WORKERS, size]).astype(np.float32)
        x[0, : size // 3] = 0
        layout = Layout.from_sizes([size], block_size)
        fixed = exchanged(row, tf.constant(x), Layout(layout.row_splits))
        for expected, got in zip(
            tf.nest.flatten(fixed), tf.nest.flatten(varying(x)), strict=True
        ):
            assert bits(expected) == bits(got)
    assert varying.experimental_get_tracing_count() == 1


class Untrue(Collectives):
    """Two workers, of which the second one sends whatever a test wants."""

    num_workers, rank = WORKERS, 0

    def __init__(self, sent):
        self.sent, self.sizes = sent, []

    def gather(self, vector, call_site):
        self.sizes.append(int(tf.size(vector)))
        name = call_site.rpartition("/")[2]
        other = tf.constant(self.sent.get(name, []), tf.int32)[: tf.size(vector)]
        fill = [[0, tf.size(vector) - tf.size(other)]]
        return tf.stack([vector, tf.pad(other, fill, constant_values=-1)])


def test_rows_that_no_table_has_are_left_out():
    # A header without a code, and rows as they are.
    untrue = Untrue({"size": [2**31 - 1], "indices": [0, 3, 100, 2**27]})
    method = ROWS["TernGrad"].method
    route = Rows(untrue).bind(method, Layout.from_sizes([40]), "table")
    touched = route.agree(tf.constant([1, 7]), num_rows=10)
    np.testing.assert_array_equal(touched.rows, [1, 3, 7])
    assert max(untrue.sizes) <= 11


def test_a_length_that_no_payload_has_costs_no_memory():
    method, layout = ROWS["VarianceBased"].method.fused(), Layout.from_sizes([40])
    untrue = Untrue({"site": [0, 2**31 - 1]})
    route = AllGather(untrue).bind(method, layout, "site")
    exponents = tf.zeros([1], tf.int8)
    payload = {"exponents": exponents, "words": tf.constant([5])}
    route.push(payload, (), make_context(0, 5, 0, WORKERS), tf.constant(0))
    assert max(untrue.sizes) <= 48
