"""Compiled and fused compressors do what the links of the chain do, one by one."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.compressors.contracts import every_row
from tests.helpers import make_context
from tests.methods import ROWS, parts_of
from tfgradcomp.testing.inputs import LAYOUTS, gradient_of, second_moments_of
from tfgradcomp.transports import messages


def in_graphs_and_xla():
    """Each compressor in a graph and by XLA; quickly, few that have all kinds of parts.

    It takes seconds for each, and what graphs may do otherwise they do to the
    operations of a class. By XLA `tests/optimizers` compiles whole steps; only messages
    that vary in length are others there.
    """
    seen = set()
    # Those with most parts first.
    (_, every) = every_row.args
    for row in sorted(every, key=lambda row: -len(parts_of(row.compressor))):
        classes = {type(part) for part in parts_of(row.compressor)}
        marks = [] if classes - seen else [pytest.mark.slow]
        seen |= classes
        yield pytest.param(row, False, id=f"{row.name}-graph", marks=marks)
        fields = row.compressor.fields(LAYOUTS["tensors"]).values()
        if not any(field.variable_length for field in fields):
            marks = [pytest.mark.slow]
        yield pytest.param(row, True, id=f"{row.name}-xla", marks=marks)


@pytest.mark.sample(3, "[Hybrid, gaps-xla")
@pytest.mark.parametrize(("row", "jit_compile"), [*in_graphs_and_xla()])
def test_compiled_steps_equal_eager_ones_and_trace_once(row, jit_compile):
    layout = LAYOUTS["tensors"]
    compressor = row.compressor

    @tf.function(jit_compile=jit_compile, autograph=False)
    def step_of(x, state, step, rank, previous_rate):
        context = make_context(
            step, 5, rank, previous_rate=previous_rate, moments=second_moments_of(x)
        )
        payload, state, _ = compressor.compress(x, state, layout, context)
        vector = compressor.decompress(payload, layout)
        words = messages.pack(payload, compressor.fields(layout))
        return payload, words, vector, state

    state = compressor.init(layout)
    for step in range(3):
        x = gradient_of(layout, step)
        x[[0, 5, 40]] = 0.0, -0.0, 0.0
        rate = tf.constant(0.1 if step else 0.0)
        payload, _, vector, new_state = step_of(
            tf.constant(x), state, tf.constant(step), tf.constant(1), rate
        )
        context = make_context(
            step, 5, 1, previous_rate=rate, moments=second_moments_of(x)
        )
        expected, expected_state, _ = compressor.compress(
            tf.constant(x), state, layout, context
        )
        for name, field in compressor.fields(layout).items():
            if name == "indices":
                # The order of the largest is free; what is decoded is not.
                sent = [
                    reference.unpack(p[name].numpy(), field.base, field.count)
                    for p in (payload, expected)
                ]
                assert set(sent[0]) == set(sent[1])
            elif field.base is not None:
                np.testing.assert_array_equal(payload[name], expected[name])
        decoded = np.asarray(compressor.decompress(expected, layout))
        # XLA adds in another order.
        least = 1e-6 * np.abs(decoded).max() if row.kind == "low rank" else 0
        np.testing.assert_allclose(vector, decoded, rtol=1e-5, atol=least)
        for new, old in zip(
            tf.nest.flatten(new_state), tf.nest.flatten(expected_state), strict=True
        ):
            np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-4)
        state = new_state
    assert step_of.experimental_get_tracing_count() == 1


def test_the_chains_that_have_a_kernel_are_fused():
    chains = {row.compressor for row in ROWS.values()}
    fused = {type(one.fused()).__name__ for one in chains if one.fused() is not one}
    assert fused == {
        "_MomentumSign",
        "_ClippedTernary",
        "_LowRankFeedback",
        "_SignFeedback",
        "_NesterovSignFeedback",
    }
