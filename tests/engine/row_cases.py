"""Slices of a table, and METHODS of compression on its rows in NumPy.

Nothing of the NumPy part uses the package.
"""

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests import reference

ROWS, WIDTH, RATE, SEED = 40, 3, 0.5, 11
SIZE = ROWS * WIDTH
# Rows of the table by steps and workers: overlapping, several times, on one worker
# alone, and in the last step but one on none.
TOUCHED = [
    [[3, 7, 7, 12], [7, 30], [12, 0, 0, 0]],
    [[], [5, 39, 5], [39, 7]],
    [[1, 2, 3, 4, 5, 6, 7, 8], [], [2]],
    [[], [], []],
    [[7, 3], [3, 7], [7, 7]],
]
STEPS = len(TOUCHED)
METHODS = {
    "identity": lambda inner, **kw: tfgradcomp.CompressedOptimizer(
        inner, tfgradcomp.compressors.Identity(), tfgradcomp.servers.Mean(), **kw
    ),
    "TernGrad": lambda inner, **kw: tfgradcomp.TernGrad(inner, seed=SEED, **kw),
    "SignSGD": lambda inner, **kw: tfgradcomp.SignSGD(inner, seed=SEED, **kw),
    "DistEFBlockSGDM": lambda inner, **kw: tfgradcomp.DistEFBlockSGDM(
        inner, momentum=0.75, weight_decay=0.125, **kw
    ),
    "QSGD": lambda inner, **kw: tfgradcomp.QSGD(
        inner, levels=5, block_size=16, error_feedback=True, seed=SEED, **kw
    ),
}


def slices_of(step, rank):
    """Indices and values of a worker's gradient in a step."""
    rng = np.random.default_rng([step, rank])
    indices = np.array(TOUCHED[step][rank], np.int32)
    values = rng.normal(size=(len(indices), WIDTH)).astype(np.float32)
    return indices, values


def dense_of(step, rank):
    """The same as a dense gradient."""
    dense = np.zeros([ROWS, WIDTH])
    np.add.at(dense, *slices_of(step, rank))
    return dense


def first_table():
    """The table before the first step."""
    return np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype(np.float32)


def make_table(name, inner=None, **arguments):
    """A table and its optimizer."""
    table = keras.Variable(first_table(), name="table")
    inner = inner or keras.optimizers.SGD(RATE)
    arguments = {"min_size": 1, "sparse": "table", **arguments}
    return table, METHODS[name](inner, **arguments)


def apply(optimizer, table, indices, values):
    """Takes a step on slices."""
    gradient = tf.IndexedSlices(
        tf.convert_to_tensor(values, tf.float32),
        tf.convert_to_tensor(indices, tf.int32),
        tf.constant([ROWS, WIDTH]),
    )
    optimizer.apply([gradient], [table])


class Lazy:
    """A method on a table: state of all rows, read and written at those touched."""

    def __init__(self, method, workers, block_size=None):
        self.method, self.workers, self.block_size = method, workers, block_size
        self.state = reference.Workers(method, workers, [0, SIZE])

    def update(self, step, gradients, weights, places):
        """The update of the rows of U; gradients `[N, |U| k]`, places in the table."""
        size = len(places)
        splits = [*range(0, size, self.block_size or size), size]
        touched = reference.Workers(self.method, self.workers, splits, SEED)
        touched.unit = self.state.unit
        names = ("m", "e", "server_e", "decay_m")
        for name in names:
            setattr(touched, name, getattr(self.state, name)[..., places])
        update = touched.update(step, gradients, weights, RATE)
        for name in names:
            getattr(self.state, name)[..., places] = getattr(touched, name)
        self.state.unit = touched.unit
        return update


def lazily(name, workers, steps=range(STEPS)):
    """The table after each step, and the last state, by METHODS section 8."""
    _, optimizer = make_table(name)
    method = Lazy(optimizer.method, workers, optimizer.block_size)
    table = first_table().astype(np.float64).reshape(-1)
    tables = []
    for step in steps:
        dense = np.stack([dense_of(step, rank) for rank in range(workers)])
        union = sorted({i for rows in TOUCHED[step][:workers] for i in rows})
        places = np.arange(SIZE).reshape([ROWS, WIDTH])[union].reshape(-1)
        if union:
            gradients = dense.reshape([workers, -1])[:, places]
            update = method.update(step, gradients, table[places], places)
            table[places] -= RATE * update
        tables.append(table.reshape([ROWS, WIDTH]).copy())
    return tables, method.state
