"""A warning about residuals that have outgrown a fixed threshold."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tfgradcomp import compressors


def model_with(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(40)])
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def fit(model):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(96, 8)) + 1, rng.normal(size=(96, 40)) + 3
    model.fit(x, y, batch_size=12, verbose=0)


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", [tfgradcomp.Strom, tfgradcomp.Hybrid])
def test_a_low_threshold_warns_once(method, caplog):
    model = model_with(method(keras.optimizers.SGD(1e-3), threshold=1e-5))
    fit(model)
    (message,) = messages(caplog)
    assert f"residuals of {method.__name__} have outgrown its threshold" in message
    assert "threshold='auto'" in message and "threshold=1e-05" in message
    fit(model)
    assert len(messages(caplog)) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", [tfgradcomp.Strom, tfgradcomp.Hybrid])
@pytest.mark.parametrize("threshold", [0.1, "auto"])
def test_a_threshold_of_the_size_of_gradients_does_not(method, threshold, caplog):
    fit(model_with(method(keras.optimizers.SGD(1e-3), threshold=threshold)))
    assert not messages(caplog)


def test_other_methods_and_an_optimizer_that_is_not_built_do_not_warn(caplog):
    fit(model_with(tfgradcomp.VarianceBased(keras.optimizers.SGD(1e-3))))
    tfgradcomp.Strom("sgd", threshold=1e-5).finalize_variable_values([])
    assert not messages(caplog)


@pytest.mark.parametrize("late", [2, 3])
def test_few_elements_may_be_late(late, caplog):
    """A thousandth of all, where nothing else is due."""
    optimizer = tfgradcomp.Strom(keras.optimizers.SGD(0.1), threshold=0.01)
    variable = keras.Variable(np.zeros(2000, np.float32))
    gradient = np.zeros(2000, np.float32)
    gradient[:late] = 1
    optimizer.apply([tf.constant(gradient)], [variable])
    optimizer.verify()
    assert len(messages(caplog)) == (late > 2)


def test_arrears_are_those_of_what_is_due():
    """The paper's criterion, without another gradient."""
    state = {"residual": np.float32([[0.05, -0.3, 0.2, 50.0, -2.5]])}
    overdue_residuals = compressors.Strom(0.1).overdue_residuals(state)
    np.testing.assert_allclose(overdue_residuals, [3, 2, 500, 25], rtol=1e-6)
    state["variance"] = np.float32([[0, 0.07, 0.01, 1.0, 9.0]])
    overdue_residuals = compressors.Hybrid(0.1, alpha=1.5).overdue_residuals(state)
    np.testing.assert_allclose(overdue_residuals, [2, 500], rtol=1e-6)
    assert compressors.Strom("auto").overdue_residuals(state).size == 0
