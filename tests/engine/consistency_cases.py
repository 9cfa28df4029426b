"""Arguments whose `repr` differs between processes, run on real workers."""

import hashlib

import keras
import numpy as np

import tfgradcomp
from tests.cluster import strategy_and_rank
from tfgradcomp.collectives import for_strategy
from tfgradcomp.transports.sharded import Sharded


def is_bias(variable):
    return variable.path.endswith("bias")


def of_other_shapes(rank):
    return lambda variable: variable.shape[0] == (8 if rank else 300)


ARGUMENTS = {
    "function": lambda strategy, rank: {"exclude": lambda v: is_bias(v)},
    "functions": lambda strategy, rank: {"exclude": ["last", is_bias]},
    "transport": lambda strategy, rank: {"transport": Sharded(for_strategy(strategy))},
    "other functions": lambda strategy, rank: {"exclude": of_other_shapes(rank)},
    "other buckets": lambda strategy, rank: {"bucket_bytes": 400 + 40000 * rank},
    "other reactions": lambda strategy, rank: {"nonfinite": ("raise", "skip")[rank]},
}


def train(case, transport="all_gather"):
    """Returns what was not compressed and the weights' digest, or the error."""
    strategy, rank = strategy_and_rank()
    keras.utils.set_random_seed(0)
    arguments = {"transport": transport, **ARGUMENTS[case](strategy, rank)}
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(300), keras.layers.Dense(2)]
        )
        optimizer = tfgradcomp.TernGrad(
            keras.optimizers.SGD(0.1), min_size=0, **arguments
        )
        model.compile(optimizer, "mse")
    rng = np.random.default_rng(rank)
    x, y = rng.normal(size=(16, 8)), rng.normal(size=(16, 2))
    try:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    except ValueError as error:
        return str(error)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    plain = optimizer.traffic.elements_plain
    kinds = {
        type(b.route).__name__ for b in optimizer.stepper.buckets if b.is_compressed
    }
    return plain, kinds, hashlib.sha256(weights).hexdigest()
