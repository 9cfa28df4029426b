"""The four collectives that transports are made of, over a strategy's replicas.

Strategies have collectives of their own (`ReplicaContext.all_reduce`), but they take
a fresh key whenever they are called and so fail inside `tf.cond` and `tf.while_loop`
(`steps_per_execution`, mixed precision). Here the raw ops are used, with a group of
our own and one fixed instance key a call site, which works anywhere in a graph.
"""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf

# Far above the keys that TensorFlow counts up from 1 and 100.
_GROUP_KEY = 0x54470000
_KEYS_PER_INSTANCE = 1 << 16
_instances = itertools.count()

# An instance key belongs to one size, for ever. So vectors whose sizes vary are padded
# to one of a few: 1 to 15, and eight from each power of two to the next.
_EIGHTS = [eighths << shift for shift in range(1, 26) for eighths in range(8, 16)]
_SIZES = np.array([*range(1, 16), *_EIGHTS])


class Collectives:
    """Gathers and reduces vectors over workers.

    Each method takes the name of its call site: one name, one shape and type. Of
    `gather` the size may vary, if it is a `padded_size` that is equal on all workers.

    Attributes:
        num_workers: Python integer N.
        rank: Python integer, this worker's index; asked for within a step.
        place: This process' index, and the number of processes: Python integers.
    """

    num_workers: int
    place: tuple[int, int] = (0, 1)

    @property
    def rank(self) -> int:
        """This worker's index in [0, N)."""
        raise NotImplementedError

    def moved(self, call) -> float:
        """Returns the words that a worker sends for a `transports.base.Call`."""
        return call.moved(self.num_workers)

    def gather(self, vector: tf.Tensor, site: str) -> tf.Tensor:
        """Returns all workers' vectors, shape `[N, size]`, in the order of ranks."""
        raise NotImplementedError

    def all_to_all(self, rows: tf.Tensor, site: str) -> tf.Tensor:
        """Sends row k of `[N, size]` to worker k; returns what came, by sender."""
        raise NotImplementedError

    def sum(self, vector: tf.Tensor, site: str) -> tf.Tensor:
        """Returns the element-wise sum over workers."""
        raise NotImplementedError

    def max(self, vector: tf.Tensor, site: str) -> tf.Tensor:
        """Returns the element-wise maximum over workers."""
        raise NotImplementedError


def padded_size(size: tf.Tensor) -> tf.Tensor:
    """Returns the size, at most an eighth more, that a vector which varies may have.

    Args:
        size: int32 scalar, less than 2**28. 0 becomes 1.
    """
    return tf.gather(tf.constant(_SIZES, tf.int32), _index_of(size))


def _index_of(size):
    sizes = tf.constant(_SIZES, tf.int32)
    return tf.searchsorted(sizes, tf.reshape(size, [1]))[0]


class SingleWorker(Collectives):
    """One worker: nothing to move."""

    num_workers = 1

    @property
    @override
    def rank(self):
        return 0

    @override
    def gather(self, vector, site):
        return vector[tf.newaxis]

    @override
    def all_to_all(self, rows, site):
        return rows

    @override
    def sum(self, vector, site):
        return vector

    @override
    def max(self, vector, site):
        return vector


