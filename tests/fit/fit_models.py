"""Small models, methods and data for the tests of `model.fit` on several workers.

Under MirroredStrategy one process is both workers, one on each of its two devices.
"""

import contextlib
import functools
import hashlib
import itertools
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tfgradcomp.collectives import Replicas, TcpCollectives

SGD = keras.optimizers.SGD
random = np.random.default_rng(7)
X = random.normal(size=(60, 64)).astype("float32")
Y = random.normal(size=(60, 3)).astype("float32")


def strategy():
    """This process' one strategy."""
    return strategy_and_rank()[0]


def scope():
    """The scope of this process' strategy."""
    return strategy().scope()


def own_rank():
    """This process' rank."""
    return strategy_and_rank()[1]


def local_values(variable):
    """The values of a Keras variable on the local replicas."""
    locals_ = strategy().experimental_local_results(variable.value)
    return [value.numpy() for value in locals_]


def digest(model):
    """A hash of the weights."""
    data = b"".join(w.tobytes() for w in model.get_weights())
    return hashlib.sha256(data).hexdigest()


def residuals(model):
    """A hash of each worker's own state."""
    return {
        v.name: hashlib.sha256(v.local_values().tobytes()).hexdigest()
        for v in model.optimizer._state.variables()
    }


def sequential(build, inputs=(64,), seed=3):
    """A model of the layers that `build` returns once the seed is set."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input(inputs), *build()])


def two_layers(units=40, last="second"):
    """Layers with a large and a small kernel."""
    first = keras.layers.Dense(units, activation="relu", name="first")
    return [first, keras.layers.Dense(3, name=last)]


def compiled(build, optimizer, inputs=(64,), **kwargs):
    """A model of some layers, compiled in the scope with an optimizer made there."""
    with scope():
        model = sequential(build, inputs)
        model.compile(optimizer(), "mse", **kwargs)
    return model


def make(optimizer, policy="float32", units=40, last="second", **kwargs):
    """A compiled model of two layers."""
    keras.backend.clear_session()
    keras.mixed_precision.set_global_policy(policy)
    build = functools.partial(two_layers, units, last)
    return compiled(build, optimizer, metrics=["mae"], **kwargs)


def fit(model, x=X, epochs=2, **kwargs):
    """Trains on global batches of 12; returns the history."""
    kwargs = {"batch_size": 12, "verbose": 0, "shuffle": False, **kwargs}
    return model.fit(x, Y[: len(x)], epochs=epochs, **kwargs).history


def error_of_fit(model, *args, kind=ValueError, **kwargs):
    """The message of the error that `fit` ends in; None if it ends well."""
    try:
        fit(model, *args, **kwargs)
    except kind as error:
        return str(error)
    return None


def trained(optimizer, epochs=2, x=X, fit_arguments=None, **kwargs):
    """Trains a new model; returns weights, traffic, history and counters."""
    model = make(optimizer, **kwargs)
    history = fit(model, x, epochs, **(fit_arguments or {}))
    traffic = getattr(model.optimizer, "traffic", None)
    return {
        "digest": digest(model),
        "traffic": traffic
        and {
            "sent": traffic.words_sent,
            "received": traffic.words_received,
            "up": traffic.bits_per_element_up,
            "ratio": traffic.ratio,
        },
        "weights": [w.tolist() for w in model.get_weights()],
        "history": history,
        "iterations": int(tf.convert_to_tensor(model.optimizer.iterations)),
        "skipped": getattr(model.optimizer, "skipped_steps", None),
    }


def assert_close(found, expected, rtol=1e-4, atol=1e-5):
    """Compares lists of arrays, by default up to the order of summation."""
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def poisoned(row):
    """The inputs with one NaN; batches of 12 alternate: 6 rows to each worker."""
    x = X.copy()
    x[row, 5] = np.nan
    return x


def method(name, sgd, transport="all_gather", **defaults):
    """A function that makes an optimizer, with a transport that no clock chooses."""
    rate, momentum = sgd

    def make_one(accumulation=None, **kwargs):
        inner = SGD(rate, momentum=momentum, gradient_accumulation_steps=accumulation)
        settings = {"transport": transport, **defaults, **kwargs}
        return getattr(tfgradcomp, name)(inner, **settings)

    return make_one


METHODS = {
    "terngrad": method("TernGrad", (0.01, 0.9)),
    "terngrad_own_scale": method("TernGrad", (0.01, 0.0), share_scaler=False),
    "signsgd": method("SignSGD", (1e-3, 0.0)),
    "signum": method("Signum", (1e-3, 0.0)),
    "dist_ef_sgd": method("DistEFSGD", (0.01, 0.0)),
    "dist_ef_block_sgd": method("DistEFBlockSGD", (0.01, 0.0)),
    "dist_ef_block_sgdm": method("DistEFBlockSGDM", (0.01, 0.0), weight_decay=1e-3),
    "half_precision": method("HalfPrecision", (0.01, 0.0), "all_reduce"),
    "orq": method("ORQ", (0.01, 0.9), levels=5, reply="requantize"),
    "variance_based": method("VarianceBased", (0.01, 0.9)),
    "strom": method("Strom", (0.05, 0.0), "auto", threshold=0.02),
    "hybrid": method(
        "Hybrid", (0.05, 0.0), threshold=0.01, alpha=1.3, index_coding="delta"
    ),
}


@contextlib.contextmanager
def recorded():
    """Lists of calls (call site, size, type), and of sizes that vary."""
    seen, varying = [], []

    def recording(original):
        def call(self, vector, call_site):
            if vector.shape[0] is None:
                tf.py_function(lambda n: varying.append(int(n)), [tf.size(vector)], [])
            elif not call_site.startswith(("fit/", "statistics/")):
                seen.append((call_site, int(vector.shape[0]), vector.dtype.name))
            return original(self, vector, call_site)

        return call

    with contextlib.ExitStack() as stack:
        for kind, name in itertools.product(
            (Replicas, TcpCollectives), ("gather", "sum", "max")
        ):
            method = recording(getattr(kind, name))
            stack.enter_context(mock.patch.object(kind, name, method))
        yield seen, varying
