"""Wrappers warn of inner optimizers that error feedback does not go with."""

import warnings

import keras
import pytest

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
