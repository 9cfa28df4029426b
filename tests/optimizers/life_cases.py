"""Checks of events in the middle of a training, on a pool's workers.

Each check trains a small model and raises AssertionError where a wrapper does not do
what Keras' optimizers do.
"""

import copy
import functools
import pickle
import re
import tempfile
import traceback
from pathlib import Path

import keras
import numpy as np

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.engine import waiting_cases
from tests.engine.waiting_cases import local_steps
from tests.harness import Replicas, digest, fit, make_model
from tests.methods import ROWS
from tfgradcomp.collectives import for_strategy

# A file keeps the state of the inner optimizer of one worker.
OTHERS = {
    **waiting_cases.OTHERS,
    "Auto": lambda: tfgradcomp.Auto(
        keras.optimizers.SGD(0.05), link="10mbit", compute=1e-3, after=3
    ),
    "LocalSteps": lambda: local_steps(0.0, every=2),
    "LocalSteps, stagger": lambda: local_steps(0.0, every=3, stagger=True),
    "LocalSteps, delay": lambda: local_steps(0.0, every=3, delay=2),
    "LocalSteps, stagger, delay": lambda: local_steps(
        0.0, every=2, stagger=True, delay=1, mix=0.5
    ),
}
CHECKS = {}


def check(function):
    """Adds a check to the battery."""
    CHECKS[function.__name__] = function
    return function


def make_optimizer(name):
    """Returns the optimizer of a row, or of a wrapper without one."""
    if name in OTHERS:
        return OTHERS[name]()
    return ROWS[name].make_to_train(min_size=1, seed=3)


def run(name):
    """Returns the traceback of each check that fails."""
    failures = {}
    for each, function in CHECKS.items():
        keras.backend.clear_session()
        try:
            function(functools.partial(make_optimizer, name))
        except Exception:
            failures[each] = traceback.format_exc()
    return failures


