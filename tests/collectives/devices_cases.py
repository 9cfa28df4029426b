"""Workers of two devices each: four logical devices of one process as two hosts."""

import functools

import keras
import numpy as np
import tensorflow as tf

import tests.methods
import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.harness import Replicas
from tfgradcomp.collectives import assign_hosts
from tfgradcomp.compressors import Identity, NesterovMomentum, ScaledSign
from tfgradcomp.servers import Mean

# 110 elements are compressed; the last variable is too small.
SHAPES = [(6, 10), (50,), (11,)]
RATE, SKIPPED = 0.1, 1


def strategy_of(hosts):
    """Two hosts of two devices, or two devices that are a worker each."""
    return _strategy_of(tuple(hosts))


@functools.cache
def _strategy_of(hosts):
    # One strategy per kind: each counts the keys of TensorFlow's eager collectives from
    # 100, and a key is bound to one shape.
    strategy_and_rank()
    names = [f"CPU:{index}" for index in range(len(hosts))]
    strategy = tf.distribute.MirroredStrategy(names)
    if len(set(hosts)) < len(hosts):
        assign_hosts(strategy, hosts)
    return strategy


class Training(Replicas):
    """An optimizer and its variables under a strategy with these hosts."""

    def __init__(
        self, hosts, make, shapes=SHAPES, store=None, weights=None, strategy=None
    ):
        values = weights or [np.zeros(shape) for shape in shapes]
        super().__init__(make, values, strategy or strategy_of(hosts))
        if store is not None:
            self.optimizer.load_own_variables(store)

    def take(self, gradients, moments=None, eagerly=False):
        """Takes steps; returns all devices' weights after each, `[steps, R, size]`."""
        step = self.step_eagerly if eagerly else self.step
        weights = []
        for index, of_step in enumerate(gradients):
            step(of_step, *([] if moments is None else [moments[index]]))
            weights.append(self.weights())
        return np.stack(weights)

    def saved(self):
        store = {}
        self.optimizer.save_own_variables(store)
        return {name: np.asarray(value) for name, value in store.items()}


def gradients_of(steps, replicas=4, shapes=SHAPES, seed=0):
    size = sum(int(np.prod(shape)) for shape in shapes)
    rng = np.random.default_rng(seed)
    return rng.normal(size=(steps, replicas, size)).astype(np.float32)


def dist_ef(**arguments):
    return tfgradcomp.DistEFBlockSGD(
        keras.optimizers.SGD(RATE), min_size=20, nonfinite="skip", **arguments
    )


def follow():
    """Trains with two-way error feedback; resumes on two devices per host and on one.

    In one step one device of one host has a NaN in the other device's part.
    """
    gradients = gradients_of(5)
    gradients[SKIPPED, 3, 2] = np.nan
    whole = Training([0, 0, 1, 1], dist_ef)
    weights = whole.take(gradients[:3])
    store = whole.saved()
    values = [variable.numpy() for variable in whole.variables]
    weights = np.concatenate([weights, whole.take(gradients[3:])])
    again = Training([0, 0, 1, 1], dist_ef, store=store, weights=values)
    narrow = Training([0, 1], dist_ef, store=store, weights=values)
    optimizer = whole.optimizer
    return {
        "weights": weights,
        "state": whole.saved(),
        "sizes": [tuple(v.shape) for v in optimizer.variables if "residual" in v.name],
        "skipped": optimizer.skipped_steps,
        "traffic": optimizer.traffic,
        "words": [
            sum(part.route.words.sent for part in bucket.parts)
            for bucket in optimizer.stepper.buckets
        ],
        "resumed": again.take(gradients[3:]),
        "narrow": [store, narrow.saved()],
        "errors": [error_of(hosts) for hosts in NO_HOSTS],
    }


