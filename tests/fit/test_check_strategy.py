"""Wrappers refuse strategies without collectives, and warn of some optimizers."""

import warnings

import keras
import pytest
import tensorflow as tf

import tfgradcomp
from tfgradcomp.compressors import ErrorFeedback, ScaledSign, TopK
from tfgradcomp.servers import Mean


class Squares(keras.optimizers.RMSprop):
    """An optimizer of a user's own."""


def dist_ef(inner):
    return tfgradcomp.DistEFBlockSGDM(inner, allow_inner_momentum=True)


@pytest.mark.parametrize(
    "make",
    [
        dist_ef,
        tfgradcomp.DistEFSGD,
        lambda inner: tfgradcomp.ORQ(inner, error_feedback=True),
        lambda inner: tfgradcomp.CompressedOptimizer(
            inner, ErrorFeedback(TopK()), Mean(TopK())
        ),
    ],
)
def test_error_feedback_in_front_of_adam_warns(make):
    with pytest.warns(UserWarning, match="train badly.*inner_optimizer=Adam"):
        make(keras.optimizers.Adam())


@pytest.mark.parametrize(
    "inner",
    ["adamw", "nadam", "adamax", "rmsprop", "adagrad", "adadelta", "adafactor", "ftrl"]
    + [keras.optimizers.Lamb, "lion", Squares],
)
def test_every_average_of_squares_warns(inner):
    with pytest.warns(UserWarning, match="train badly"):
        tfgradcomp.DistEFSGD(inner if isinstance(inner, str) else inner())


def test_sgd_and_methods_without_error_feedback_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist_ef(keras.optimizers.SGD(momentum=0.9))
        tfgradcomp.ORQ("adam")
        tfgradcomp.DistEFSGD("adam", "identity")
        tfgradcomp.TernGrad("adam")
        tfgradcomp.CompressedOptimizer("adam", ScaledSign(), Mean(ScaledSign()))


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
