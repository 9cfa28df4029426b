"""Trainings that a pool's workers run in the tests of `model.fit`, a function a case.

Each trains small models in some way and returns the results.
"""

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests import fixed_costs
from tests.fit.fit_models import (
    METHODS,
    SGD,
    X,
    Y,
    compiled,
    digest,
    error_of_fit,
    fit,
    make,
    poisoned,
    recorded,
    residuals,
    scope,
    trained,
)

# Validation is the same for all methods, and takes as long as a training.
VALIDATED = ("terngrad", "hybrid")


def case_method(name):
    """Trains by a method, some with validation; records the calls of collectives."""
    arguments = {"validation_data": (X, Y)} if name in VALIDATED else {}
    with recorded() as (seen, varying):
        answer = trained(METHODS[name], fit_arguments=arguments)
    return answer | {"seen": sorted({*seen}), "varying": varying}


TRANSPORTS = {
    # The other methods compare gathers in several buckets.
    "terngrad": ("all_reduce", "sharded"),
    "signum": ("all_gather", "all_reduce", "sharded"),
    "dist_ef_block_sgdm": ("all_gather", "sharded"),
    "orq": ("all_gather", "sharded"),
}


def case_transports(name):
    """Trains on every transport with several buckets and loops, and without both."""

    def run(transport, bucket_bytes, steps_per_execution):
        return trained(
            lambda: METHODS[name](
                transport=transport, bucket_bytes=bucket_bytes, min_size=3
            ),
            epochs=1,
            units=600,
            steps_per_execution=steps_per_execution,
        )["digest"]

    return {
        "one bucket": run("all_gather", 2**20, 1),
        **{transport: run(transport, 1, 4) for transport in TRANSPORTS[name]},
    }


def case_transports_under_conditions():
    """Collectives inside of conditionals: accumulated gradients, mixed precision."""
    return {
        transport: trained(
            lambda transport=transport: tfgradcomp.DistEFBlockSGDM(
                SGD(0.01, gradient_accumulation_steps=2),
                transport=transport,
                bucket_bytes=1,
                min_size=3,
            ),
            units=600,
            policy="mixed_float16",
            steps_per_execution=2,
        )["digest"]
        for transport in ("all_gather", "sharded")
    }


def case_varying(name):
    """Messages of varying size within loops, overflows, windows and buckets."""
    return trained(
        lambda: METHODS[name](accumulation=2, bucket_bytes=64),
        steps_per_execution=4,
        policy="mixed_float16",
        epochs=4,
    )


def case_auto():
    """Lets the cluster choose a transport, by measured and by given costs."""
    line = tfgradcomp.transports.LinearCost
    slow = tfgradcomp.transports.Costs(*[line(1e-4, 1e-5)] * 3)
    idle = tfgradcomp.transports.Costs(*[line(1e-4, 0.0)] * 3)
    settings = {
        "measured": {"transport": "auto"},
        "slow": {"transport": slow, "fallback": "float32"},
        "idle": {"transport": idle},
        "idle, fallback": {"transport": idle, "fallback": "float32"},
    }
    answers = {}
    for name, arguments in settings.items():
        model = make(
            lambda arguments=arguments: METHODS["signum"](**arguments), units=600
        )
        with fixed_costs.unused():
            fit(model, epochs=1)
        (bucket,) = [
            b for b in model.optimizer._plan.buckets if b.vector == "compressed"
        ]
        answers[name] = {
            "digest": digest(model),
            "route": type(bucket.route).__name__,
            "compressor": type(bucket.route.method.compressor).__name__,
        }
    return answers


def case_steps_per_execution():
    """Trains with four steps per execution."""
    return {"4": trained(METHODS["terngrad"], steps_per_execution=4)}


def case_stock():
    """Trains with plain Keras, and with the identity compressor."""
    tfgradcomp.enable_multi_worker_fit()
    return {
        "plain": trained(lambda: SGD(0.05)),
        "identity": trained(
            lambda: tfgradcomp.DistEFSGD(
                SGD(0.05), compressor="identity", transport="all_gather"
            )
        ),
    }


def case_eagerly():
    """Trains without a graph."""
    return trained(METHODS["terngrad"], run_eagerly=True)


