"""Random states follow their places in a model, not the order of creation."""

import keras
import numpy as np
import pytest

from tfgradcomp.fit.run_state import RunState


class Block(keras.layers.Layer):
    def __init__(self, order):
        super().__init__()
        for name in order:
            setattr(self, name, keras.layers.Dropout(0.5))
        self.list = [keras.layers.Dense(2), keras.layers.GaussianNoise(0.1)]

    def call(self, x, training=False):
        x = self.second(self.first(x, training=training), training=training)
        for layer in self.list:
            x = layer(x)
        return x


def build(order):
    block = Block(order)
    inputs = keras.Input((2,))
    return block, keras.Model(inputs, block(inputs))


def generators(block):
    return [
        one.seed_generator.state for one in (block.first, block.second, block.list[1])
    ]


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_states_follow_the_place_in_the_model(order):
    block, model = build(("first", "second"))
    for index, state in enumerate(generators(block)):
        state.assign([index + 10, index + 20])
    saved = RunState(model).read()
    # Another model of this process, whose counters continue.
    other, copy = build(order)
    assert RunState(copy).assign(saved)
    for index, state in enumerate(generators(other)):
        np.testing.assert_array_equal(state.numpy(), [index + 10, index + 20])


def test_another_model_takes_nothing():
    block, model = build(("first", "second"))
    saved = RunState(model).read()
    del saved[next(name for name in saved if name.endswith("first/seed_generator"))]
    before = [state.numpy().tolist() for state in generators(block)]
    saved = {name: value + 1 for name, value in saved.items()}
    assert not RunState(model).assign(saved)
    assert [state.numpy().tolist() for state in generators(block)] == before
