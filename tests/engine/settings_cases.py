"""Pairs of scripts that differ, on two workers."""

import keras
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.harness import fit, make_model
from tfgradcomp import methods

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def terngrad(inner=None, **arguments):
    """A wrapper that compresses the smallest model."""
    return tfgradcomp.TernGrad(inner or SGD(0.1), **{"min_size": 1, **arguments})


def local_steps(**arguments):
    """Local steps whose differences travel by the same method."""
    return tfgradcomp.LocalSteps(SGD(0.1), terngrad(SGD(1.0)), **arguments)


def distef(dtype):
    """A method that `str` shows without the type of its residual."""
    return tfgradcomp.DistEFBlockSGD(SGD(0.1), residual_dtype=dtype, min_size=1)


# The optimizers of two workers, and what the error says of them.
PAIRS = {
    "transport": (
        terngrad,
        lambda: terngrad(transport="sharded"),
        "`transport` is 'auto' on workers [0], 'sharded' on workers [1]",
    ),
    "inner optimizer": (
        terngrad,
        lambda: terngrad(Adam(0.1)),
        "`inner_optimizer.class_name` is 'SGD' on workers [0], 'Adam' on workers [1]",
    ),
    "accumulation": (
        terngrad,
        lambda: terngrad(SGD(0.1, gradient_accumulation_steps=2)),
        "`inner_optimizer.gradient_accumulation_steps` is None on workers [0], 2 on",
    ),
    "local steps": (
        local_steps,
        terngrad,
        "`optimizer` is LocalSteps on workers [0], TernGrad on workers [1]",
    ),
    "every": (
        lambda: local_steps(every=2),
        lambda: local_steps(every=4),
        "`every` is 2 on workers [0], 4 on workers [1]",
    ),
    "outer optimizer": (
        local_steps,
        lambda: tfgradcomp.LocalSteps(SGD(0.1), terngrad(SGD(0.7))),
        "`outer.inner_optimizer.learning_rate` is ",
    ),
    "policy": (
        terngrad,
        lambda: terngrad(policy=[("*/bias", methods.orq())]),
        "`policy` is None on workers [0], none on workers [1]",
    ),
    "residual_dtype": (
        lambda: distef("float32"),
        lambda: distef("bfloat16"),
        "`residual_dtype` is 'float32' on workers [0], 'bfloat16' on workers [1]",
    ),
    "Adam": (
        lambda: tfgradcomp.OneBitAdam(Adam(0.1), 2, min_size=1),
        lambda: tfgradcomp.ZeroOneAdam(Adam(0.1), 2, min_size=1),
        "`optimizer` is OneBitAdam on workers [0], ZeroOneAdam on workers [1]",
    ),
    "no wrapper": (
        terngrad,
        lambda: SGD(0.1),
        "`optimizer` is TernGrad on workers [0], SGD on workers [1]",
    ),
}


def errors_in_fit(names):
    """The error of `fit` on this worker, for each pair."""
    tfgradcomp.enable_multi_worker_fit()
    return {name: _error_of(lambda name=name: _fit(name)) for name in names}


def errors_in_loops(names):
    """The error of a first step outside of `fit`, for each pair."""
    return {name: _error_of(lambda name=name: _step(name)) for name in names}


def _fit(name):
    _, rank = strategy_and_rank()
    fit(make_model(PAIRS[name][rank], units=(3,)))


def _step(name):
    strategy, rank = strategy_and_rank()
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = PAIRS[name][rank]()
    step = tf.function(lambda: optimizer.apply([tf.ones([2])], [variable]))
    strategy.run(step)


def _error_of(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return "no error"


def plain_on_one():
    """Trains where worker 1 has an optimizer of Keras, and Keras' own `fit`."""
    strategy, rank = strategy_and_rank()
    with strategy.scope():
        optimizer = SGD(0.1)
        if rank == 0:
            optimizer = tfgradcomp.TernGrad(optimizer, min_size=1)
    fit(make_model(lambda: optimizer, units=(3,)))