class Replicas(Collectives):
    """The replicas of a strategy, of one process or of many.

    Objects are numbered as they are created, so all processes must create the same
    ones in the same order, as they must with the strategy's variables.
    """

    _group_key = _GROUP_KEY

    def __init__(self, num_workers: int, place: tuple[int, int] = (0, 1)):
        self.num_workers = num_workers
        self.place = place
        self._next_key = _GROUP_KEY + _KEYS_PER_INSTANCE * (1 + next(_instances))
        self._end_key = self._next_key + _KEYS_PER_INSTANCE
        self._keys = {}

    @property
    @override
    def rank(self):
        # Each replica runs, and is traced, by itself: its index is a constant there.
        context = tf.distribute.get_replica_context()
        index = tf.convert_to_tensor(context.replica_id_in_sync_group)
        return int(tf.get_static_value(index))

    @override
    def gather(self, vector, site):
        if self._meets_eagerly():
            context = tf.distribute.get_replica_context()
            return context.all_gather(vector[tf.newaxis], axis=0)
        size = vector.shape[0]
        varying = tf.size(vector) if size is None else None
        flat = tf.raw_ops.CollectiveGatherV2(
            input=vector, **self._arguments(f"gather/{site}", varying)
        )
        return tf.reshape(flat, [self.num_workers, -1 if size is None else size])

    @override
    def all_to_all(self, rows, site):
        if self._meets_eagerly():
            everything = self.gather(tf.reshape(rows, [-1]), site)
            return tf.reshape(everything, [self.num_workers, *rows.shape])[:, self.rank]
        return tf.raw_ops.CollectiveAllToAllV2(
            input=rows, **self._arguments(f"all_to_all/{site}")
        )

    @override
    def sum(self, vector, site):
        return self._reduce(vector, "Add", site)

    @override
    def max(self, vector, site):
        return self._reduce(vector, "Max", site)

    def _meets_eagerly(self):
        # Local replicas run in turns where nothing is traced: one that waits inside
        # an op for the next waits for ever, so they meet by the strategy's means.
        return tf.executing_eagerly()

    def _reduce(self, vector, merge_op, site):
        if self._meets_eagerly():
            vectors = self.gather(vector, site)
            reduce = tf.reduce_max if merge_op == "Max" else tf.reduce_sum
            return reduce(vectors, axis=0)
        return tf.raw_ops.CollectiveReduceV2(
            input=vector,
            merge_op=merge_op,
            final_op="Id",
            **self._arguments(f"{merge_op}/{site}"),
        )

    def _arguments(self, site, varying_size=None):
        if site not in self._keys:
            self._keys[site] = self._next_key
            self._next_key += 1 if varying_size is None else len(_SIZES)
            if self._next_key > self._end_key:
                raise ValueError(
                    f"Collectives have {_KEYS_PER_INSTANCE} keys; a site whose "
                    f"size varies takes {len(_SIZES)}. Take larger buckets "
                    f"(`bucket_bytes`). Received: {len(self._keys)} sites"
                )
        key = self._keys[site]
        return {
            "group_size": self.num_workers,
            "group_key": self._group_key,
            "instance_key": key
            if varying_size is None
            else key + _index_of(varying_size),
            "ordering_token": [_ordering_token()],
        }


class Hosts(Replicas):
    """The processes of a `MultiWorkerMirroredStrategy`, by their CPUs.

    For what a process says once, whatever replicas it has: logs, agreements.
    """

    _group_key = _GROUP_KEY + 1

    def __init__(self, place: tuple[int, int]):
        super().__init__(place[1], place)

    @property
    @override
    def rank(self):
        return self.place[0]

    def _meets_eagerly(self):
        return False

    @override
    def gather(self, vector, site):
        with tf.device("CPU:0"):
            return super().gather(vector, site)

    @override
    def all_to_all(self, rows, site):
        with tf.device("CPU:0"):
            return super().all_to_all(rows, site)

    def _reduce(self, vector, merge_op, site):
        with tf.device("CPU:0"):
            return super()._reduce(vector, merge_op, site)


_tokens = {}


def _ordering_token() -> tf.Tensor:
    """A resource of the current device that its collectives are ordered by.

    Without one, automatic control dependencies put the collectives of several local
    replicas into one sequence, where each waits for the next for ever. The kernels
    never read the resource, so a handle will do.
    """
    with tf.init_scope():
        # An operation says where this replica runs; nothing public else does.
        device = tf.constant(0).device
        if device not in _tokens:
            with tf.device(device):
                _tokens[device] = tf.raw_ops.VarHandleOp(
                    dtype=tf.float32,
                    shape=[],
                    shared_name=f"tfgradcomp_ordering_token_{len(_tokens)}",
                )
        return _tokens[device]


def for_strategy(strategy: tf.distribute.Strategy) -> Collectives:
    """Returns the collectives over a strategy's replicas."""
    count = strategy.num_replicas_in_sync
    if count == 1:
        return SingleWorker()
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return Replicas(count, place_of(strategy))
    return Replicas(count)


def place_of(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> tuple[int, int]:
    """Returns this process' index among the chief and the workers, and their number."""
    resolver = strategy.cluster_resolver
    cluster = resolver.cluster_spec().as_dict()
    chiefs, workers = len(cluster.get("chief", [])), len(cluster.get("worker", []))
    before = chiefs if resolver.task_type == "worker" else 0
    return before + resolver.task_id, chiefs + workers