def case_predict():
    """Predicts and evaluates numbers of rows that do not divide, after a fit."""
    model = make(METHODS["terngrad"])
    fit(model)
    answer = {}
    for size in (49, 13):
        first, second = model.get_weights()[:2], model.get_weights()[2:]
        want = np.maximum(X[:size] @ first[0] + first[1], 0) @ second[0] + second[1]
        got = model.predict(X[:size], batch_size=12, verbose=0)
        loss, mae = model.evaluate(X[:size], Y[:size], batch_size=12, verbose=0)
        answer[str(size)] = {
            "predict": float(np.abs(got - want).max())
            if got.shape == want.shape
            else 9,
            "mae": [mae, float(np.abs(want - Y[:size]).mean())],
            "loss": [loss, float(np.square(want - Y[:size]).mean())],
        }
    return answer


def case_empty_share():
    """Evaluates 13 rows in batches of 12, predicts one: a worker's share is empty."""
    images = np.random.default_rng(8).normal(size=(13, 8, 8, 1)).astype("float32")
    model = compiled(
        lambda: [
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Reshape((1, 16)),
            keras.layers.LSTM(8),
            keras.layers.Dense(3),
        ],
        METHODS["terngrad"],
        inputs=(8, 8, 1),
        metrics=["mae"],
    )
    _, mae = model.evaluate(images, Y[:13], batch_size=12, verbose=0)
    want = np.array(model(images))
    predicted = model.predict(images[:1], verbose=0)
    return {
        "mae": [mae, float(np.abs(want - Y[:13]).mean())],
        "predicted": [predicted.tolist(), want[:1].tolist()],
    }


def case_dict_inputs():
    """Trains on named inputs of a dataset."""
    keras.utils.set_random_seed(3)
    with scope():
        a, b = keras.Input((32,), name="a"), keras.Input((32,), name="b")
        hidden = keras.layers.Dense(40)(keras.layers.concatenate([a, b]))
        model = keras.Model({"a": a, "b": b}, keras.layers.Dense(3)(hidden))
        model.compile(METHODS["dist_ef_block_sgdm"](), "mse")
    data = tf.data.Dataset.from_tensor_slices(({"a": X[:, :32], "b": X[:, 32:]}, Y))
    model.fit(data.batch(12), epochs=2, verbose=0)
    return {"digest": digest(model)}


def case_keras_rules():
    """Trains by rules of the inner optimizer, with the identity compressor."""
    rules = {
        "accumulation": {"gradient_accumulation_steps": 2},
        "clipnorm": {"clipnorm": 0.1},
        "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    }
    return {
        name: trained(
            lambda rule=rule: tfgradcomp.DistEFSGD(
                SGD(0.05, **rule), "identity", transport="all_gather"
            ),
            steps_per_execution=2,
        )
        for name, rule in rules.items()
    }


def case_overflow():
    """Trains in mixed precision; one worker alone overflows in its second batch."""
    x = X.copy()
    x[22] = 6e4
    model = make(METHODS["dist_ef_block_sgdm"], policy="mixed_float16")
    fit(model, x, epochs=1)
    wrapper = model.optimizer.inner_optimizer
    return {
        "digest": digest(model),
        "scale": float(model.optimizer.dynamic_scale.numpy()),
        "iterations": int(tf.convert_to_tensor(wrapper.iterations)),
        "finite": bool(all(np.isfinite(w).all() for w in model.get_weights())),
    }


def case_nonfinite():
    """Trains with a NaN on worker 1 alone, which is an error."""
    model = make(METHODS["dist_ef_block_sgdm"])
    fit(model, epochs=1)
    before = digest(model), residuals(model)
    error = error_of_fit(
        model, poisoned(8)[:12], 1, kind=tf.errors.InvalidArgumentError
    )
    unchanged = before == (digest(model), residuals(model))
    return {"error": error, "unchanged": unchanged}


def case_skipping():
    """Trains with a NaN on worker 1 alone: a step is skipped, or a window of steps."""
    return {
        "skip": trained(
            lambda: METHODS["terngrad"](nonfinite="skip"), x=poisoned(8), epochs=1
        ),
        "window": trained(
            lambda: tfgradcomp.TernGrad(
                SGD(0.01, gradient_accumulation_steps=2),
                nonfinite="skip",
                transport="all_gather",
            ),
            x=poisoned(8)[:48],
            epochs=1,
        ),
    }


def case_no_iterator_to_build():
    """Counts the iterators of two epochs, of which a build needs none."""
    passes = []

    def generate():
        passes.append(1)
        yield from zip(X, Y, strict=True)

    spec = (tf.TensorSpec((64,)), tf.TensorSpec((3,)))
    data = tf.data.Dataset.from_generator(generate, output_signature=spec).batch(12)
    model = make(METHODS["terngrad"])
    model.fit(data, epochs=2, verbose=0)
    return {"passes": len(passes)}
