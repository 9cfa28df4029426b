"""Rows of a table: layouts that vary between steps."""

import numpy as np
import tensorflow as tf

from tests.helpers import bits, make_context
from tests.selection import rows_in_turns
from tfgradcomp.core import Layout, VaryingLayout

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