def by_shards():
    """Trains with the server spread over the hosts, and with one on each."""
    gradients = gradients_of(3)
    return [
        Training([0, 0, 1, 1], lambda name=name: dist_ef(transport=name)).take(
            gradients
        )
        for name in ("all_gather", "sharded")
    ]


NO_HOSTS = [0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 1], [1, 1, 0, 0]


def error_of(hosts):
    """Returns the error of a map of hosts that is not one."""
    strategy_and_rank()
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    try:
        assign_hosts(strategy, hosts)
    except ValueError as error:
        return str(error)
    return ""


# The border between the two parts lies at 64 of 128 elements, between two blocks.
EVEN = [(8, 8), (64,)]


def compare_with_one_device(names, eagerly=False):
    """Trains methods on workers of two devices, and of one that gets their mean."""
    results = {}
    # First, because the devices must be configured before their first use.
    strategy_of([0, 0, 1, 1])
    gradients = gradients_of(3, shapes=EVEN)
    means = gradients.reshape(3, 2, 2, -1).mean(2)
    # Sums over examples, for a device's terms and for the terms of the mean.
    moments = np.square(gradients) * np.float32(0.75) + np.float32(0.25)
    fewer = moments.reshape(3, 2, 2, -1).sum(2) / 4
    for name in names:
        row = tests.methods.ROWS[name]

        def make(row=row, **blocks):
            wrapper = getattr(tfgradcomp, row.wrapper)
            arguments = {"min_size": 0, **row.arguments, **blocks}
            return wrapper(keras.optimizers.SGD(RATE), **arguments)

        block_size = make().method.block_size
        if block_size == "model":
            # The only block crosses the border.
            continue
        if block_size and 64 % block_size:
            chunks = {"k": 4, "chunk": 32}
            cut = {"block_size": 32} if row.takes("block_size") else chunks
            make = functools.partial(make, **cut)

        given = (moments, fewer) if row.needs_second_moments else (None, None)
        two = Training([0, 0, 1, 1], make, EVEN).take(gradients, given[0], eagerly)
        one = Training([0, 1], make, EVEN).take(means, given[1])
        results[name] = two, one
    return results


def uncompressed_steps():
    """Trains with uncompressed steps among the others, and with momentum."""

    def make():
        return tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(RATE),
            NesterovMomentum(ScaledSign(), 0.5),
            Mean(ScaledSign()),
            min_size=0,
            warmup_steps=1,
            dense_every=3,
        )

    gradients = gradients_of(4, shapes=EVEN)
    means = gradients.reshape(4, 2, 2, -1).mean(2)
    two = Training([0, 0, 1, 1], make, EVEN).take(gradients)
    one = Training([0, 1], make, EVEN).take(means)
    return two, one


def in_one_process():
    """Takes the steps of `devices_program` in one process."""
    training = Training([0, 0, 1, 1], dist_ef)
    weights = training.take(gradients_of(3))
    return weights, training.saved()["compressed.worker.residual"]


X = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)


def fit(local_steps):
    """Trains by `fit_on`; with local steps if their number is not 0."""

    def local():
        # With the identity, the mean of the weights.
        outer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(1.0), Identity(), Mean(Identity()), min_size=0
        )
        inner = keras.optimizers.SGD(RATE)
        return tfgradcomp.LocalSteps(inner, outer, every=local_steps)

    return fit_on(strategy_of([0, 0, 1, 1]), local if local_steps else dist_ef)


def fit_on(strategy, make):
    """Trains a layer; returns its weights on all local devices, and the losses."""
    with strategy.scope():
        optimizer = make()
        initial = keras.initializers.Constant(0.1)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(2, kernel_initializer=initial)]
        )
        model.compile(optimizer, "mse", steps_per_execution=2)
    history = model.fit(X, X[:, :2], batch_size=8, shuffle=False, verbose=0)
    local = strategy.experimental_local_results
    weights = [[v.numpy() for v in local(w.value)] for w in model.weights]
    return weights, history.history["loss"]
