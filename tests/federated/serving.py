"""A hub in a thread, with a model and data that are the same in each training."""

import threading

import keras
import numpy as np
import tensorflow as tf

from tests.federated import programs
from tfgradcomp.federated import Hub

EVERY = 4


def make_model():
    keras.utils.set_random_seed(0)
    return programs.make_model()


def make_data(count=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=[count, 8]).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1))).batch(16)


class Serving:
    """A hub in a thread."""

    def __init__(self, rounds, serve=None, **arguments):
        self.hub = Hub(make_model, insecure=True, **arguments)
        self._thread = threading.Thread(
            target=lambda: self.hub.serve(rounds, deadline=60, **(serve or {})),
            daemon=True,
        )

    def __enter__(self):
        self._thread.start()
        return self.hub

    def __exit__(self, *error):
        self._thread.join(60)
        assert not self._thread.is_alive()
