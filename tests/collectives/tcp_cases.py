"""Trainings over both carriers, for the workers of a pool."""

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests import harness
from tests.cluster import strategy_and_rank
from tests.digest_cases import SHAPES
from tests.helpers import split
from tfgradcomp.addresses import listen_at
from tfgradcomp.collectives import across_hosts, connections, over_carrier, tcp

SGD = keras.optimizers.SGD
STEPS = 6


def _local_steps(**arguments):
    outer = tfgradcomp.DistEFBlockSGD(SGD(0.9), **arguments)
    return tfgradcomp.LocalSteps(SGD(0.02, momentum=0.5), outer, every=3)


def _wrapper(kind, transport, **own):
    return lambda **given: kind(
        SGD(0.1), transport=transport, **own, **given, bucket_bytes=3000
    )


OPTIMIZERS = {
    "all_gather": _wrapper(tfgradcomp.TernGrad, "all_gather"),
    "all_reduce": _wrapper(tfgradcomp.TernGrad, "all_reduce"),
    "sharded": _wrapper(tfgradcomp.DistEFBlockSGDM, "sharded"),
    "floats": _wrapper(tfgradcomp.HalfPrecision, "all_reduce"),
    "variable length": _wrapper(tfgradcomp.Strom, "all_gather", threshold=0.5),
    "auto": _wrapper(tfgradcomp.Signum, "auto"),
    "local steps": _local_steps,
}


def digests(carrier, names=tuple(OPTIMIZERS), min_size=50):
    """The digests of a worker's weights after steps of optimizers, by their names."""
    strategy, _ = strategy_and_rank()
    count = strategy.num_replicas_in_sync
    size = sum(int(np.prod(shape)) for shape in SHAPES)
    found = {}
    for name in names:
        rng, make = np.random.default_rng(1), OPTIMIZERS[name]
        values = split(rng.normal(size=size), SHAPES)
        replicas = harness.Replicas(
            lambda make=make: make(min_size=min_size, carrier=carrier), values
        )
        for _ in range(STEPS):
            replicas.step(rng.normal(size=(count, size)).astype(np.float32))
        found[name] = harness.digest(replicas.weights()[0])
    return found


def fitted(carrier, arguments):
    """The digest of a model that `fit` has trained over a carrier."""
    model = harness.make_model(
        lambda: tfgradcomp.TernGrad(SGD(0.1), min_size=0, carrier=carrier), **arguments
    )
    harness.fit(model, epochs=2)
    return harness.digest(model)


def collectives_of_a_step(carrier):
    """Names of TensorFlow's collectives in the graph of a step of `fit`."""
    names = "CollectiveReduceV2", "CollectiveGatherV2", "CollectiveAllToAllV2"
    found = set()

    def recorded(name, original):
        def call(**arguments):
            if not tf.executing_eagerly():
                found.add(name)
            return original(**arguments)

        return mock.patch.object(tf.raw_ops, name, call)

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(recorded(name, getattr(tf.raw_ops, name)))
        fitted(carrier, {})
    return sorted(found)


def ranks_by(carrier):
    """Gathers all ranks, and sends each worker k the number 100 * own rank + k.

    Returns:
        The gathered ranks, and the numbers that this worker has received.
    """
    hosts = across_hosts(strategy_and_rank()[0])
    collectives, rank = over_carrier(carrier, hosts, hosts)[0], hosts.rank
    gathered = collectives.gather(tf.constant([rank]), "ranks")
    rows = 100 * rank + tf.range(hosts.num_workers)[:, tf.newaxis]
    received = collectives.all_to_all(rows, "pairs of ranks")
    return gathered.numpy().ravel().tolist(), received.numpy().ravel().tolist()


def _over_tcp():
    hosts = across_hosts(strategy_and_rank()[0])
    return over_carrier("tcp", hosts, hosts)[0]


@contextlib.contextmanager
def _taken_port(hosts):
    with listen_at(hosts.names[hosts.rank], 0) as taken:
        port = {connections.CARRIER_PORT: str(taken.getsockname()[1])}
        with mock.patch.dict(os.environ, port):
            yield


def _no_link(hosts):
    error = mock.Mock(side_effect=RuntimeError("no way through"))
    return mock.patch.object(connections, "exchange_tokens", error)


def _no_way(hosts):
    error = mock.Mock(side_effect=OSError("no route to host"))
    return mock.patch.object(connections.socket, "create_connection", error)


# Why a worker cannot connect.
FAULTS = {
    None: contextlib.nullcontext,
    "port": _taken_port,
    "link": _no_link,
    "way": _no_way,
}


