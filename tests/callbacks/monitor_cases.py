"""Trainings with CompressionMonitor and Timeline on the workers of a pool."""

import urllib.error
import urllib.request

import keras
import numpy as np

import tfgradcomp
from tests.fit.fit_models import (
    METHODS,
    SGD,
    digest,
    fit,
    make,
    poisoned,
    scope,
)
from tfgradcomp.callbacks import CompressionMonitor, Timeline

RATE, SIZE, ROWS = 0.1, 24, 12
random = np.random.default_rng(11)
# One step an epoch, of other rows for each worker.
X = random.normal(size=(ROWS, SIZE)).astype("float32")
Y = random.normal(size=(ROWS, 3)).astype("float32")
START = random.normal(size=(SIZE, 3)).astype("float32")


def regression(optimizer):
    """A linear model, whose gradients NumPy knows as well."""
    with scope():
        layer = keras.layers.Dense(3, use_bias=False)
        model = keras.Sequential([keras.Input((SIZE,)), layer])
        model.compile(optimizer(SGD(RATE)), "mse")
    model.set_weights([START])
    return model


class Scrape(keras.callbacks.Callback):
    """Reads the port of a monitor when an epoch has ended."""

    def __init__(self, monitor):
        super().__init__()
        self.monitor, self.text = monitor, ""

    def on_epoch_end(self, epoch, logs=None):
        url = f"http://127.0.0.1:{self.monitor.prometheus_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as reply:
            self.text = reply.read().decode()


def case_figures(folder):
    """Error feedback of signs, observed by both callbacks at once."""
    keras.utils.set_random_seed(1)
    model = regression(
        lambda inner: tfgradcomp.DistEFBlockSGD(inner, min_size=1, transport="sharded")
    )
    monitor = CompressionMonitor(
        f"{folder}/logs", every=1, prometheus_port=0, histograms="kernel"
    )
    timeline = Timeline(f"{folder}/trace.json", steps=(1, 3))
    scrape = Scrape(monitor)
    history = model.fit(
        *(X, Y),
        batch_size=ROWS,
        epochs=4,
        shuffle=False,
        verbose=0,
        callbacks=[monitor, timeline, scrape],
    ).history
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{monitor.prometheus_port}", timeout=5)
        is_closed = False
    except urllib.error.URLError:
        is_closed = True
    return {
        "history": history,
        "reading": monitor.reading,
        "text": scrape.text,
        "closed": is_closed,
        "probe": model.optimizer.stepper.probe is None,
    }


def case_votes():
    """Votes of two workers, every second step."""
    model = regression(
        lambda inner: tfgradcomp.SignSGD(inner, min_size=1, transport="all_reduce")
    )
    return model.fit(
        *(X, Y),
        batch_size=ROWS,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[CompressionMonitor(every=2)],
    ).history


def case_bits(name, folder):
    """The weights of a training with the callbacks and without."""

    def run(callbacks):
        if name == "all at once":
            # Loops, windows, skipped steps, steps in float32, a loss scale.
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