def _error_of(function, *arguments):
    """Returns the type of a call's error and the begin of its text."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:30]}"
    return "no error"


def _model(make, **compile_arguments):
    return make_model(make, units=(12, 3), features=6, **compile_arguments)


def _fit(model, epochs=1, **arguments):
    return fit(model, rows=24, batch_size=6, epochs=epochs, **arguments)


def _set_rates(optimizer, factor):
    """Sets the learning rate, also that of the exchanges of local steps.

    What has been trained and not exchanged is exchanged before, by the old rates.
    """
    optimizer.synchronize()
    for one in (optimizer, _exchanging(optimizer)):
        one.learning_rate = factor * 0.05


def _exchanging(optimizer):
    """Returns the optimizer that has the arguments of the exchange."""
    return getattr(optimizer, "outer", optimizer)


def _compile(model, optimizer=None, **arguments):
    with strategy_and_rank()[0].scope():
        model.compile(optimizer or model.optimizer, "mse", **arguments)


@check
def second_fit(make):
    once, twice = _fit(_model(make), 2), _fit(_fit(_model(make)))
    assert digest(once) == digest(twice)


@check
def several_steps_per_execution(make):
    several = _fit(_model(make, steps_per_execution=2), 2)
    assert digest(several) == digest(_fit(_model(make), 2))


@check
def freeze_and_thaw(make):
    model = _fit(_model(make))
    frozen, other = model.layers
    frozen.trainable = False
    _compile(model)
    before = digest(frozen.get_weights()), digest(other.get_weights())
    steps = int(model.optimizer.iterations)
    _fit(model)
    assert digest(frozen.get_weights()) == before[0]
    assert digest(other.get_weights()) != before[1]
    frozen.trainable = True
    _compile(model)
    _fit(model)
    assert digest(frozen.get_weights()) != before[0]
    assert int(model.optimizer.iterations) == steps + 8


@check
def compiled_anew_after_freezing(make):
    model = _fit(_model(make))
    model.layers[0].trainable = False
    before = digest(model.layers[0].get_weights())
    with strategy_and_rank()[0].scope():
        optimizer = make()
    _compile(model, optimizer)
    _fit(model)
    assert digest(model.layers[0].get_weights()) == before
    lines = []
    optimizer.summary(print_fn=lines.append)
    assert model.layers[1].kernel.path in "".join(lines)
    assert model.layers[0].kernel.path not in "".join(lines)


@check
def another_model(make):
    messages = []
    for make_one in (lambda: keras.optimizers.SGD(0.1), make):
        first = _fit(_model(make_one))
        keras.utils.set_random_seed(1)
        with strategy_and_rank()[0].scope():
            second = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            second.compile(first.optimizer, "mse")
        messages.append(_error_of(_fit, second))
    assert messages[0] == messages[1] != "no error", messages


@check
def weights_set(make):
    model = _fit(_model(make))
    values = [np.full_like(w, 0.25 * i) for i, w in enumerate(model.get_weights())]
    _set_rates(model.optimizer, 0)
    model.set_weights(values)
    _fit(model)
    for one, value in zip(model.get_weights(), values, strict=True):
        np.testing.assert_array_equal(one, value)


@check
def rate_set(make):
    model = _fit(_model(make))
    _set_rates(model.optimizer, 0)
    before = digest(model)
    assert digest(_fit(model)) == before
    _set_rates(model.optimizer, 1)
    assert digest(_fit(model)) != before


@check
def clipnorm_set(make):
    late, early = _model(make), _model(make)
    late.optimizer.build(late.trainable_variables)
    for model in (early, late):
        model.optimizer.clipnorm = 1e-3
        assert model.optimizer.clipnorm == 1e-3
    assert digest(_fit(late)) == digest(_fit(early))
    # Signs do not depend on the norm.
    method = str(_exchanging(late.optimizer).method)
    if not re.search(r"\b(Sign|SignOfMean|MeanOfSigns)\(", method):
        assert digest(early) != digest(_fit(_model(make)))


@check
def nonfinite_set(make):
    model = _fit(_model(make))
    try:
        _exchanging(model.optimizer).nonfinite = "skip"
    except AttributeError as error:
        assert "is fixed when the optimizer is created" in str(error)
    else:
        raise AssertionError("nonfinite was set")


@check
def loaded(make):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "saved.weights.h5")
        model = _fit(_model(make))
        model.save_weights(path)
        wanted = digest(_fit(model))
        assert wanted == digest(_fit(_loaded(model, path))), "after its graph"
        fresh = _model(make)
        fresh.optimizer.build(fresh.trainable_variables)
        assert wanted == digest(_fit(_loaded(fresh, path))), "before the first step"
        assert wanted == digest(_fit(_loaded(_loaded(fresh, path), path))), "twice"
        other = _fit(_model(make), shift=1.0)
        assert wanted == digest(_fit(_loaded(other, path))), "after a step"


def _loaded(model, path):
    model.load_weights(path)
    return model


@check
def saved_as_a_whole(make):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "saved.keras")
        model = _fit(_model(make))
        model.save(path)
        wanted = digest(_fit(model))
        with strategy_and_rank()[0].scope():
            again = keras.saving.load_model(path)
        assert digest(_fit(again)) == wanted


@check
def copied(make):
    model = _fit(_model(make))
    with strategy_and_rank()[0].scope():
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    before, after = digest(model), digest(_fit(model))
    for again in copies:
        assert digest(again) == before
        assert again.optimizer is not model.optimizer
        assert digest(_fit(again)) == after


@check
def no_gradients(make):
    messages = []
    for make_one in (lambda: keras.optimizers.SGD(0.1), make):
        model = _fit(_model(make_one))
        variables = model.trainable_variables
        given = [[None] * len(variables), variables]
        if getattr(model.optimizer, "needs_second_moments", False):
            given.append(given[0])
        apply = model.optimizer.apply
        messages.append(_error_of(strategy_and_rank()[0].run, apply, given))
    assert messages[0] == messages[1] != "no error", messages


def share(transport_of):
    """The weights of two optimizers that have been given the same transport.

    Args:
        transport_of: Function of the collectives of this process' strategy.
    """
    strategy, _ = strategy_and_rank()
    transport = transport_of(for_strategy(strategy))
    both = [
        Replicas(
            lambda: tfgradcomp.TernGrad(
                keras.optimizers.SGD(0.1), transport=transport, min_size=1
            ),
            [np.ones(size)],
        )
        for size in (40, 700)
    ]
    rng = np.random.default_rng(0)
    for _ in range(3):
        for one in both:
            size = sum(int(np.prod(v.shape)) for v in one.variables)
            one.step(rng.normal(size=(one.number, size)).astype("float32"))
    return [one.weights() for one in both]


def by_name(collectives):
    """The name of `AllGather`, with which each optimizer makes a transport."""
    return "all_gather"
