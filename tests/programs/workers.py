"""Runs a program on the workers of a pool, with an optimizer put in."""

import hashlib

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.programs.kinds import KINDS, Program


def on_dense(inner):
    """Returns an optimizer that gets dense gradients.

    Of slices, Adam of Keras squares each of two values for one row alone.
    """
    apply = inner.apply

    def apply_dense(gradients, variables=None):
        return apply([tf.convert_to_tensor(g) for g in gradients], variables)

    inner.apply = apply_dense
    return inner


WRAPPERS = {
    "stock": on_dense,
    "identity": lambda inner: tfgradcomp.DistEFSGD(
        inner, "identity", transport="all_gather"
    ),
    "TernGrad": tfgradcomp.TernGrad,
}


def run(kind, wrapper="TernGrad", policy="float32", **rules):
    """Trains; returns hashes and values of the weights, and the loss of each epoch."""
    tfgradcomp.enable_multi_worker_fit()
    strategy, _ = strategy_and_rank()
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    keras.mixed_precision.set_global_policy(policy)
    try:
        program = Program(strategy.scope, WRAPPERS[wrapper], rules)
        models, losses = KINDS[kind](program)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    weights = [np.array(w) for model in models for w in model.trainable_variables]
    data = b"".join(w.tobytes() for w in weights)
    return {
        "digest": hashlib.sha256(data).hexdigest(),
        "weights": weights,
        "losses": losses,
    }
