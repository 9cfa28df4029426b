"""The small variables of an optimizer's own state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.engine.device_sharded_bucket import Bucket


class StepVariables(NamedTuple):
    """The small variables of an optimizer's own state.

    Attributes:
        seed: int64, the key of all random numbers.
        previous_learning_rate: float32, the last non-zero learning rate.
        skipped_steps: int64, steps skipped because a gradient was not finite.
        traffic_counters: int64 `[3]`, where messages vary in length: steps, elements
            sent, words that varied. Its name in files is `moved`.
    """

    seed: PerReplicaVariable
    previous_learning_rate: PerReplicaVariable
    skipped_steps: PerReplicaVariable
    traffic_counters: PerReplicaVariable | None = None

    @classmethod
    def create(cls, seed: int, buckets: Sequence[Bucket]) -> StepVariables:
        """Creates the variables."""
        counters = None
        if any(bucket.has_variable_length for bucket in buckets):
            counters = PerReplicaVariable(tf.zeros([3], tf.int64), "moved")
        return cls(
            PerReplicaVariable(tf.constant(seed, tf.int64), "seed"),
            PerReplicaVariable(tf.constant(0.0), "previous_learning_rate"),
            PerReplicaVariable(tf.constant(0, tf.int64), "skipped_steps"),
            counters,
        )

    def variables(self) -> list[PerReplicaVariable]:
        """Returns the variables that exist."""
        return [variable for variable in self if variable is not None]

    def counted(
        self, buckets: Sequence[Bucket], elements: list, words: list
    ) -> list[tuple[PerReplicaVariable, tf.Tensor]]:
        """Returns the traffic counters with their new values; nothing without counters.

        Args:
            buckets: The buckets.
            elements: The elements that each bucket has sent.
            words: The words of each bucket that varied.
        """
        if self.traffic_counters is None:
            return []
        counts = tf.convert_to_tensor(self.traffic_counters)
        counts += tf.constant([1, 0, 0], tf.int64)
        for bucket, *added in zip(buckets, elements, words, strict=True):
            if bucket.has_variable_length:
                counts += tf.cast(tf.stack([0, *added]), tf.int64)
        return [(self.traffic_counters, counts)]
