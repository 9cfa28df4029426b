"""The rounds of 0/1 Adam: which steps end them, and what a worker keeps until then."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives import Collectives
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.optimizers.assigned_weights import AssignedWeights
from tfgradcomp.optimizers.local_step_schedule import UnsentSteps
from tfgradcomp.optimizers.onebit_adam import VarianceSteps


@dataclass(frozen=True)
class RoundSteps(VarianceSteps):
    """The steps that travel as float32, and those that end a round.

    Attributes:
        local_steps: The most steps of a round.
        double_every: After so many steps a round has twice as many.
    """

    local_steps: int = 1
    double_every: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_integer("local_steps", self.local_steps, 1)
        check_integer("double_every", self.double_every, 1)

    @override
    def refreshes(self):
        # A mean of gradients at weights that differ says nothing of the variance.
        end = self.warmup_steps + self.double_every
        is_alone = self.local_steps > 1
        return [step for step in super().refreshes() if step < end or not is_alone]

    def end_round(self, step: tf.Tensor) -> tf.Tensor:
        """Returns whether a step after the warm-up is the last one of a round.

        Args:
            step: int64 scalar, as `include` takes it.
        """
        past = step - self.warmup_steps
        last = (self.local_steps - 1).bit_length()
        stage = tf.minimum(past // self.double_every, last)
        place = past - stage * self.double_every + 1
        doubled = tf.bitwise.left_shift(tf.ones([], tf.int64), stage)
        length = tf.minimum(doubled, self.local_steps)
        # A round belongs to one stage.
        is_cut = (stage < last) & tf.equal(place, self.double_every)
        return tf.equal(place % length, 0) | is_cut


class Round:
    """The state of a round that has not ended, on a worker.

    Attributes:
        steps: int64, the steps that it has taken alone.
        rate: float32, the learning rates of the round, added up.
        unsent: The steps of each variable.
        starts: The weights before the first step.
        means: The mean momenta, each weighted by its learning rate.
        assigned: The weights that a program assigns, which a round then starts from.
    """

    def __init__(self, weights: list, collectives: Collectives):
        """Creates the variables.

        Args:
            weights: The trainable variables.
            collectives: The collectives between the workers.
        """
        self.steps = PerReplicaVariable(tf.zeros([], tf.int64), "round_steps")
        self.rate = PerReplicaVariable(tf.zeros([]), "round_rate")
        self.unsent = UnsentSteps(len(weights))

        def zeros(name):
            return [
                PerReplicaVariable(tf.zeros(one.shape, one.dtype), f"{name}_{index}")
                for index, one in enumerate(weights)
            ]

        self.starts = zeros("round_start")
        self.assigned = AssignedWeights(weights, self.starts, collectives)
        self.means = zeros("round_mean")

    def named(self) -> dict[str, PerReplicaVariable]:
        """Returns the variables by the names that they have in files."""
        found = {
            "round_steps": self.steps,
            "round_rate": self.rate,
            "round_unsent_steps": self.unsent.variable,
            "round_assigned": self.assigned.flags,
        }
        for index, pair in enumerate(zip(self.starts, self.means, strict=True)):
            found[f"round_start_{index}"], found[f"round_mean_{index}"] = pair
        return found
