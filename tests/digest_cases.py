"""Short runs of every method whose final weights are compared with recorded digests.

The gradients are given, so that no sum of a matrix product, whose order differs between
processors, is part of a run.
"""

import hashlib

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.methods import ROWS
from tfgradcomp.collectives import assign_hosts
from tfgradcomp.servers import Recompress

STEPS = 20
SHAPES = [(40, 30), (7,), (8, 65), (5,)]
TABLE = (30, 4)
SGD = keras.optimizers.SGD


def from_row(row):
    """A row of the table of methods, by shards where blocks may have any size."""
    is_cut = "sharded" in row.transports and not isinstance(row.server, Recompress)
    transport = "sharded" if is_cut else "all_gather"
    return lambda: row.make_to_train(
        transport=transport, min_size=50, seed=3, bucket_bytes=3000
    )


def local_steps(**arguments):
    return tfgradcomp.LocalSteps(
        keras.optimizers.SGD(0.02, momentum=0.5),
        tfgradcomp.DistEFBlockSGD(SGD(0.9), transport="sharded", min_size=50),
        **arguments,
    )


def with_policy():
    return tfgradcomp.TernGrad(
        SGD(0.01),
        transport="sharded",
        min_size=50,
        policy=[
            ("weight_0", tfgradcomp.DistEFBlockSGD.for_layers()),
            ("weight_1", "float32"),
        ],
    )


def with_uncompressed_steps():
    return tfgradcomp.DistEFBlockSGDM(
        SGD(0.01),
        transport="sharded",
        min_size=50,
        warmup_steps=2,
        dense_every=5,
        residual_dtype="bfloat16",
        weight_decay=1e-3,
    )


def with_accumulation():
    inner = SGD(0.05, gradient_accumulation_steps=3, clipnorm=1.0)
    return tfgradcomp.VarianceBased(inner, min_size=50)


def with_adam():
    inner = keras.optimizers.AdamW(1e-3, use_ema=True)
    return tfgradcomp.QSGD(inner, reply="requantize", transport="sharded", min_size=50)


def on_rows(wrapper, **arguments):
    return lambda: wrapper(SGD(0.01), sparse="weight_0", min_size=1, **arguments)


FITS = {
    "LocalSteps": lambda: local_steps(every=3),
    "LocalSteps, stagger": lambda: local_steps(every=4, stagger=True),
    "LocalSteps, delay": lambda: local_steps(every=4, delay=3),
    "LocalSteps, delay, mix": lambda: local_steps(
        every=6, stagger=True, delay=2, mix=0.25
    ),
    "policy": with_policy,
    "uncompressed steps": with_uncompressed_steps,
    "accumulation": with_accumulation,
    "AdamW inside": with_adam,
    "OneBitAdam": lambda: tfgradcomp.OneBitAdam(
        keras.optimizers.Adam(1e-3), 4, transport="sharded", min_size=50
    ),
    "OneBitLAMB": lambda: tfgradcomp.OneBitLAMB(
        keras.optimizers.Lamb(1e-3), 4, transport="sharded", min_size=50
    ),
    "ZeroOneAdam": lambda: tfgradcomp.ZeroOneAdam(
        keras.optimizers.AdamW(1e-3),
        4,
        refresh=2,
        local_steps=3,
        double_every=4,
        transport="all_gather",
        min_size=50,
    ),
}
TABLES = {
    "table, TernGrad": on_rows(tfgradcomp.TernGrad),
    "table, DistEFBlockSGDM": on_rows(
        tfgradcomp.DistEFBlockSGDM, weight_decay=0.1, transport="sharded"
    ),
    "table, Strom": on_rows(tfgradcomp.Strom, threshold=0.1),
}
CASES = {**{name: from_row(row) for name, row in ROWS.items()}, **FITS, **TABLES}
DEVICES = {
    f"devices, {name}": from_row(ROWS[name])
    for name in ("TernGrad", "DistEFBlockSGDM", "VarianceBased", "HalfPrecision")
}


def digests(cases):
    """The digest of each case's weights after its steps, by the case's name."""
    strategy, _ = strategy_and_rank()
    if cases == "devices":
        assign_hosts(strategy, [0, 0, 1, 1])
        return {name: _digest(strategy, make, SHAPES) for name, make in DEVICES.items()}
    return {
        name: _digest(strategy, make, [TABLE] if name in TABLES else SHAPES)
        for name, make in CASES.items()
    }


def _digest(strategy, make, shapes):
    replicas = strategy.num_replicas_in_sync
    sizes = [int(np.prod(shape)) for shape in shapes]
    rng = np.random.default_rng(1)
    table = rng.normal(size=(STEPS, replicas, sum(sizes)))
    table += rng.normal(size=sum(sizes))
    table[rng.random(table.shape) < 0.05] = 0
    touched = rng.integers(TABLE[0], size=(STEPS, replicas, 6))
    with strategy.scope():
        variables = [
            keras.Variable(rng.normal(size=shape).astype("float32"), name=f"weight_{i}")
            for i, shape in enumerate(shapes)
        ]
        optimizer = make()
        optimizer.build(variables)

    @tf.function(autograph=False)
    def step(gradients, rows):
        def of_replica():
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
            vector = tf.gather(gradients, rank) / replicas
            parts = tf.split(vector, sizes)
            grads = [tf.reshape(p, s) for p, s in zip(parts, shapes, strict=True)]
            if shapes == [TABLE]:
                indices = tf.gather(rows, rank)
                values = tf.gather(grads[0], indices)
                grads = [tf.IndexedSlices(values, indices, tf.constant([*TABLE]))]
            given = {}
            if getattr(optimizer, "needs_second_moments", False):
                given["second_moments"] = [0.4 * g * g + 1e-4 for g in grads]
            optimizer.apply(grads, variables, **given)

        strategy.run(of_replica)

    for gradients, rows in zip(table.astype("float32"), touched, strict=True):
        step(tf.constant(gradients), tf.constant(rows))
    found = hashlib.sha256()
    for variable in variables:
        for value in strategy.experimental_local_results(variable.value):
            found.update(value.numpy().tobytes())
    return found.hexdigest()[:16]
