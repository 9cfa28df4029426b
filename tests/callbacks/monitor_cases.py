"""Trainings with CompressionMonitor and Timeline on the workers of a pool."""

import urllib.error
import urllib.request

import keras
import numpy as np

import tfgradcomp
from tests.fit.fit_models import METHODS, SGD, digest, fit, make, poisoned, scope
from tfgradcomp.callbacks import CompressionMonitor, Timeline

RATE, SIZE, ROWS = 0.1, 24, 12
random = np.random.default_rng(11)
# One step per epoch; each worker has other rows.
X = random.normal(size=(ROWS, SIZE)).astype("float32")
Y = random.normal(size=(ROWS, 3)).astype("float32")
START = random.normal(size=(SIZE, 3)).astype("float32")


def regression(optimizer):
    """A linear model, whose gradients NumPy computes as well."""
    with scope():
        layer = keras.layers.Dense(3, use_bias=False)
        model = keras.Sequential([keras.Input((SIZE,)), layer])
        model.compile(optimizer(), "mse")
    model.set_weights([START])
    return model


def fit_regression(model, epochs, callbacks, batch_size=ROWS):
    """Trains the linear model; returns the history."""
    options = {"batch_size": batch_size, "shuffle": False, "verbose": 0}
    return model.fit(X, Y, epochs=epochs, callbacks=callbacks, **options).history


class Scrape(keras.callbacks.Callback):
    """Reads the port of a monitor at the end of each epoch."""

    def __init__(self, monitor):
        super().__init__()
        self.monitor, self.text = monitor, ""

    def on_epoch_end(self, epoch, logs=None):
        url = f"http://127.0.0.1:{self.monitor.prometheus_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as reply:
            self.text = reply.read().decode()


def case_figures(folder):
    """Signs with error feedback, observed by both callbacks at once."""
    keras.utils.set_random_seed(1)
    settings = {"min_size": 1, "transport": "sharded"}
    model = regression(lambda: tfgradcomp.DistEFBlockSGD(SGD(RATE), **settings))
    monitor = CompressionMonitor(
        f"{folder}/logs", every=1, prometheus_port=0, histograms="kernel"
    )
    timeline = Timeline(f"{folder}/trace.json", steps=(1, 3))
    scrape = Scrape(monitor)
    history = fit_regression(model, 4, [monitor, timeline, scrape])
    is_closed = False
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{monitor.prometheus_port}", timeout=5)
    except urllib.error.URLError:
        is_closed = True
    return {
        "history": history,
        "reading": monitor.reading,
        "text": scrape.text,
        "closed": is_closed,
        "probe": not model.optimizer.stepper.observers,
    }


def case_votes():
    """Votes of two workers, every second step."""
    settings = {"min_size": 1, "transport": "all_reduce"}
    model = regression(lambda: tfgradcomp.SignSGD(SGD(RATE), **settings))
    return fit_regression(model, 3, [CompressionMonitor(every=2)])


def case_bits(name, folder):
    """The weights of a training with the callbacks, and without."""

    def run(callbacks):
        if name == "all at once":
            # Several steps per execution, accumulation, skipped and uncompressed steps,
            # and a loss scale.
            model = make(
                lambda: tfgradcomp.DistEFBlockSGDM(
                    SGD(0.01, gradient_accumulation_steps=2),
                    transport="sharded",
                    bucket_bytes=2**14,
                    min_size=3,
                    warmup_steps=1,
                    dense_every=3,
                    nonfinite="skip",
                ),
                units=600,
                policy="mixed_float16",
                steps_per_execution=4,
            )
            fit(model, poisoned(13), epochs=4, callbacks=callbacks)
        else:
            arguments = {"bucket_bytes": 2**14, "min_size": 3}
            model = make(lambda: METHODS[name](**arguments), units=600)
            fit(model, callbacks=callbacks)
        return digest(model), model.history.history

    expected, _ = run([])
    timeline = Timeline(f"{folder}/trace.json", steps=(0, 4))
    found, history = run([CompressionMonitor(every=2), timeline])
    figures = {k: v for k, v in history.items() if k.startswith("compression/")}
    return {"expected": expected, "found": found, "figures": figures}
