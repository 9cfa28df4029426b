"""Groups of variables whose exchanges take turns, and one optimizer for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.optimizer_step import averages_of
from tfgradcomp.engine.summary import joined, print_summary
from tfgradcomp.optimizers.assigned_weights import AssignedWeights
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.transports import Traffic
from tfgradcomp.transports.traffic import mean_traffic


class OuterGroups:
    """Exchanges the changes of weights, one group of variables at a time or all.

    Each group has its own state of the method. Rules see the whole model, and the
    optimizer in `outer` updates the anchors of all groups: a round, in which each group
    has its turn, is one step of it.

    Attributes:
        groups: The positions of each group's variables.
        outers: `outer` for the first group; for another group, a wrapper with the same
            arguments around the same optimizer.
        assigned: The weights that a program assigns.
    """

    def __init__(
        self,
        outer: CompressedOptimizer,
        weights: list[keras.Variable],
        anchors: list[keras.Variable],
        groups: Sequence[Collection[int]],
    ):
        """Creates the state of all groups.

        Args:
            outer: The optimizer that exchanges.
            weights: The weights that each worker trains alone.
            anchors: The weights that all workers have in common.
            groups: The positions of each group's variables.
        """
        self.groups = groups
        self._weights, self._anchors = weights, anchors
        kind, own = type(outer), vars(outer)
        arguments: dict[str, Any] = {
            name: own.get(name) for name in kind.argument_names
        }
        # Groups draw different random numbers.
        seeds = [outer.seed + index for index in range(1, len(groups))]
        self.outers = [outer, *(kind(**arguments | {"seed": one}) for one in seeds)]
        for one, group in zip(self.outers, groups, strict=True):
            one.build(anchors, group)
        self.assigned = AssignedWeights(weights, anchors, outer.plan.collectives)

    def exchange(self, positions: Collection[int], ends_round: bool = True) -> None:
        """Exchanges what has changed of some variables.

        Args:
            positions: The variables, which have had a gradient.
            ends_round: Whether all groups have had their turn then.
        """
        outer = self.outers[0]
        number = outer.stepper.collectives.num_workers
        counter = compat.step_counter(outer.inner_optimizer)
        step = tf.convert_to_tensor(counter)
        for one, group in zip(self.outers, self.groups, strict=True):
            own = [position for position in group if position in positions]
            anchors = [self._anchors[position] for position in own]
            weights = [self._weights[position] for position in own]
            if one is not outer:
                counter.assign(step)
            # A file may have made another stepper.
            one.stepper.notice = self.assigned
            # Keras divides by N, too.
            one.apply(
                [
                    (tf.convert_to_tensor(anchor) - tf.convert_to_tensor(weight))
                    / number
                    for anchor, weight in zip(anchors, weights, strict=True)
                ],
                anchors,
            )
            if own:
                self.assigned.end_exchange(own, _other_results(one, own))
            for anchor, weight in zip(anchors, weights, strict=True):
                weight.assign(tf.convert_to_tensor(anchor))
        if not ends_round:
            counter.assign(step)

    def traffic(self, steps: int) -> Traffic:
        """Returns the mean traffic of a step, with a round in so many steps."""
        return mean_traffic([outer.traffic for outer in self.outers], steps)

    def print_summary(
        self,
        steps: int | None,
        line_length: int | None,
        print_fn: Callable[[str], Any] | None,
    ) -> None:
        """Prints the summary of an exchange of all groups, and when it happens.

        Args:
            steps: Steps from one exchange to the next; None: not known yet.
            line_length: As `CompressedOptimizer.summary` takes it.
            print_fn: As `CompressedOptimizer.summary` takes it.
        """
        write, traffic = print_fn or print, self.traffic(1)
        plan = joined([outer.plan for outer in self.outers])
        print_summary(plan, traffic, line_length, write, "an exchange")
        if steps:
            sent, received = traffic.bytes_sent / steps, traffic.bytes_received / steps
            write(f"Mean bytes a step: {sent:,.0f} sent, {received:,.0f} received")
        when = f"every {steps} steps" if steps else 'as often as every="auto" finds'
        turns = ", the groups in turns" if len(self.groups) > 1 else ""
        write(f"An exchange {when}{turns}")

    def variables(self) -> list:
        """Returns the variables of all groups, each once."""
        own = [variable for outer in self.outers for variable in outer.variables]
        return [*{id(variable): variable for variable in own}.values()]

    def verify(self, others: Sequence = ()) -> None:
        """Compares the state that workers share, and other variables.

        Raises:
            RuntimeError: On all workers, if any differ.
        """
        outer, *more = self.outers
        shared = [variable for one in more for variable in one.shared_state()]
        outer.verify([*shared, *others])


def _other_results(outer, positions):
    """Returns what an exchange computes from anchors besides the anchors themselves."""
    decays = tf.nest.flatten([bucket.state.local for bucket in outer.plan.buckets])
    inner = outer.inner_optimizer
    averages = averages_of(inner) if inner.use_ema else []
    return [*decays, *(averages[position] for position in positions if averages)]
