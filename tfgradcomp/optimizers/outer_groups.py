"""Groups of variables whose exchanges take turns, and one optimizer for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.assignments import assignments_ignored
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.optimizer_step import averages_of
from tfgradcomp.engine.consistency_check import check_holds_local_steps
from tfgradcomp.engine.summary import joined, print_summary
from tfgradcomp.optimizers.assigned_weights import AssignedWeights
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.delayed_exchange import DelayedExchange
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
        delayed: DelayedExchange | None = None,
    ):
        """Creates the state of all groups.

        Args:
            outer: The optimizer that exchanges.
            weights: The weights that each worker trains alone.
            anchors: The weights that all workers have in common.
            groups: The positions of each group's variables.
            delayed: What waits for its exchange, if exchanges are delayed.
        """
        self.groups, self.delayed = groups, delayed
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
        snapshots = delayed.snapshots if delayed else None
        collectives = outer.plan.collectives
        self.assigned = AssignedWeights(weights, anchors, collectives, snapshots)

    def exchange(self, positions: Collection[int], ends_round: bool = True) -> None:
        """Exchanges what has changed of some variables, and makes all workers equal.

        Args:
            positions: The variables, which have had a gradient.
            ends_round: Whether all groups have had their turn then.
        """
        self._exchange(positions, self._weights, ends_round)
        for position in sorted(positions):
            anchor = tf.convert_to_tensor(self._anchors[position])
            self._weights[position].assign(anchor)

    def finalize(self) -> None:
        """Ends training: averages of `use_ema` become anchors and weights."""
        outer = self.outers[0]
        if not outer.inner_optimizer.use_ema:
            return
        outer.finalize_variable_values(self._anchors)
        with assignments_ignored():
            for weight, anchor in zip(self._weights, self._anchors, strict=True):
                weight.assign(anchor)

    def turns(self, positions: Collection[int]) -> dict[int, frozenset[int]]:
        """Returns which of some variables are in each group, if any are."""
        turns = {
            index: frozenset(positions).intersection(group)
            for index, group in enumerate(self.groups)
        }
        return {index: own for index, own in turns.items() if own}

    def exchange_waiting(self, turns: dict[int, frozenset[int]]) -> dict:
        """Exchanges the snapshots that have waited long enough; weights stay.

        Args:
            turns: The variables of each group that have a gradient in this step.

        Returns:
            Whether each group's snapshots were exchanged, boolean scalars.
        """
        delayed = self.delayed
        if delayed is None:
            return {}

        def exchange(index):
            ends_round = index == max(turns)
            are_assigned = self._exchange(turns[index], delayed.snapshots, ends_round)
            delayed.note(index, are_assigned[index])

        are_due = {index: delayed.is_due(index) for index in turns}
        for index, is_due in are_due.items():
            conditional(is_due, functools.partial(exchange, index), lambda: None)
        return are_due

    def apply_waiting(self, turns: dict[int, frozenset[int]], are_due: dict) -> None:
        """Takes what `exchange_waiting` has changed into the weights, after the step.

        Args:
            turns: The argument of `exchange_waiting`.
            are_due: What it has returned.
        """
        delayed = self.delayed
        if delayed is None:
            return
        for index, is_due in are_due.items():
            take = functools.partial(delayed.apply, index, turns[index], self._anchors)
            conditional(is_due, take, lambda: None)
        delayed.count()

    def _exchange(self, positions, weights, ends_round):
        outer = self.outers[0]
        number = outer.stepper.collectives.num_workers
        counter = compat.step_counter(outer.inner_optimizer)
        step = tf.convert_to_tensor(counter)
        are_assigned = {}
        for index, (one, group) in enumerate(
            zip(self.outers, self.groups, strict=True)
        ):
            own = [position for position in group if position in positions]
            anchors = [self._anchors[position] for position in own]
            if one is not outer:
                counter.assign(step)
            # A file may have made another stepper.
            one.stepper.notice = self.assigned
            # Keras divides by N, too.
            one.apply(
                [
                    (tf.convert_to_tensor(anchor) - tf.convert_to_tensor(weight))
                    / number
                    for anchor, weight in zip(
                        anchors, [weights[position] for position in own], strict=True
                    )
                ],
                anchors,
            )
            if own:
                are_assigned[index] = self.assigned.end_exchange(
                    own, _other_results(one, own)
                )
        if not ends_round:
            counter.assign(step)
        return are_assigned

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
        if self.delayed:
            own += [*self.delayed.snapshots, self.delayed.waiting]
        return [*{id(variable): variable for variable in own}.values()]

    def save(self, store: Any) -> None:
        """Saves anchors and snapshots of this worker."""
        for name, variable in self._copies().items():
            store[name] = variable.numpy()
        store["assigned"] = self.assigned.flags.local_values()
        if self.delayed:
            store["waiting_steps"] = self.delayed.waiting.local_values()

    def load(self, store: Any, owner: str) -> None:
        """Restores what `save` saved; a file without snapshots has none that wait.

        Raises:
            ValueError: If it is the state of another optimizer than `owner`.
        """
        copies = self._copies()
        anchors = [name for name in copies if name.startswith("anchor_")]
        check_holds_local_steps(owner, store, [*anchors, "local_steps"])
        for name, variable in copies.items():
            if name in store:
                variable.assign(store[name])
        none = np.zeros([1, 1], np.int64)
        # Files of version 0.2 do not have it.
        assigned = store["assigned"] if "assigned" in store else none
        self.assigned.restore(np.array(assigned))
        if self.delayed:
            waiting = store["waiting_steps"] if "waiting_steps" in store else none
            self.delayed.restore(np.array(waiting))

    def _copies(self):
        snapshots = self.delayed.snapshots if self.delayed else []
        kinds = {"anchor": self._anchors, "snapshot": snapshots}
        return {
            f"{kind}_{index}": variable
            for kind, variables in kinds.items()
            for index, variable in enumerate(variables)
        }

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
