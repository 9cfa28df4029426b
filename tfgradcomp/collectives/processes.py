"""Processes and hosts of a strategy."""

from __future__ import annotations

import weakref

import tensorflow as tf

from tfgradcomp.compat.strategy import is_multi_worker

_devices_per_host: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def group_of(strategy: tf.distribute.Strategy) -> str:
    """Returns a description of a strategy's devices, the same in all processes.

    Addresses are left out, since processes may know each other by different ones.
    """
    devices = [
        tf.DeviceSpec.from_string(device) for device in strategy.extended.worker_devices
    ]
    local = [f"{device.device_type}:{device.device_index}" for device in devices]
    resolver = getattr(strategy, "cluster_resolver", None)
    cluster = resolver.cluster_spec().as_dict() if resolver is not None else {}
    tasks = {job: len(addresses) for job, addresses in sorted(cluster.items())}
    return f"{sorted(local)} in each of {tasks}"


def process_of(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> tuple[int, int]:
    """Returns this process' index among the chief and the workers, and their number."""
    resolver = strategy.cluster_resolver
    chiefs = resolver.cluster_spec().as_dict().get("chief", [])
    before = len(chiefs) if resolver.task_type == "worker" else 0
    return before + resolver.task_id, len(addresses_of(strategy))


def ring_order(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> list[int]:
    """Returns the indices of processes as TensorFlow's collectives put them in order.

    They sort the names of tasks: worker 10 comes before worker 2.
    """
    cluster = strategy.cluster_resolver.cluster_spec().as_dict()
    tasks = [
        (job, str(index))
        for job in ("chief", "worker")
        for index in range(len(cluster.get(job, [])))
    ]
    return sorted(range(len(tasks)), key=tasks.__getitem__)


def addresses_of(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> list[str]:
    """Returns `host:port` of the chief and the workers, in the order of processes."""
    cluster = strategy.cluster_resolver.cluster_spec().as_dict()
    return [*cluster.get("chief", []), *cluster.get("worker", [])]


def assign_hosts(strategy: tf.distribute.MirroredStrategy, hosts: list[int]) -> None:
    """Divides the devices of one process among simulated hosts.

    Without it, each device of a `MirroredStrategy` is a worker. With it, the devices of
    a host are one worker, as the devices of a process are under
    `MultiWorkerMirroredStrategy`. Call it before an optimizer is built.

    Args:
        strategy: The strategy.
        hosts: The host of each device, in ascending order, with the same number of
            devices for each host: `[0, 0, 1, 1]`.

    Raises:
        ValueError: If the hosts have different numbers of devices or another order.
    """
    count = strategy.num_replicas_in_sync
    devices = max(list(hosts).count(0), 1)
    if list(hosts) != [replica // devices for replica in range(count)] or (
        count % devices
    ):
        raise ValueError(
            f"hosts must give each of {count} devices a host, the same number of "
            "devices to each host, in order, such as [0, 0, 1, 1] for four devices. "
            f"Received: hosts={list(hosts)}"
        )
    _devices_per_host[strategy.extended] = devices


def devices_per_host(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of devices that form one worker."""
    if is_multi_worker(strategy):
        return strategy.num_replicas_in_sync // len(addresses_of(strategy))
    return _devices_per_host.get(strategy.extended, 1)
