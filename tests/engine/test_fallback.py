"""Plain float32 where it is quicker: asked for, saved and taken again."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import bits, make_variables, named
from tfgradcomp.transports import Costs, LinearCost

SHAPES = [(40, 30), (7,)]
# A network on which nothing costs anything, and one on which words cost much.
FREE = Costs(*[LinearCost(0.0, 0.0)] * 3)
SLOW = Costs(LinearCost(0.0, 1.0), LinearCost(0.0, 1.0), LinearCost(0.0, 1.0))


def make(transport, fallback="float32", **arguments):
    optimizer = tfgradcomp.DistEFBlockSGDM(
        keras.optimizers.SGD(0.1),
        transport=transport,
        fallback=fallback,
        min_size=100,
        **arguments,
    )
    variables = make_variables(SHAPES)
    optimizer.build(variables)
    return optimizer, variables


def train(optimizer, variables, steps):
    for step in steps:
        rng = np.random.default_rng(step)
        gradients = [tf.constant(rng.normal(size=s), tf.float32) for s in SHAPES]
        optimizer.apply(gradients, variables)
    return [bits(v.numpy()) for v in variables]


def save(optimizer, variables):
    store, inner = {}, {}
    optimizer.save_own_variables(store)
    optimizer.inner_optimizer.save_own_variables(inner)
    return (
        {k: np.array(v) for k, v in store.items()},
        inner,
        [v.numpy() for v in variables],
    )


def load(optimizer, variables, saved):
    store, inner, weights = saved
    optimizer.load_own_variables(store)
    optimizer.inner_optimizer.load_own_variables(inner)
    for variable, value in zip(variables, weights, strict=True):
        variable.assign(value)


def test_the_fallback_is_taken_where_float32_is_quicker():
    optimizer, variables = make(FREE)
    assert optimizer.traffic.elements_compressed == 0
    train(optimizer, variables, range(3))
    # The method's mathematics are kept: its momentum runs.
    assert np.abs(named(optimizer, "compressed.worker.momentum")).max() > 0
    assert not any("residual" in v.name for v in optimizer.variables)


@pytest.mark.parametrize(("transport", "fallback"), [(SLOW, "float32"), (FREE, None)])
def test_compression_goes_on_elsewhere(transport, fallback):
    optimizer, _ = make(transport, fallback)
    assert optimizer.traffic.elements_compressed == 1200


@pytest.mark.parametrize(("first", "second"), [(FREE, SLOW), (SLOW, FREE)])
def test_a_resumed_run_takes_the_saved_choice(first, second):
    optimizer, variables = make(first)
    train(optimizer, variables, range(3))
    saved = save(optimizer, variables)
    expected = train(optimizer, variables, range(3, 6))

    again, others = make(second)
    assert again.traffic != optimizer.traffic
    load(again, others, saved)
    assert again.traffic == optimizer.traffic
    assert train(again, others, range(3, 6)) == expected
    names = [v.name for v in again.variables]
    assert len(names) == len(set(names))


def test_a_load_that_would_change_a_traced_step_raises():
    optimizer, variables = make(FREE)
    train(optimizer, variables, range(3))
    saved = save(optimizer, variables)
    again, others = make(SLOW)
    before = train(again, others, range(3))
    with pytest.raises(ValueError, match="used float32.*chosen DistEFBlockSGDM here"):
        load(again, others, saved)
    assert [bits(v.numpy()) for v in others] == before


def test_a_state_of_the_fallback_is_refused_without_it():
    optimizer, variables = make(FREE)
    train(optimizer, variables, range(3))
    saved = save(optimizer, variables)
    again, others = make("all_gather", fallback=None)
    load(again, others, saved)
    with pytest.raises(ValueError, match="not restored as a whole.*worker.residual"):
        train(again, others, range(3, 4))


def test_an_unknown_fallback_is_refused():
    with pytest.raises(ValueError, match="fallback must be one of .*'float16'"):
        make("auto", "float16")
