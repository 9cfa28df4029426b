"""Saving of all workers' and servers' state with the chief's optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfgradcomp.optimizers import CompressedOptimizer
from tfgradcomp.parameter_server.membership import Membership


class ClusterCheckpoint:
    """Lets the chief's optimizer save and restore the state of a whole cluster.

    Files look like those of a process with a replica per worker.
    """

    def __init__(self, membership: Membership):
        self._membership = membership

    def attach(self, optimizer: CompressedOptimizer) -> None:
        """Delegates the variables of the chief's optimizer to workers and servers."""
        on_workers = self._read_workers, self._restore_workers
        on_servers = self._read_servers, self._restore_servers
        for index, variable in enumerate(_worker_variables(optimizer)):
            self._delegate(variable, *on_workers, index)
        for bucket in optimizer.stepper.buckets:
            for leaf, variable in enumerate(tf.nest.flatten(bucket.state.server)):
                self._delegate(variable, *on_servers, bucket.name, leaf)

    def _delegate(self, variable, read: Callable, restore: Callable, *place):
        read = functools.partial(read, *place)
        variable.delegate_to(
            functools.partial(self._membership.with_recovery, read),
            functools.partial(restore, *place),
        )

    def _read_workers(self, index):
        workers = self._membership.workers
        return np.stack(
            [_worker_variables(w.optimizer)[index].numpy() for w in workers]
        )

    def _restore_workers(self, index, values):
        for worker, value in zip(self._membership.workers, values, strict=True):
            with tf.device(worker.device):
                _worker_variables(worker.optimizer)[index].assign(value)

    def _read_servers(self, call_site, leaf):
        first = self._membership.workers[0]
        whole = self._membership.channel.states.whole_at(
            call_site, first.committed_steps(), first.kept_states()
        )
        return whole[leaf][np.newaxis]

    def _restore_servers(self, call_site, leaf, values):
        self._membership.channel.states.restore(call_site, leaf, values[0])


def _worker_variables(optimizer):
    """Returns the variables whose values differ between workers."""
    states = [bucket.state.worker for bucket in optimizer.stepper.buckets]
    counters = optimizer.stepper.scalars.traffic_counters
    return tf.nest.flatten(states) + ([] if counters is None else [counters])
