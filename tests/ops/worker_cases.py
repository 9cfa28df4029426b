"""Workers with operations of different kinds, and with few threads."""

import hashlib
import os

import keras
import numpy as np
import tensorflow as tf

from tests.cluster import strategy_and_rank
from tests.methods import ROWS
from tests.ops.cpu_library import CpuLibrary
from tfgradcomp import ops
from tfgradcomp.ops import library


def instruction_sets():
    """Returns those of this machine, the best one last."""
    kernels = CpuLibrary(library.library().path)
    best = kernels.instruction_set()
    known = ("portable", "avx2", "avx512")
    found = [kind for kind in known if kernels.set_instruction_set(kind)]
    kernels.set_instruction_set(best)
    return found


def train_with(kinds, name, steps):
    """Trains a row of `tests.methods` with operations of another kind on each worker.

    Returns:
        How the worker's operations are computed, and a hash of its weights before the
        training and after it.
    """
    strategy, rank = strategy_and_rank()
    kernels = CpuLibrary(library.library().path)
    best, kind = kernels.instruction_set(), kinds[rank]
    before = os.environ.get("TFGRADCOMP_OPS")
    os.environ["TFGRADCOMP_OPS"] = "python" if kind == "python" else "native"
    try:
        if kind not in ("python", "best"):
            assert kernels.set_instruction_set(kind)
        digests = _train(strategy, rank, name, steps)
        return _in_use(), *digests
    finally:
        kernels.set_instruction_set(best)
        if before is None:
            del os.environ["TFGRADCOMP_OPS"]
        else:
            os.environ["TFGRADCOMP_OPS"] = before


def _in_use():
    """Returns `"python"`, or the instruction set, as a trace takes it now."""
    traced = tf.function(lambda: ops.pack_signs(tf.ones([40])))
    operations = traced.get_concrete_function().graph.get_operations()
    is_native = any(
        operation.type == "Tfgradcomp>PackSigns" for operation in operations
    )
    return library.library().instruction_set if is_native else "python"


def _train(strategy, rank, name, steps):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((12,)), keras.layers.Dense(70), keras.layers.Dense(3)]
        )
        optimizer = ROWS[name].make(keras.optimizers.SGD(0.01), min_size=100)
        model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(rank)
    x, y = rng.normal(size=(160, 12)), rng.normal(size=(160, 3))
    data = tf.data.Dataset.from_tensor_slices((x.astype("f"), y.astype("f"))).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    data = data.batch(8 * strategy.num_replicas_in_sync).with_options(options)
    before = _digest(model)
    model.fit(data, steps_per_epoch=steps, verbose=0)
    return before, _digest(model)


def train_buckets(transport, count):
    """Trains with a bucket for each of `count` tensors; returns their number."""
    strategy, rank = strategy_and_rank()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(16, use_bias=False) for _ in range(count)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        optimizer = ROWS["TernGrad"].make(
            keras.optimizers.SGD(0.01), transport=transport, bucket_bytes=1, min_size=1
        )
        model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(rank).normal(size=(32, 16)).astype(np.float32)
    before = _digest(model)
    model.fit(x, x, batch_size=8, epochs=2, verbose=0)
    return len(optimizer.stepper.buckets), before, _digest(model)


def _digest(model):
    weights = b"".join(w.tobytes() for w in model.get_weights())
    return hashlib.sha256(weights).hexdigest()