def choose(carrier, rank_of_fault=None, fault=None, seconds=60.0):
    """Returns the collectives that workers choose, and what they gather by them.

    With `"tcp"` they connect in a number of seconds, or return the error.
    """
    hosts = across_hosts(strategy_and_rank()[0])
    own_fault = FAULTS[fault if hosts.rank == rank_of_fault else None]
    patience = mock.patch.dict(tcp._SECONDS, tcp=seconds)
    with mock.patch.object(tcp, "_over_tcp", {}), patience, own_fault(hosts):
        try:
            # The second time nothing is tried.
            both = [over_carrier(carrier, hosts, hosts)[0] for _ in range(2)]
        except RuntimeError as error:
            return str(error)
    site = f"by {carrier}, {fault}"
    gathered = both[0].gather(tf.constant([hosts.rank]), site).numpy()
    return sorted({type(one).__name__ for one in both}), gathered.ravel().tolist()


def in_other_orders():
    """Returns what two call sites gather; worker r comes late to call site r."""
    collectives, rank = _over_tcp(), strategy_and_rank()[1]

    def gathered(site):
        time.sleep(0.5 if site == rank else 0.0)
        value = tf.constant([10 * site + rank])
        return collectives.gather(value, f"in other orders/{site}").numpy()

    with ThreadPoolExecutor(2) as threads:
        return [rows.ravel().tolist() for rows in threads.map(gathered, (0, 1))]


def two_optimizers():
    """The digests of two models that train alone, and in one step."""
    strategy, _ = strategy_and_rank()
    rng = np.random.default_rng(1)
    values = [rng.normal(size=(2, 300)).astype(np.float32) for _ in range(STEPS)]
    count = strategy.num_replicas_in_sync

    def make():
        kinds = OPTIMIZERS["all_gather"], OPTIMIZERS["sharded"]
        return [
            harness.Replicas(
                lambda make=make: make(min_size=50, carrier="tcp"), [np.zeros(300)]
            )
            for make in kinds
        ]

    alone, together = make(), make()

    @tf.function(autograph=False)
    def step(gradients):
        for replicas in together:
            replicas.step_eagerly(gradients)

    for gradients in values:
        for replicas in alone:
            replicas.step(gradients[:count])
        step(tf.constant(gradients[:count]))
    return [
        [harness.digest(replicas.weights()) for replicas in both]
        for both in (alone, together)
    ]


def die(rank):
    """A worker is killed while the others wait for it."""
    collectives, own_rank = _over_tcp(), strategy_and_rank()[1]
    if own_rank == rank:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    tf.function(lambda: collectives.sum(tf.ones([3]), "last words"))()


def die_with_a_child(rank):
    """The same, while a child that the worker has forked goes on."""
    _over_tcp()
    if strategy_and_rank()[1] == rank and os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    die(rank)


def fail(rank):
    """A worker's step fails while it waits for the others in the exchange."""
    collectives, own_rank = _over_tcp(), strategy_and_rank()[1]
    if own_rank != rank:
        time.sleep(1.0)
        collectives.gather(tf.ones([3]), "after a failure")
        return

    def pause():
        time.sleep(0.3)

    @tf.function
    def step():
        gathered = collectives.gather(tf.ones([3]), "a failure")
        with tf.control_dependencies([tf.py_function(pause, [], [])]):
            failure = tf.debugging.check_numerics(tf.constant(np.nan), "no")
        return gathered, failure

    step()


def reductions():
    """Sums and maxima by both carriers, for vectors of many sizes and types."""
    strategy, rank = strategy_and_rank()
    hosts, over = across_hosts(strategy), _over_tcp()
    rng = np.random.default_rng(rank)
    differ = []
    for dtype in ("float32", "float16", "bfloat16", "int32"):
        for size in (1, 2, 15, 16, 17, 63, 65, 1000, 12345, 70001, 400_001):
            values = rng.normal(size=size) * 10.0 ** rng.integers(-3, 3, size)
            if dtype == "float32":
                # The smallest numbers as well.
                values[::3] *= 1e-39
            vector = tf.cast(values, dtype)
            for kind in ("sum", "max"):
                site = f"{kind} {dtype} {size}"
                own, other = (
                    tf.bitcast(getattr(c, kind)(vector, site), vector.dtype).numpy()
                    for c in (over, hosts)
                )
                # Of zeros that are equal, the maximum is one or the other.
                differs = not np.array_equal(own, other)
                if differs or (kind == "sum" and own.tobytes() != other.tobytes()):
                    differ.append(site)
    return differ
