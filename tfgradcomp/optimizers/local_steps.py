"""Local steps: workers train on their own, and exchange what has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.assignment.compatibility import check_local_steps
from tfgradcomp.collectives import across_hosts
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.assignments import assignments_ignored
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.core.arguments import check_instance, check_integer
from tfgradcomp.engine import nonfinite
from tfgradcomp.engine.consistency_check import check_same_at_start
from tfgradcomp.engine.local_update import take_own_step
from tfgradcomp.engine.summary import variables_to_build_for
from tfgradcomp.engine.variable_copies import copy_of
from tfgradcomp.fit.check_strategy import check_strategy
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.delayed_exchange import DelayedExchange, check_delay
from tfgradcomp.optimizers.local_step_schedule import (
    MOST,
    IntervalTuner,
    UnsentSteps,
    groups_of,
)
from tfgradcomp.optimizers.outer_groups import OuterGroups
from tfgradcomp.optimizers.wrapper import InnerOptimizer, OptimizerWrapper
from tfgradcomp.transports import Traffic


class LocalSteps(OptimizerWrapper):
    r"""Takes H steps on each worker by itself, then exchanges the sum of them.

    Each worker i trains its own weights \( x_i \) by `inner_optimizer`, and nothing
    travels. After H = `every` steps the difference from the common weights
    \( \bar x \), the anchor, is the gradient that `outer` compresses, exchanges and
    takes a step with:

    \( \Delta_i = \bar x - x_i, \qquad \bar x \leftarrow \mathrm{outer}(\bar x,
    \Delta_1 \dots \Delta_N), \qquad x_i \leftarrow \bar x \)

    Messages of 1 bit an element every 16 steps are 512 times fewer bytes than float32
    in each step. With an uncompressed `outer` and SGD(1), \( \bar x \) is the mean of
    the workers' weights; with H = 1 and SGD inside as well, it is synchronous SGD.

    All workers have the same weights, bit for bit, after each exchange without `delay`.
    `fit` makes such an exchange after each epoch, `evaluate` and `predict` as they
    begin, and `synchronize`. A model that is saved between two exchanges holds this
    worker's weights. The inner optimizer's state differs between workers. Backups hold
    it, so that a run that resumes between two exchanges ends in the same bits.

    A weight that a program assigns between two exchanges (`set_weights`, a callback) is
    the new anchor; all workers take that of worker 0 at the next exchange.

    A step whose gradient is not finite is left out, on that worker alone (several
    devices of a process do so together), and counted in `skipped_steps`. The next
    `synchronize` raises an error, unless `outer.nonfinite` is `"skip"`.

    Args:
        inner_optimizer: The optimizer of the local steps: a Keras optimizer, its name
            or its config.
        outer: A `CompressedOptimizer`, such as `DistEFBlockSGD(SGD(1.0))`. Its
            learning rate multiplies whole differences of weights: about 1, less with
            momentum.
        every: H. `"auto"`: H is measured in the first steps, with an exchange after
            each step, so that exchanges take about a tenth of the computing time; at
            most 64. `local_steps` returns H, which is saved with the state.
        warmup_steps: Number of steps at the start with an exchange after each.
        stagger: Whether groups of variables take turns, each every H steps, so that no
            step carries all bytes. A group is about as large as the largest variable.
            Rules in `outer` see the whole model, and a round, in which each group has
            its turn, is one step of its optimizer.
        delay: Number of steps d between the end of H steps and its exchange, less than
            H. With 1 or more, the exchange runs beside the forward and backward pass of
            step d and is applied after it. It takes a copy of the weights in memory.
        mix: With `delay`, a worker's own share of the weights that follow, \( \alpha \)
            in \( x_i \leftarrow \alpha x_i + (1 - \alpha) \bar x \), 0.5 in the paper.
            None: \( x_i \leftarrow \bar x \) plus what d steps have changed.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is out of range, if `outer` needs second moments, or
            if the inner optimizer averages weights (`use_ema`).

    Example:
        ```python
        optimizer = tfgradcomp.LocalSteps(
            keras.optimizers.Adam(1e-3),
            tfgradcomp.DistEFBlockSGD(keras.optimizers.SGD(1.0)),
            every=16,
        )
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```

    References:
        Stich, Local SGD Converges Fast and Communicates Little, 2018; Basu et al.,
        Qsparse-local-SGD, 2019; Douillard et al., DiLoCo, 2023; Douillard et al.,
        Streaming DiLoCo with overlapping communication, 2025.
    """

    needs_second_moments = False

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        outer: CompressedOptimizer,
        every: int | str = 16,
        warmup_steps: int = 0,
        stagger: bool = False,
        delay: int = 0,
        mix: float | None = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(inner_optimizer, name, **kwargs)
        check_instance("outer", outer, CompressedOptimizer)
        check_local_steps(self.inner_optimizer, outer, stagger)
        if every != "auto":
            check_integer("every", every, 1)
        check_integer("warmup_steps", warmup_steps, 0)
        check_delay(every, delay, mix)
        self.outer = outer
        self.keep_arguments(outer=outer, every=every, warmup_steps=warmup_steps)
        self.keep_arguments(stagger=stagger, delay=delay, mix=mix)
        self._is_checked = False
        check_strategy(self)

    @override
    def _build(self, variables):
        self._strategy = check_strategy(self)
        self._hosts = across_hosts(self._strategy)
        self.check_settings(self._strategy)
        self.inner_optimizer.build(variables)
        self._anchors = [copy_of(self, one, "anchor") for one in variables]
        # Steps since the last exchange, steps left out, and H (0 before it is known).
        counts = tf.constant([0, 0, self._given or 0], tf.int64)
        self._counts = PerReplicaVariable(counts, "local_steps")
        self._unsent = UnsentSteps(len(variables))
        compat.track(self, [self._counts, self._unsent.variable])
        sizes = [variable.shape.num_elements() for variable in variables]
        groups = groups_of(sizes, (self._given or MOST) if self.stagger else 1)
        self._delayed = None
        if self.delay:
            snapshots = [copy_of(self, one, "snapshot") for one in variables]
            arguments = groups, self._unsent, self.delay, self.mix
            self._delayed = DelayedExchange(variables, snapshots, *arguments)
            compat.track(self, [self._delayed.waiting])
        weights = variables, self._anchors
        self._groups = OuterGroups(self.outer, *weights, groups, self._delayed)
        # Keras saves what it finds among the attributes.
        self.outers = self._groups.outers
        self._stopwatch = IntervalTuner(self.outer.stepper.collectives)
        # Observed steps have their own function.
        self._exchange_now = tf.function(
            lambda positions, *observers: self._exchange_all(positions),
            autograph=False,
        )
        self.built = True

    @property
    def _given(self) -> int | None:
        return None if isinstance(self.every, str) else self.every

    @property
    def variables(self):
        """The inner optimizer's variables, the anchors, the variables of `outer`."""
        own = self.outer.variables
        if self.built:
            own = [*self._anchors, self._counts, self._unsent.variable]
            own += self._groups.variables()
        return self.inner_optimizer.variables + own

    @property
    def verify_every(self) -> int | None:
        """The argument of `outer`: `fit` compares the anchors after so many steps."""
        return self.outer.verify_every

    @property
    def skipped_steps(self) -> int:
        """Steps that this worker left out because a gradient was not finite."""
        return int(self._counts.numpy()[1]) if self.built else 0

    @property
    def local_steps(self) -> int | None:
        """H; None while it is measured."""
        if not self.built:
            return self._given
        return int(self._counts.numpy()[2]) or None

    @property
    def traffic(self) -> Traffic:
        """The traffic of one worker in a step, as the mean over H steps.

        Raises:
            ValueError: If the optimizer is not built yet.
        """
        if not self.built:
            return self.outer.traffic
        return self._groups.traffic(self.local_steps or 1)

    def summary(
        self,
        model: keras.Model | None = None,
        line_length: int | None = None,
        print_fn: Callable[[str], Any] | None = None,
    ) -> None:
        """Prints the summary of `outer` for an exchange, and when exchanges happen.

        Arguments and errors are those of `CompressedOptimizer.summary`.
        """
        if not self.built:
            self.build(variables_to_build_for(self, model))
        self._groups.print_summary(self.local_steps, line_length, print_fn)

    # The step.

    def apply(self, grads, trainable_variables=None):
        """Takes a step on this replica alone, and an exchange if one is due.

        The arguments are those of `CompressedOptimizer.apply`.

        Raises:
            ValueError: If there is not a gradient, or None, for each variable; if the
                workers' models or arguments differ, at the first step.
        """
        grads, variables = self.begin_step(grads, trainable_variables)
        if not grads:
            return
        self._check_workers()
        with keras.name_scope(self.name), assignments_ignored():
            grads, variables = compat.filtered(self.inner_optimizer, grads, variables)
            if grads:
                self._take(grads, variables)

    def _take(self, gradients, variables):
        collectives = self.outer.stepper.collectives
        # Keras divides the loss by it.
        number = collectives.num_workers
        is_finite = nonfinite.are_finite(gradients, collectives)
        counts = tf.convert_to_tensor(self._counts)
        is_warmup = tf.convert_to_tensor(self.outer.iterations) < self.warmup_steps
        positions = compat.positions(self.inner_optimizer, variables)
        turns = self._groups.turns(positions)
        # Before the step changes weights: it needs no gradient.
        are_due = self._groups.exchange_waiting(turns)

        def step(gradients):
            take_own_step(self.inner_optimizer, gradients, variables, number)

        conditional(is_finite, step, lambda gradients: None, args=(gradients,))
        left_out = tf.cast(tf.logical_not(is_finite), tf.int64)
        self._counts.assign(counts + tf.stack([1, left_out, 0]))
        self._unsent.add(positions)
        self._groups.apply_waiting(turns, are_due)

        if self._given:
            self._meet(turns, is_warmup)
        else:
            conditional(
                counts[2] > 0,
                lambda is_warmup: self._meet(turns, is_warmup),
                lambda is_warmup: self._meet_measured(positions),
                (is_warmup,),
            )

    def _meet(self, turns, is_warmup):
        """Exchanges the groups whose turn it is; all groups in the warm-up."""
        steps, _, every = tf.unstack(tf.convert_to_tensor(self._counts))
        every = self._given or every
        number = len(self._groups.groups)
        exchange = self._exchange if number > 1 else self._exchange_all
        for index, own in turns.items():
            turn = (index + 1) * every // number
            is_due = tf.equal((steps - turn) % every, 0)
            # The turn may never fall on a step in which these have a gradient.
            is_due |= self._unsent.most(own) >= every
            if self._delayed:
                self._delayed.begin(index, is_due & tf.logical_not(is_warmup))
                is_due = tf.constant(False)
            take = functools.partial(exchange, own, index == max(turns))
            if self.warmup_steps or not self._delayed:
                conditional(is_due | is_warmup, take, lambda: None)

    def _meet_measured(self, positions):
        """Exchanges all groups, and measures H."""
        variables = compat.trainable_variables(self.inner_optimizer)
        every = self._stopwatch.measure(
            variables, lambda: self._exchange_all(positions)
        )
        counts = tf.convert_to_tensor(self._counts)
        self._counts.assign(tf.stack([counts[0], counts[1], every]))

    def _exchange(self, positions, ends_round=True):
        """Exchanges what has changed of the variables that have had a gradient."""
        self._groups.exchange(positions, ends_round)
        self._unsent.leave(positions)

    def _exchange_all(self, positions, ends_round=True):
        """Exchanges as well, and begins turns anew once all weights are equal."""
        self._exchange(positions, ends_round)
        if self._delayed:
            self._delayed.forget()
        goes_on = self._unsent.most(range(len(self._anchors))) > 0
        keeps = tf.stack([tf.cast(goes_on, tf.int64), 1, 1])
        self._counts.assign(tf.convert_to_tensor(self._counts) * keeps)

    @override
    def synchronize(self):
        """Exchanges the changes of the weights, so that all workers are equal.

        All workers must call it outside of a graph, as `fit` does after each epoch.

        Raises:
            FloatingPointError: On all workers, if steps were left out because a
                gradient was not finite, and `outer.nonfinite` is `"raise"`.
        """
        if not self.built:
            return
        positions = self._unsent.positions()
        if positions:
            observers = self.outer.stepper.observers.values()
            with assignments_ignored():
                self._strategy.run(self._exchange_now, args=(positions, *observers))
        self._check_none_left_out()

    def _check_none_left_out(self):
        if self.outer.nonfinite != "raise":
            return
        left_out, counts = self.skipped_steps, self._counts.local_values()
        counts[:, 1] = 0  # Each is reported once.
        self._counts.assign_local_values(counts)
        nonfinite.check_none_left_out(left_out, self._hosts)

    @override
    def finalize_variable_values(self, var_list):
        # `fit` of a single process synchronizes nothing.
        if self.built and self._hosts is None:
            self._check_none_left_out()
        self.inner_optimizer.finalize_variable_values(var_list)
        if self.built:
            self._groups.finalize()

    def verify(self):
        """Compares the state that workers share, as `fit` does after each epoch.

        That is anchors, the state of `outer`, and weights right after an exchange. All
        workers must call it, outside of a graph.

        Raises:
            RuntimeError: On all workers, if any differ.
        """
        if self.built:
            is_between = self._counts.numpy()[0]
            weights = compat.trainable_variables(self.inner_optimizer)
            self._groups.verify([] if is_between else weights)

    def _check_workers(self):
        """Compares the models before the first step."""
        if self._is_checked:
            return
        if self._hosts is not None:
            check_same_at_start(self._hosts, self.outer.inner_optimizer)
        self._is_checked = True

    def save_own_variables(self, store):
        """Saves the anchors and the counts, of this worker alone, by local reads."""
        if self.built:
            self._groups.save(store)
            store["local_steps"] = self._counts.local_values()
            store["unsent_steps"] = self._unsent.variable.local_values()

    def load_own_variables(self, store):
        """Restores what `save_own_variables` saved.

        A file without any state leaves all as it is: its weights are assigned.

        Raises:
            ValueError: If it is the state of another optimizer.
        """
        if not self.built or not store.keys():
            return
        self._groups.load(store, self.name)
        counts = np.array(store["local_steps"])
        if self._given:
            counts[:, 2] = self._given
        if self.outer.nonfinite == "raise":
            counts[:, 1] = 0  # That run has reported them, or was told not to.
        self._counts.assign_local_values(counts)
        # Version 0.2 exchanged all variables together.
        unsent = store["unsent_steps"] if "unsent_steps" in store else counts[:, :1]
        self._unsent.restore(np.array(unsent))
