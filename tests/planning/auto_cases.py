"""Trainings by `Auto` that a pool's workers run, a function a case."""

import functools
import os
from unittest import mock

import keras
import tensorflow as tf

import tfgradcomp
from tests.fit.fit_models import (
    SGD,
    X,
    Y,
    digest,
    error_of_fit,
    fit,
    make,
    own_rank,
    scope,
    strategy,
    two_layers,
)
from tfgradcomp.callbacks import CompressionMonitor
from tfgradcomp.planning import Decision, arithmetic, measurement

AFTER = 5  # The steps of an epoch.
INNER = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "momentum": lambda: SGD(0.02, momentum=0.9),
    "SGD": lambda: SGD(0.02),
}
# On such a link every method pays.
FORECAST = {"link": "10mbit", "compute": 1e-3, "after": AFTER}


def auto(inner="Adam", **arguments):
    """A model compiled with `Auto`."""
    arguments = {**FORECAST, **arguments}
    return make(lambda: tfgradcomp.Auto(INNER[inner](), **arguments))


def case_by_hand(inner, decision):
    """The digest of an epoch as bfloat16, and another one with the chosen wrapper."""
    candidate = Decision.of(decision).candidate
    with scope():
        optimizer = INNER[inner]()
    model = make(lambda: tfgradcomp.HalfPrecision(optimizer))
    fit(model, epochs=1)
    with scope():
        if candidate.wrapper == "DistEFBlockSGDM":
            optimizer = SGD(0.02)
            optimizer.iterations.assign(AFTER)
        model.compile(candidate.wrap(optimizer), "mse")
    fit(model, epochs=1)
    return digest(model)


def case_fit(inner, risk):
    """The digest of a training by `Auto`, and the choice.

    Link and computing time are given, so that a forecast reads no clock.
    """
    model = auto(inner, risk=risk)
    monitor = CompressionMonitor(every=1)
    with mock.patch.object(arithmetic, "_seconds", side_effect=AssertionError):
        fit(model, callbacks=[monitor])
    decision, lines = model.optimizer.decision, []
    model.optimizer.explain(lines.append)
    return {
        "digest": digest(model),
        "decision": decision.to_config(),
        "explained": lines,
        "momentum": getattr(model.optimizer.inner_optimizer, "momentum", None),
        "slots": len(model.optimizer.inner_optimizer.variables),
        "bits": model.optimizer.traffic.bits_per_element_up,
    }


def case_measured(carrier):
    """The decision by a link that is measured, what was measured, and digests."""
    model = auto(link=None, compute=None, risk="high", carrier=carrier)
    with mock.patch.object(measurement, "measure", wraps=measurement.measure) as spy:
        fit(model)
    (measured,) = spy.call_args.args
    decision, taken = model.optimizer.decision.to_config(), type(measured).__name__
    return decision, taken, digest(model), case_by_hand("Adam", decision)


def case_files(folder):
    """Digests and decisions of trainings that go on from files, and of the first."""
    first = auto("momentum", risk="high")
    fit(first, epochs=2)
    path = os.path.join(folder, f"worker-{own_rank()}")
    first.save(f"{path}.keras")
    first.save_weights(f"{path}.weights.h5")
    second = auto("momentum", risk="high")
    with scope():
        second.optimizer.build(second.trainable_variables)
    second.load_weights(f"{path}.weights.h5")
    with scope():
        third = keras.models.load_model(f"{path}.keras")
    # The steps of this model have been traced before it takes the decision.
    fourth = auto("momentum", risk="high", after=100)
    fit(fourth, epochs=1)
    fourth.load_weights(f"{path}.weights.h5")
    models = first, second, third, fourth
    for model in models:
        fit(model, epochs=1)
    return {
        "digests": [digest(model) for model in models],
        "decisions": [model.optimizer.decision.to_config() for model in models],
    }


def case_pinned(folder, config):
    """Digests of a training with a decision from a file, and by its own wrapper."""
    decision = Decision.of(config)
    path = os.path.join(folder, f"decision-{own_rank()}.json")
    decision.save(path)
    pinned = auto("Adam", decision=path)
    fit(pinned)
    plain = make(lambda: decision.candidate.wrap(INNER["Adam"]()))
    fit(plain)
    return digest(pinned), digest(plain), Decision.of(path) == decision


def case_own_loop():
    """The digest, decision and switches of a loop of one's own that asks for it."""
    model = auto("Adam", risk="low")
    optimizer, data = model.optimizer, tf.data.Dataset.from_tensor_slices((X, Y))

    def make_step():
        # Loops that autograph converts are in `tests/fit/test_own_loops.py`.
        @tf.function(autograph=False)
        def step(batch):
            def replica_step(x, y):
                with tf.GradientTape() as tape:
                    loss = model.compute_loss(x, y, model(x, training=True))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)

            strategy().run(replica_step, args=batch)

        return step

    step, switches = make_step(), []
    for _ in range(2):
        for batch in strategy().experimental_distribute_dataset(data.batch(12)):
            step(batch)
            switches.append(optimizer.decide())
            if switches[-1]:
                step = make_step()
    return digest(model), optimizer.decision.to_config(), switches


def case_errors():
    """Messages of errors: no network, and a decision of another N."""
    decision = tuned(risk="medium").to_config()
    model = auto(decision=decision | {"workers": 3})
    fit(model, epochs=1)
    return error_of_fit(auto(link=None)), model.optimizer.decision.workers


@functools.cache
def tuned(**arguments):
    """A decision by `tune`, for as many workers as there are."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((64,)), *two_layers()])
    model.compile(INNER["Adam"](), "mse")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    found = tfgradcomp.tune(
        model, data, 2.0, 2, [("HalfPrecision", {})], link="10mbit", **arguments
    )
    return found.decision


def case_errors_later(limit):
    """Trains with a decision whose limit of errors is another."""
    decision = tuned(risk="medium").to_config() | {"limit": limit}
    fit(auto(decision=decision, after=1), epochs=3)
