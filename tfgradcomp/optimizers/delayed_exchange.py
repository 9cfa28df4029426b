"""Exchanges of local steps that are applied some steps after they are due."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.optimizers.local_step_schedule import UnsentSteps


def check_delay(every: int | str, delay: int, mix: float | None) -> None:
    """Checks the arguments of a delayed exchange.

    Raises:
        ValueError: If one is out of range, or has no meaning beside the others.
    """
    check_integer("delay", delay, 0)
    if delay and (isinstance(every, str) or delay >= every):
        raise ValueError(
            "An exchange is applied before the next one is due. Expected: `every` as a "
            f"number, and a smaller `delay`. Received: every={every!r}, delay={delay}"
        )
    if mix is not None and not (delay and 0 <= mix < 1):
        raise ValueError(
            "`mix` is the share of a worker's own weights when a delayed exchange is "
            "applied. Expected: at least 0 and below 1, with `delay` of at least 1; or "
            f"None. Received: mix={mix!r}, delay={delay}"
        )


class DelayedExchange:
    r"""Sends the weights of step t in step t + d, while that step computes.

    Step t keeps a snapshot \( s = x_t \) of a group's weights. The exchange of
    \( \bar x - s \) in step t + d depends on nothing of that step's forward and
    backward pass, so that TensorFlow runs both at the same time. At its end

    \( x \leftarrow \bar x + (x - s) \) or
    \( x \leftarrow \alpha x + (1 - \alpha) \bar x \)

    with the new anchor \( \bar x \), and `mix` \( \alpha \). Between two steps, nothing
    travels: snapshots and counts are the whole state.

    Attributes:
        snapshots: The copies of the weights, which workers do not share.
        waiting: int64, the steps since each group's snapshot; 0: there is none.
    """

    def __init__(
        self,
        weights: list[keras.Variable],
        snapshots: list[keras.Variable],
        groups: Sequence[Collection[int]],
        unsent: UnsentSteps,
        delay: int,
        mix: float | None,
    ):
        r"""Creates the counts.

        Args:
            weights: The weights that each worker trains alone.
            snapshots: A copy of each of them.
            groups: The positions of each group's variables.
            unsent: The steps of each variable that were not exchanged.
            delay: Number of steps d, at least 1.
            mix: The share \( \alpha \); None for the first rule.
        """
        self._weights, self.snapshots = weights, snapshots
        self._groups, self._unsent = groups, unsent
        self._delay, self._mix = delay, mix
        zeros = tf.zeros([len(groups)], tf.int64)
        self.waiting = PerReplicaVariable.known(zeros, "waiting_steps")
        self._assigned = PerReplicaVariable.known(zeros, "assigned_anchors")

    def begin(self, index: int, is_due: tf.Tensor) -> None:
        """Keeps a group's weights for an exchange, unless one is waiting already."""
        is_free = tf.equal(tf.convert_to_tensor(self.waiting)[index], 0)

        def keep():
            for position in self._groups[index]:
                weight = tf.convert_to_tensor(self._weights[position])
                self.snapshots[position].assign(weight)
            self.waiting.assign(self.waiting + self._one(index))

        conditional(is_due & is_free, keep, lambda: None)

    def is_due(self, index: int) -> tf.Tensor:
        """Returns whether a group's exchange is to be applied in this step."""
        return tf.convert_to_tensor(self.waiting)[index] >= self._delay

    def note(self, index: int, is_assigned: tf.Tensor) -> None:
        """Keeps whether a program has assigned a group's anchors, on any worker."""
        own = self._one(index)
        noted = tf.cast(is_assigned, tf.int64) * own
        self._assigned.assign(self._assigned * (1 - own) + noted)

    def apply(self, index: int, positions: Collection[int], anchors: list) -> None:
        """Takes the new anchors of some of a group's variables into the weights."""
        is_assigned = tf.convert_to_tensor(self._assigned)[index] > 0
        for position in sorted(positions):
            weight, anchor = self._weights[position], anchors[position]
            own, new = tf.convert_to_tensor(weight), tf.convert_to_tensor(anchor)
            moved = new + (own - tf.convert_to_tensor(self.snapshots[position]))
            if self._mix is not None:
                mixed = self._mix * own + (1 - self._mix) * new
                # A mean with what another worker has replaced would keep half of it.
                moved = tf.where(is_assigned, moved, mixed)
            weight.assign(moved)
        self._unsent.leave(positions, self._delay)
        self.waiting.assign(self.waiting * (1 - self._one(index)))

    def count(self) -> None:
        """Counts a step of all groups that wait."""
        waiting = tf.convert_to_tensor(self.waiting)
        self.waiting.assign(waiting + tf.cast(waiting > 0, tf.int64))

    def forget(self) -> None:
        """Drops all snapshots, once the weights themselves have been exchanged."""
        self.waiting.assign(tf.zeros_like(tf.convert_to_tensor(self.waiting)))

    def restore(self, waiting: np.ndarray) -> None:
        """Assigns the counts of a file, which has restored the snapshots as well.

        Raises:
            ValueError: If other groups of variables wait in the file.
        """
        shape = self.waiting.local_values().shape
        if waiting.shape[-1] not in (1, shape[-1]):
            raise ValueError(
                f"The file's variables wait in {waiting.shape[-1]} groups, those of "
                f"this optimizer in {shape[-1]}. Expected: `every` and `stagger` of "
                f"the training that was saved. Received: {shape[-1]} groups"
            )
        self.waiting.assign_local_values(np.broadcast_to(waiting, shape))

    def _one(self, index):
        return tf.one_hot(index, len(self._groups), dtype=tf.int64)
