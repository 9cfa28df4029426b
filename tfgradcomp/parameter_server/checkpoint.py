"""The state of all workers and servers in the files of the chief's optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfgradcomp.optimizers import CompressedOptimizer
from tfgradcomp.parameter_server.membership import Membership


class ClusterCheckpoint:
    """Lets the chief's optimizer save and restore the state of a whole cluster.

    A file is then like one of a process with as many replicas as there are workers.

    Args:
        membership: Who takes part.
    """

    def __init__(self, membership: Membership):
        self._membership = membership

    def attach(self, optimizer: CompressedOptimizer) -> None:
        """Makes the variables of the chief's optimizer stand for those elsewhere.

        Args:
            optimizer: The chief's optimizer, built of the same buckets as the workers'.
        """
        for index, bucket in enumerate(optimizer.stepper.buckets):
            for leaf, variable in enumerate(tf.nest.flatten(bucket.state.worker)):
                self._delegate(
                    variable, self._read_workers, self._restore_workers, index, leaf
                )
            for leaf, variable in enumerate(tf.nest.flatten(bucket.state.server)):
                self._delegate(
                    variable,
                    self._read_servers,
                    self._restore_servers,
                    bucket.name,
                    leaf,
                )
        counters = optimizer.stepper.scalars.traffic_counters
        if counters is not None:
            self._delegate(counters, self._read_moved, self._restore_moved)

    def _delegate(self, variable, read: Callable, restore: Callable, *place):
        read = functools.partial(read, *place)
        variable.delegate_to(
            functools.partial(self._membership.with_recovery, read),
            functools.partial(restore, *place),
        )

    def _read_moved(self):
        return np.stack([_moved(w).numpy() for w in self._membership.workers])

    def _restore_moved(self, values):
        for worker, value in zip(self._membership.workers, values, strict=True):
            with tf.device(worker.device):
                _moved(worker).assign(value)

    def _read_workers(self, index, leaf):
        workers = self._membership.workers
        return np.stack([_worker_leaf(w, index, leaf).numpy() for w in workers])

    def _restore_workers(self, index, leaf, values):
        for worker, value in zip(self._membership.workers, values, strict=True):
            with tf.device(worker.device):
                _worker_leaf(worker, index, leaf).assign(value)

    def _read_servers(self, call_site, leaf):
        first = self._membership.workers[0]
        whole = self._membership.channel.states.whole_at(
            call_site, first.committed_steps(), first.kept_states()
        )
        return whole[leaf][np.newaxis]

    def _restore_servers(self, call_site, leaf, values):
        self._membership.channel.states.restore(call_site, leaf, values[0])


def _moved(worker):
    return worker.optimizer.stepper.scalars.traffic_counters


def _worker_leaf(worker, index, leaf):
    state = worker.optimizer.stepper.buckets[index].state
    return tf.nest.flatten(state.worker)[leaf]
