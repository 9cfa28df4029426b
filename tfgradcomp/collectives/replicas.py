"""TensorFlow's collectives between the replicas of a strategy.

`ReplicaContext.all_reduce` and the like take a new key at each call, and so fail inside
`tf.cond` and `tf.while_loop` (`steps_per_execution`, mixed precision). This module uses
the raw ops with its own group and one fixed instance key per call site, which works
anywhere in a graph.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.addresses import split_address
from tfgradcomp.collectives.base import (
    PADDED_SIZES,
    Collectives,
    SingleWorker,
    padded_size_index,
)
from tfgradcomp.collectives.call_sites import SITES
from tfgradcomp.collectives.processes import (
    addresses_of,
    devices_per_host,
    group_of,
    process_of,
    ring_order,
)
from tfgradcomp.collectives.stalls import Limits, StallWatchdog
from tfgradcomp.compat.strategy import is_multi_worker
from tfgradcomp.core.digest import digest64

# Far above the keys of TensorFlow, which start at 1 and at 100.
_FIRST_KEY = 0x54470000
_KEYS_PER_INSTANCE = 1 << 16
_instances = itertools.count()
# Call sites where processes meet that may run different programs.
_FIRST_SITES = ("watch", "settings", "text of settings")
# TensorFlow's all-to-all names a transfer by both ranks without a separator. With more
# devices in one process, the transfers from 1 to 11 and from 11 to 1 have one name.
_MOST_LOCAL_RANKS = 11


class Replicas(Collectives):
    """Collectives between the replicas of a strategy, or within groups of replicas.

    Objects are numbered in the order of their creation, so all processes must create
    the same objects in the same order, like the strategy's variables.

    Args:
        num_workers: Number of replicas in a group.
        group: Description of the replicas, different for each strategy and the same in
            all processes, because a group key is bound to one set of devices.
        process_index: Index of this process.
        num_processes: Number of processes.
        parts: The groups, as indices of replicas. Each replica is in one group, and
            groups exchange nothing with each other. None: one group of all replicas.
        order: The processes' indices in the order of TensorFlow's collectives, by
            which gathered rows would come; None: 0, 1, and so on.
    """

    def __init__(
        self,
        num_workers: int,
        group: str,
        process_index: int = 0,
        num_processes: int = 1,
        parts: list[range] | None = None,
        order: list[int] | None = None,
    ):
        self._parts = parts or [range(num_workers)]
        self._places = np.argsort(order or range(num_processes)).tolist()
        self._group_keys = [
            _group_key(f"{num_workers} {group}{f' {part}' if parts else ''}")
            for part in self._parts
        ]
        self.num_workers = num_workers
        self.process_index, self.num_processes = process_index, num_processes
        self._take_keys()

    def _take_keys(self):
        instance = 1 + next(_instances)
        self._name = f"exchange {instance}"
        self._next_key = _FIRST_KEY + _KEYS_PER_INSTANCE * instance
        self._end_key = self._next_key + _KEYS_PER_INSTANCE
        self._keys: dict = {}

    @override
    def renewed(self):
        other = copy.copy(self)
        other._take_keys()
        return other

    @property
    @override
    def rank(self):
        return self._parts[self._part].index(self._replica)

    @property
    def _replica(self):
        """The index of this replica among all replicas of the strategy."""
        # Each replica is traced separately, so its index is a constant there.
        context = tf.distribute.get_replica_context()
        index = tf.convert_to_tensor(context.replica_id_in_sync_group)
        return int(tf.get_static_value(index))

    @property
    def _part(self):
        """The index of this replica's group."""
        replica = self._replica
        return next(i for i, part in enumerate(self._parts) if replica in part)

    @property
    def order(self) -> list[int]:
        """The ranks of a group, in the order of TensorFlow's collectives."""
        return self._sorted(self._parts[self._part])

    def _sorted(self, replicas):
        """Returns the positions of some replicas in the order of the collectives."""
        # Those of one process keep the order of their devices.
        place = [self._places[one // self._local_replicas] for one in replicas]
        return sorted(range(len(place)), key=place.__getitem__)

    def _by_rank(self, rows):
        """Returns rows of TensorFlow's collectives in the order of ranks."""
        return _taken(rows, np.argsort(self.order).tolist())

    @override
    def gather(self, vector, call_site):
        if self._meets_eagerly():
            return self._gather_eagerly(vector)
        size = vector.shape[0]
        varying = tf.size(vector) if size is None else None
        flat = self._call(
            tf.raw_ops.CollectiveGatherV2, vector, f"gather of {call_site}", varying
        )
        rows = tf.reshape(flat, [self.num_workers, -1 if size is None else size])
        return self._by_rank(rows)

    @override
    def all_to_all(self, rows, call_site):
        call_site = f"all_to_all of {call_site}"
        if self._meets_eagerly() or self._local_replicas > _MOST_LOCAL_RANKS:
            everything = self.gather(tf.reshape(rows, [-1]), call_site)
            return tf.reshape(everything, [self.num_workers, *rows.shape])[:, self.rank]
        rows = _taken(rows, self.order)
        received = self._call(tf.raw_ops.CollectiveAllToAllV2, rows, call_site)
        return self._by_rank(received)

    @override
    def sum(self, vector, call_site):
        return self._reduce(vector, "Add", call_site)

    @override
    def max(self, vector, call_site):
        return self._reduce(vector, "Max", call_site)

    def _meets_eagerly(self):
        # Eager local replicas run in turns: a replica that waits for the next one in an
        # op would wait forever. They use the collectives of the strategy instead.
        return tf.executing_eagerly() and self._local_replicas > 1

    @property
    def _local_replicas(self):
        return len(self._parts) * self.num_workers // self.num_processes

    def _gather_eagerly(self, vector):
        """Gathers the vectors of this replica's group; all groups call it together."""
        context = tf.distribute.get_replica_context()
        if len(self._parts) == 1:
            rows = context.all_gather(vector[tf.newaxis], axis=0)
            return self._by_rank(rows)
        # Vector sizes may differ between groups.
        sizes = context.all_gather(tf.shape(vector), axis=0)
        everything = tf.split(context.all_gather(vector, axis=0), sizes)
        places = np.argsort(self._sorted(range(len(everything))))
        return tf.stack([everything[places[i]] for i in self._parts[self._part]])

    def _reduce(self, vector, merge_op, call_site):
        if self._meets_eagerly():
            vectors = self.gather(vector, call_site)
            reduce = tf.reduce_max if merge_op == "Max" else tf.reduce_sum
            return reduce(vectors, axis=0)
        reduce = functools.partial(
            tf.raw_ops.CollectiveReduceV2, merge_op=merge_op, final_op="Id"
        )
        kind = "max" if merge_op == "Max" else "sum"
        return self._call(reduce, vector, f"{kind} of {call_site}")

    def site(self, call_site: str) -> str:
        """Returns the name of a call site, followed by that of these collectives."""
        return f"{call_site}, {self._name}"

    def _call(self, operation, vector, call_site, varying_size=None):
        arguments = self._arguments(call_site, varying_size)
        return SITES.around(
            self.site(call_site),
            lambda entered: operation(input=entered, **arguments),
            vector,
            self._replica,
        )

    def _arguments(self, call_site, varying_size=None):
        if call_site not in self._keys:
            self._keys[call_site] = self._next_key
            self._next_key += 1 if varying_size is None else len(PADDED_SIZES)
            if self._next_key > self._end_key:
                raise ValueError(
                    f"An optimizer's collectives have {_KEYS_PER_INSTANCE} keys, and a "
                    f"call site of variable size needs {len(PADDED_SIZES)}. Use larger "
                    f"buckets (`bucket_bytes`). Received: {len(self._keys)} call sites"
                )
        key = self._keys[call_site]
        return {
            "group_size": self.num_workers,
            "group_key": self._group_keys[self._part],
            "instance_key": key
            if varying_size is None
            else key + padded_size_index(varying_size),
            "ordering_token": [ordering_token(call_site, self._local_replicas)],
        }


class Hosts(Replicas):
    """Collectives between the processes of a `MultiWorkerMirroredStrategy`, on CPUs.

    For values of a process that do not depend on its replicas: logs, decisions.

    Attributes:
        names: The host of each process, as `TF_CONFIG` names it, IPv6 addresses
            without brackets.
        devices: Names of the devices of this process.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        group, addresses = f"hosts of {group_of(strategy)}", addresses_of(strategy)
        super().__init__(len(addresses), group, **_processes_of(strategy))
        self._strategy = strategy
        self.names = [split_address(address)[0] for address in addresses]
        self.devices = [*strategy.extended.worker_devices]
        self._watchdog: StallWatchdog | None = None
        # These keys do not depend on the objects and call sites created before, which
        # may differ between processes that run different programs.
        for index, site in enumerate(_FIRST_SITES):
            self._keys[f"gather of {site}"] = _FIRST_KEY + index

    def watch(self) -> None:
        """Starts a watchdog over the other processes, once; all processes must call it.

        Raises:
            ValueError: If a limit in the environment is not a number of seconds.
            RuntimeError: If another process runs another program.
        """
        if self._watchdog is not None:
            return
        self._watchdog = StallWatchdog(self.rank, Limits.of_environment())
        port = self._watchdog.listen(self.names[self.rank])
        self._watchdog.begin()
        self._meet()
        ports = self.gather(tf.constant([port]), "watch").numpy()[:, 0].tolist()
        self._watchdog.peers = [*zip(self.names, ports, strict=True)]

    def _meet(self):
        """Meets the other processes in a collective of the strategy.

        A variable is sent to all processes as it is created. If another process comes
        to another collective of the strategy meanwhile, such as those of a plain Keras
        optimizer, TensorFlow compares their types: no other one is float64.
        """
        is_within = tf.distribute.has_strategy()
        scope = contextlib.nullcontext() if is_within else self._strategy.scope()
        try:
            with scope, tf.init_scope():
                tf.Variable(tf.zeros([], tf.float64))
        except tf.errors.OpError as error:
            raise RuntimeError(
                "Another worker has ended, or runs another program. Expected: the same "
                "script on all workers, with the same models and optimizers: a plain "
                "Keras optimizer and one of tfgradcomp do not train together. "
                f"Received: worker={self.rank}"
            ) from error

    @property
    @override
    def _replica(self):
        return self.process_index

    @override
    def _call(self, operation, vector, call_site, varying_size=None):
        with tf.device("CPU:0"):
            return super()._call(operation, vector, call_site, varying_size)


def _taken(rows, order):
    """Returns rows in an order; as they are if it is theirs."""
    return rows if order == sorted(order) else tf.gather(rows, order)


def _group_key(group: str) -> int:
    """Returns the same key in all processes: bit 30, and 30 bits of a hash."""
    return 1 << 30 | digest64(group.encode()) % (1 << 30)


_tokens: dict = {}


def ordering_token(call_site: str, local_replicas: int) -> tf.Tensor:
    """Returns a resource on the current device that orders collectives.

    Without a resource per device, automatic control dependencies put the collectives of
    several local replicas into one sequence, which deadlocks. The kernels never read
    the resource, so a handle is enough.

    If a process is one replica on a CPU, each call site has its own resource, so that
    buckets do not wait for each other. NCCL, and replicas that share threads, need one
    order.
    """
    with tf.init_scope():
        # Only an operation tells the device of this replica by public means.
        device = tf.constant(0).device
        is_free = local_replicas == 1 and ":CPU:" in device
        key = (device, call_site if is_free else None)
        if key not in _tokens:
            with tf.device(device):
                _tokens[key] = tf.raw_ops.VarHandleOp(
                    dtype=tf.float32,
                    shape=[],
                    shared_name=f"tfgradcomp_ordering_token_{len(_tokens)}",
                )
        return _tokens[key]


def for_strategy(strategy: tf.distribute.Strategy) -> Collectives:
    """Returns the collectives over a strategy's replicas."""
    count = strategy.num_replicas_in_sync
    if count == 1:
        return SingleWorker()
    return Replicas(count, group_of(strategy), **_processes_of(strategy))


def _processes_of(strategy: tf.distribute.Strategy) -> dict:
    """Returns what `Replicas` takes about processes."""
    if not is_multi_worker(strategy):
        return {}
    index, number = process_of(strategy)
    order = ring_order(strategy)
    return {"process_index": index, "num_processes": number, "order": order}


class Devices(NamedTuple):
    """The collectives of workers that have several devices each.

    Attributes:
        inside: Between the devices of a worker; the rank is the device's index.
        across: Between device k of all workers; `num_workers` and `rank` are those of
            whole workers.
        replicas: Between all devices.
    """

    inside: Replicas
    across: Replicas
    replicas: Collectives

    @property
    def per_worker(self) -> int:
        """Number of devices of a worker."""
        return self.inside.num_workers


def devices_of(strategy: tf.distribute.Strategy) -> Devices | None:
    """Returns the collectives between workers' devices; None for one device each."""
    count, devices = strategy.num_replicas_in_sync, devices_per_host(strategy)
    if devices in (1, count):
        return None
    hosts = count // devices
    inside = [range(devices * host, devices * (host + 1)) for host in range(hosts)]
    across = [range(device, count, devices) for device in range(devices)]
    processes = _processes_of(strategy)
    group = f"{group_of(strategy)} by hosts"
    return Devices(
        Replicas(devices, f"inside of {group}", parts=inside, **processes),
        Replicas(hosts, f"across {group}", parts=across, **processes),
        for_strategy(strategy),
    )


@functools.cache
def across_hosts(strategy: tf.distribute.Strategy) -> Hosts | None:
    """Returns the collectives between a strategy's processes; None for one process."""
    if not is_multi_worker(strategy):
        return None
    return Hosts(strategy)
