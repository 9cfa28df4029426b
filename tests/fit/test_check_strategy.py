"""Wrappers refuse strategies without collectives, and a strategy that changes."""

import keras
import pytest
import tensorflow as tf

import tfgradcomp


def test_strategies_without_collectives_are_refused(monkeypatch):
    central = tf.distribute.experimental.CentralStorageStrategy
    for kind in (tf.distribute.TPUStrategy, central):
        monkeypatch.setattr(tf.distribute, "has_strategy", lambda: True)
        monkeypatch.setattr(
            tf.distribute, "get_strategy", lambda kind=kind: object.__new__(kind)
        )
        with pytest.raises(ValueError, match=f"works without.*{kind.__name__}"):
            tfgradcomp.SignSGD("sgd")


def test_optimizer_of_another_strategy_is_refused():
    outside = tfgradcomp.TernGrad(keras.optimizers.SGD(0.1))
    inner = keras.optimizers.SGD(0.1)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        variables = [keras.Variable([1.0, 2.0])]
        match = "Received: SGD created under _Default.*now under OneDeviceStrategy"
        with pytest.raises(ValueError, match=match):
            outside.build(variables)
        with pytest.raises(ValueError, match=match):
            tfgradcomp.TernGrad(inner)


def test_build_outside_of_the_scope_takes_the_strategy_of_the_optimizer():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        optimizer = tfgradcomp.TernGrad(keras.optimizers.SGD(0.1))
        variables = [keras.Variable([1.0, 2.0])]
    optimizer.build(variables)
    assert optimizer._strategy is strategy
    with pytest.raises(ValueError, match="must be called in a replica context"):
        with strategy.scope():
            optimizer.apply([tf.constant([1.0, 2.0])])
    strategy.run(lambda: optimizer.apply([tf.constant([1.0, 2.0])]))
    assert variables[0].numpy().tolist() == pytest.approx([0.9, 1.8])
