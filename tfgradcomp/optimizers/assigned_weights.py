"""Weights that a program assigns between two exchanges of local steps."""

from __future__ import annotations

from collections.abc import Collection

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import Collectives
from tfgradcomp.compat.assignments import note_restore, watch_assignments
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.compat.variables import tensorflow_variable
from tfgradcomp.core import Field
from tfgradcomp.transports.messages import pack, unpack


class AssignedWeights:
    """Makes an assigned weight the anchor: here at once, then worker 0's everywhere.

    A worker that has assigned a weight since its last exchange tells the others with
    the exchange's own messages. If any has, they take the anchors of worker 0 after it;
    what each has changed since the assignment is exchanged as ever.
    """

    def __init__(
        self,
        weights: list[keras.Variable],
        anchors: list[keras.Variable],
        collectives: Collectives,
        snapshots: list[keras.Variable] | None = None,
    ):
        """Creates the variables, and watches the weights.

        Args:
            weights: The weights that each worker trains alone.
            anchors: What their changes are counted from.
            collectives: The collectives between the workers.
            snapshots: Weights that wait for a delayed exchange.
        """
        self._weights, self._anchors = weights, anchors
        self._snapshots = snapshots
        self._collectives = collectives
        zeros = tf.zeros([len(weights)], tf.int32)
        self.flags = PerReplicaVariable.known(zeros, "assigned")
        self._told = PerReplicaVariable.known(tf.constant(0), "assigned_told")
        watch_assignments(weights, self)

    def assigned(self, variable: keras.Variable) -> None:
        """Makes an assigned weight this worker's anchor."""
        position = [weight is variable for weight in self._weights].index(True)
        self._anchors[position].assign(tensorflow_variable(variable))
        if self._snapshots is not None:
            # What waits there was trained from other weights.
            self._snapshots[position].assign(tensorflow_variable(variable))
        flags = self.flags.local_values()
        flags[:, position] = 1
        self.flags.assign_local_values(flags)

    def restore(self, flags: np.ndarray) -> None:
        """Assigns the flags of a file, which has restored the anchors as well."""
        note_restore(self)
        shape = self.flags.local_values().shape
        self.flags.assign_local_values(np.broadcast_to(flags, shape))

    def tell(self, positions: Collection[int]) -> tf.Tensor | None:
        """Returns whether this worker has assigned some weights, int32."""
        if self._collectives.num_workers == 1:
            return None
        flags = tf.convert_to_tensor(self.flags)
        return tf.reduce_max(tf.gather(flags, sorted(positions)))

    def hear(self, told: tf.Tensor) -> None:
        """Keeps what all workers have told until the end of the exchange."""
        self._told.assign(told)

    def end_exchange(self, positions: Collection[int], others: list) -> tf.Tensor:
        """Makes anchors equal if any worker has assigned them before the exchange.

        Args:
            positions: The weights that were exchanged.
            others: Further variables that follow from the anchors alone.

        Returns:
            Whether any worker has, a boolean scalar.
        """
        if self._collectives.num_workers == 1:
            return tf.constant(False)

        def take_first():
            _take_first([*(self._anchors[p] for p in positions), *others], own)
            kept = [int(p not in positions) for p in range(len(self._anchors))]
            self.flags.assign(tf.convert_to_tensor(self.flags) * tf.constant(kept))
            self._told.assign(tf.constant(0))

        own = self._collectives
        told = tf.convert_to_tensor(self._told) > 0
        conditional(told, take_first, lambda: None)
        return told


def _take_first(variables, collectives):
    """Assigns worker 0's values, bit by bit, on all workers."""
    values = [tf.reshape(tf.convert_to_tensor(v), [-1]) for v in variables]
    fields = {
        str(index): Field(value.shape[0], dtype=value.dtype.name)
        for index, value in enumerate(values)
    }
    words = pack({str(index): value for index, value in enumerate(values)}, fields)
    is_first = tf.equal(collectives.rank, 0)
    own = tf.where(is_first, words, tf.zeros_like(words))
    words = collectives.sum(own, f"local_steps/assigned/{words.shape[0]}")
    parts = unpack(words, fields).values()
    for variable, part in zip(variables, parts, strict=True):
        variable.assign(tf.reshape(part, variable.shape))
