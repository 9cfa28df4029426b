"""Runs in which a variable has no gradient in some steps, on a pool's workers."""

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.harness import Replicas, fit, make_model
from tests.methods import ROWS
from tfgradcomp.collectives import assign_hosts

SHAPES = [(30, 20), (700,), (9, 40)]
STEPS, WAITS = 8, range(3, 6)
SGD = keras.optimizers.SGD


def local_steps(momentum=0.5, **arguments):
    """An optimizer whose differences of weights travel as one bit, in shards."""
    outer = tfgradcomp.DistEFBlockSGDM(SGD(0.7), min_size=1, transport="sharded")
    return tfgradcomp.LocalSteps(SGD(0.02, momentum), outer, **arguments)


OTHERS = {
    "LocalSteps": lambda: local_steps(every=2),
    "LocalSteps, stagger": lambda: local_steps(every=3, stagger=True),
    "LocalSteps, delay": lambda: local_steps(every=3, delay=2, mix=0.5),
    "OneBitAdam": lambda: tfgradcomp.OneBitAdam(
        keras.optimizers.AdamW(1e-2), 2, min_size=1
    ),
    "OneBitLAMB": lambda: tfgradcomp.OneBitLAMB(
        keras.optimizers.Lamb(1e-2, weight_decay=1e-3), 2, min_size=1
    ),
    "ZeroOneAdam": lambda: tfgradcomp.ZeroOneAdam(
        keras.optimizers.AdamW(1e-2), 2, local_steps=2, double_every=1, min_size=1
    ),
}


def _make(name, transport):
    if name in OTHERS:
        return OTHERS[name]()
    return ROWS[name].make_to_train(transport=transport, min_size=1, seed=3)


def run(name, transport, waits, hosts=None):
    """Trains three variables; the second has no gradient in the steps `waits`.

    Returns:
        After each step, for each local replica: the weights of each variable, and all
        vectors of state.
    """
    strategy, _ = strategy_and_rank()
    if hosts:
        assign_hosts(strategy, hosts)
    replicas = Replicas(lambda: _make(name, transport), [np.ones(s) for s in SHAPES])
    optimizer, size = replicas.optimizer, sum(int(np.prod(shape)) for shape in SHAPES)
    table = np.random.default_rng(0).normal(size=(STEPS, replicas.number, size))
    history = []
    for index, gradients in enumerate(table.astype("float32")):
        if index in (WAITS.start, WAITS.stop):
            optimizer.synchronize()
            history.append(_values(replicas))
        moments = None
        if getattr(optimizer, "needs_second_moments", False):
            moments = 0.4 * gradients**2 + np.float32(1e-4)
        replicas.step(gradients, moments, (0, 2) if index in waits else (0, 1, 2))
        history.append(_values(replicas))
    return history


def differ():
    """The error of workers of which one leaves out a variable."""
    strategy, rank = strategy_and_rank()
    with strategy.scope():
        variables = [
            keras.Variable(np.ones(8, "float32"), name=f"weight_{i}") for i in range(2)
        ]
        optimizer = tfgradcomp.TernGrad(SGD(0.1), min_size=1)
        optimizer.build(variables)
    used = variables[: 2 - rank]
    gradients = [tf.ones([8]) for _ in used]
    try:
        strategy.run(lambda: optimizer.apply(gradients, used))
    except ValueError as error:
        return str(error)
    return "no error"


def freeze_on_one():
    """The error of `fit` where a layer is frozen, and the model compiled, on one."""
    _, rank = strategy_and_rank()
    model = fit(make_model(lambda: tfgradcomp.TernGrad(SGD(0.1), min_size=1), (3, 2)))
    if rank == 1:
        model.layers[0].trainable = False
        model.compile(model.optimizer, "mse")
    try:
        fit(model)
    except ValueError as error:
        return str(error)
    return "no error"


def _values(replicas):
    local = replicas.strategy.experimental_local_results

    def of(variable):
        value = getattr(variable, "value", variable)
        return np.stack([one.numpy() for one in local(value)])

    state = _state_of_second(replicas.optimizer, of)
    return [of(variable) for variable in replicas.variables], state


def _state_of_second(optimizer, of):
    """Returns the second variable's elements of all vectors of the method's state."""
    outers = getattr(optimizer, "outers", [optimizer])
    anchors = getattr(optimizer, "_anchors", None)
    found = []
    for outer in outers:
        position = 1
        if anchors:
            paths = [variable.path for variable in outer._plan.variables]
            if anchors[1].path not in paths:
                continue
            position = paths.index(anchors[1].path)
        for bucket in outer.stepper.buckets:
            if len(bucket.parts) > 1:
                continue
            variables = tf.nest.flatten(bucket.state)
            for leaf, variable in zip(bucket.leaves, variables, strict=True):
                rows = [
                    _own(bucket, leaf, position, rank, row)
                    for rank, row in enumerate(of(variable))
                ]
                found += [(leaf.role, leaf.name, row) for row in rows]
    return found


def _own(bucket, leaf, position, rank, row):
    """Returns a variable's items of a vector of state; nothing in other buckets."""
    whole = row.astype(np.float32)
    if leaf.role == "server":
        owned = bucket.route.owned_range(rank)
        whole = np.zeros([bucket.layout.size], np.float32)
        whole[owned.start : owned.stop] = row[: len(owned)].astype(np.float32)
    parts = np.split(whole, np.cumsum(leaf.sizes)[:-1])[-len(bucket.pieces) :]
    for piece, part in zip(bucket.pieces, parts, strict=True):
        if piece.position == position:
            return part
    return np.zeros([0], np.float32)
