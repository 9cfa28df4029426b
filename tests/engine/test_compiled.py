"""A whole step in a graph and compiled by XLA: as an eager one, and traced once."""

import pytest
import tensorflow as tf

from tests.engine.test_step import SHAPES, apply, assert_alike, gradients_of, sgd
from tests.helpers import make_variables
from tests.methods import GATHER, parts_of
from tests.selection import select
from tfgradcomp.compressors import ORQ

# Each server by XLA, too. `tests/compressors` compiles every compressor, of which the
# levels of ORQ take a minute, and `test_variance_based_in_fit` lengths that vary.
BY_SERVER = select(
    lambda row: (
        row.transports != GATHER and not isinstance(parts_of(row.compressor)[-1], ORQ)
    ),
    by=lambda row: type(row.server),
)
# In graphs the tests of `fit` train, too.
COMPILED = [
    *((row, False) for row in select(by=lambda row: type(row.server))),
    *((row, True) for row in BY_SERVER),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("row", "jit_compile"),
    COMPILED,
    ids=lambda value: getattr(value, "name", "xla" if value else "graph"),
)
def test_compiled_steps_trace_once_and_equal_eager_ones(row, jit_compile):
    eager, compiled = make_variables(SHAPES), make_variables(SHAPES)
    one, other = row.make(sgd(), min_size=5), row.make(sgd(), min_size=5)
    other.build(compiled)

    @tf.function(jit_compile=jit_compile, autograph=False)
    def step(gradients):
        apply(other, gradients, compiled)

    for number in range(4):
        gradients = [tf.constant(g) for g in gradients_of(number)]
        apply(one, gradients, eager)
        step(gradients)
    assert step.experimental_get_tracing_count() == 1
    assert_alike(eager, compiled, rtol=1e-5)
    assert other.iterations == 4
