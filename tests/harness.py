"""Small trainings that tests repeat: by `fit`, or steps on given gradients.

model = fit(lambda: TernGrad("sgd"), units=(300, 2))      # on a pool's workers
replicas = Replicas(lambda: TernGrad("sgd"), values)      # on a pool's workers
results = Loopback(2).run(lambda rank, collectives: ...)  # `Worker`s as threads
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tests.cluster import strategy_and_rank
from tests.helpers import Rates, bits, flat, make_variables, split


def digest(values) -> str:
    """Returns a hash of a model's weights, or of a list of arrays."""
    values = values.get_weights() if isinstance(values, keras.Model) else values
    data = b"".join(np.asarray(value).tobytes() for value in values)
    return hashlib.sha256(data).hexdigest()


def unsharded(data: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the data with each worker's batches left to that worker."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    return data.with_options(options)


def make_model(make_optimizer, units=(300, 2), features=8, **compile_arguments):
    """Returns a compiled model of dense layers under this process' strategy."""
    strategy, _ = strategy_and_rank()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(width) for width in units]
        model = keras.Sequential([keras.Input((features,)), *layers])
        model.compile(make_optimizer(), "mse", **compile_arguments)
    return model


def fit(model, rows=16, batch_size=8, epochs=1, shift=0.0) -> keras.Model:
    """Trains on normal numbers, other ones on each worker; returns the model."""
    _, rank = strategy_and_rank()
    rng = np.random.default_rng(rank)
    shapes = model.input_shape[1:], model.output_shape[1:]
    x, y = (shift + rng.normal(size=(rows, *shape)) for shape in shapes)
    model.fit(*(x, y), batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return model


class Replicas:
    """An optimizer and its variables under a strategy, for steps on given gradients.

    Args:
        make_optimizer: Function without arguments.
        values: First values of the variables.
        strategy: This process' strategy, if not given.
    """

    def __init__(self, make_optimizer, values, strategy=None):
        self.strategy = strategy or strategy_and_rank()[0]
        self.number = self.strategy.num_replicas_in_sync
        with self.strategy.scope():
            self.variables = [
                keras.Variable(np.asarray(value, np.float32), name=f"weight_{i}")
                for i, value in enumerate(values)
            ]
            self.optimizer = make_optimizer()
            self.optimizer.build(self.variables)
        self._shapes = [tuple(v.shape) for v in self.variables]
        # Conversion by autograph would take most of the time.
        self.function = tf.function(self.step_eagerly, autograph=False)

    def step(self, gradients, moments=None, positions=None):
        """Takes a step.

        Args:
            gradients: The mean gradients of all replicas, `[N, size]`.
            moments: Second moments in the same units, `[N, size]`.
            positions: The variables that have a gradient; all, if not given.
        """
        given = {} if moments is None else {"moments": tf.constant(moments)}
        if positions is not None:
            given["positions"] = positions
        self.function(tf.constant(gradients), **given)

    def step_eagerly(self, gradients, moments=None, positions=None):
        """Takes a step outside of a function."""
        chosen = range(len(self.variables)) if positions is None else positions

        def of_replica():
            context = tf.distribute.get_replica_context()
            rank = context.replica_id_in_sync_group
            # Keras divides the loss.
            own = self._parts(tf.gather(gradients, rank) / self.number)
            given = {}
            if moments is not None:
                scaled = tf.gather(moments, rank) / self.number**2
                parts = self._parts(scaled)
                given["second_moments"] = [parts[i] for i in chosen]
            given_gradients = [own[i] for i in chosen]
            variables = [self.variables[i] for i in chosen]
            self.optimizer.apply(given_gradients, variables, **given)

        self.strategy.run(of_replica)

    def weights(self) -> np.ndarray:
        """Returns the weights of this process' replicas, `[local replicas, size]`."""
        local = self.strategy.experimental_local_results
        values = [[v.numpy().ravel() for v in local(w.value)] for w in self.variables]
        return np.stack([np.concatenate(own) for own in zip(*values, strict=True)])

    def _parts(self, vector):
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        parts = tf.split(vector, sizes)
        return [tf.reshape(p, s) for p, s in zip(parts, self._shapes, strict=True)]


# TensorFlow looks at each type of argument once. Two threads that did so at the same
# time have crashed it, so this thread is the first.
keras.optimizers.SGD(Rates([0.1])).apply([tf.zeros(1)], [keras.Variable([0.0])])


class Saved(NamedTuple):
    """What a worker's files hold: weights, the wrapper's state, the inner state."""

    weights: list[np.ndarray]
    state: dict[str, np.ndarray]
    inner: dict[str, np.ndarray]

    def bits(self) -> list[bytes]:
        """Returns all of it as it is in memory, for comparisons."""
        # Where the length of messages varies, each bucket counts words of its own.
        state = [value for name, value in self.state.items() if name != "moved"]
        return [bits(v) for v in (*self.weights, *state, *self.inner.values())]


class Worker:
    """An optimizer and its variables, one of several workers that are threads.

    Args:
        optimizer: The optimizer, not yet built.
        shapes: Shapes of the variables.
        saved: Where the worker goes on; from the start, if not given.
    """

    def __init__(self, optimizer, shapes, saved: Saved | None = None):
        self.optimizer, self.variables = optimizer, make_variables(shapes)
        self._shapes = shapes
        optimizer.build(self.variables)
        if saved is not None:
            self.load(saved)

    def step(self, gradients, moments=None):
        """Takes a step on gradients, one vector or one for each variable."""
        given = {"second_moments": self._parts(moments)} if moments is not None else {}
        self.optimizer.apply(self._parts(gradients), self.variables, **given)

    def weights(self) -> np.ndarray:
        """Returns the weights as one vector."""
        return flat([v.numpy() for v in self.variables])

    def save(self) -> Saved:
        """Returns what Keras would write into this worker's file."""
        stores = []
        for optimizer in (self.optimizer, self.optimizer.inner_optimizer):
            store = {}
            optimizer.save_own_variables(store)
            stores.append({name: np.array(value) for name, value in store.items()})
        return Saved([v.numpy() for v in self.variables], *stores)

    def load(self, saved: Saved):
        """Takes what Keras would read from this worker's file."""
        for variable, value in zip(self.variables, saved.weights, strict=True):
            variable.assign(value)
        self.optimizer.load_own_variables(saved.state)
        self.optimizer.inner_optimizer.load_own_variables(saved.inner)

    def _parts(self, values):
        if isinstance(values, np.ndarray) and values.ndim == 1:
            values = split(values, self._shapes)
        return [v if v is None else tf.convert_to_tensor(v) for v in values]
