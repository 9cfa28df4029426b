"""The processes of a strategy, and the context that its variables are created in."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
from keras.optimizers import Optimizer

from tfgradcomp.compat.inner_optimizer import strategy_of


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the strategy spans several processes."""
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.extended._in_multi_worker_mode()
    )


def group_of(strategy: tf.distribute.Strategy) -> str:
    """Returns the devices of a strategy, in words that are the same in all processes.

    Processes may know each other by different addresses.
    """
    devices = [
        tf.DeviceSpec.from_string(device) for device in strategy.extended.worker_devices
    ]
    own = [f"{device.device_type}:{device.device_index}" for device in devices]
    resolver = getattr(strategy, "cluster_resolver", None)
    cluster = resolver.cluster_spec().as_dict() if resolver is not None else {}
    tasks = {job: len(addresses) for job, addresses in sorted(cluster.items())}
    return f"{sorted(own)} in each of {tasks}"


def process_of(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> tuple[int, int]:
    """Returns this process' index among the chief and the workers, and their number."""
    resolver = strategy.cluster_resolver
    chiefs = resolver.cluster_spec().as_dict().get("chief", [])
    before = len(chiefs) if resolver.task_type == "worker" else 0
    return before + resolver.task_id, len(addresses_of(strategy))


def addresses_of(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> list[str]:
    """Returns `host:port` of the chief and the workers, by the index of processes."""
    cluster = strategy.cluster_resolver.cluster_spec().as_dict()
    return [*cluster.get("chief", []), *cluster.get("worker", [])]


def assign_hosts(strategy: tf.distribute.MirroredStrategy, hosts: list[int]) -> None:
    """Divides the devices of one process among several hosts, as if it were a cluster.

    Without it, each device of a `MirroredStrategy` is a worker by itself. With it, the
    devices of a host are one worker, as those of a process are under
    `MultiWorkerMirroredStrategy`. Call it before an optimizer is built.

    Args:
        strategy: The strategy.
        hosts: The host of each device, as many times as any other and one after the
            other: `[0, 0, 1, 1]`.

    Raises:
        ValueError: If hosts have not the same number of devices, in this order.
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
    strategy.extended._devices_per_host = devices


def devices_per_host(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of devices that are one worker."""
    if is_multi_worker(strategy):
        return strategy.num_replicas_in_sync // len(addresses_of(strategy))
    return getattr(strategy.extended, "_devices_per_host", 1)


def read_as_processes(strategy: tf.distribute.MirroredStrategy) -> None:
    """Makes one process read finite datasets as each of several processes does.

    Where there are several, no step knows how many rows it gets. Where one does, its
    graph is another: TensorFlow turns a division by a constant into a product.
    """
    extended = strategy.extended
    distribute = extended._experimental_distribute_dataset

    def distribute_unknown_sizes(*args):
        dataset = distribute(*args)
        if dataset._cardinality != tf.data.INFINITE_CARDINALITY:
            dataset._enable_get_next_as_optional = True
        return dataset

    extended._experimental_distribute_dataset = distribute_unknown_sizes
    extended._reads_as_processes = True


def reads_as_processes(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether `read_as_processes` was called for the strategy."""
    return hasattr(strategy.extended, "_reads_as_processes")


def _have_values(variables):
    """Returns whether all variables can be read now, outside of any graph."""
    with tf.init_scope():
        # Not `value`: it may be a tensor of another type, and TensorFlow's have none.
        values = [getattr(variable, "_value", variable) for variable in variables]
        return tf.executing_eagerly() and all(
            value is not None and bool(value.is_initialized()) for value in values
        )


def _not_lifted(create, **arguments):
    """Creates a variable that a `tf.function` is not to know, which it traces once.

    It would be traced twice by one that creates variables itself.
    """
    return create(**{**arguments, "experimental_enable_variable_lifting": False})


def create_variables(optimizer: Optimizer, function: Callable, variables: list) -> None:
    """Calls a function that creates variables, once for all replicas and eagerly.

    A first step may be taken anywhere: within a `tf.function`, in a replica's context,
    under a conditional. There nothing can be measured or read, and each local replica
    would create variables by itself.

    Args:
        optimizer: A Keras optimizer. Where there is no strategy, its own is entered.
        function: Function of the model's variables that creates others.
        variables: The model's variables.
    """

    def eagerly(_: tf.distribute.Strategy | None = None) -> None:
        with tf.init_scope(), tf.variable_creator_scope(_not_lifted):
            function(variables)

    if not tf.distribute.has_strategy():
        with strategy_of(optimizer).scope():
            if _have_values(variables):
                eagerly()
            else:
                # They get their values in this very graph.
                function(variables)
        return
    in_replica = not tf.distribute.in_cross_replica_context()
    if in_replica and not tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.distribute.get_replica_context().merge_call(eagerly)
    else:
        eagerly()
