"""0/1 Adam: 1-bit Adam whose workers take more and more steps alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.assignment.compatibility import check_no_averages
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.assignments import assignments_ignored, note_restore
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compressors.base import all_finite
from tfgradcomp.engine import inner_step, local_update
from tfgradcomp.engine.step_records import Gradients
from tfgradcomp.optimizers.onebit_adam import (
    FrozenVarianceStepper,
    OneBitAdam,
)
from tfgradcomp.optimizers.wrapper import InnerOptimizer
from tfgradcomp.optimizers.zero_one_rounds import Round, RoundSteps
from tfgradcomp.transports import Traffic
from tfgradcomp.transports.traffic import mean_traffic


class RoundStepper(FrozenVarianceStepper):
    """Takes steps alone, and exchanges the mean momentum of a round at its end.

    Attributes:
        round: What is kept until then.
        round_steps: Which steps end a round.
    """

    round: Round
    uncompressed_steps: RoundSteps

    @override
    def take_uncompressed(self, gradients, variables):
        self.round.rate.assign(self._rate())
        super().take_uncompressed(gradients, variables)

    @override
    def take_frozen(self, gradients, variables):
        kept, step, rate = self.round, self.context().step, self._rate()
        own = self.own_momenta(gradients)
        is_first = tf.equal(tf.convert_to_tensor(kept.steps), 0)
        is_end = self.uncompressed_steps.end_round(step)
        told, safe = self._without_nonfinite(own.values, is_first & is_end)
        positions = compat.positions(self.inner, variables)
        total = tf.where(is_first, rate, rate + tf.convert_to_tensor(kept.rate))
        kept.rate.assign(total)
        conditional(
            is_first,
            lambda values, share: self._set_means(values),
            self._move_means,
            args=(told, tf.math.divide_no_nan(rate, total)),
        )

        def take_alone(values):
            is_new = tf.equal(kept.unsent.most(positions), 0)
            conditional(is_new, lambda: self._begin(positions), lambda: None)
            kept.unsent.add(positions)
            kept.steps.assign(tf.convert_to_tensor(kept.steps) + 1)
            table = [values[compat.position(self.inner, v)] for v in variables]
            direct = local_update.fused(self.inner, table, variables)
            inner_step.update(self.inner, table, variables, direct)

        conditional(
            is_end,
            lambda values: self.exchange(variables),
            take_alone,
            args=(safe,),
        )

    def _rate(self):
        return tf.cast(inner_step.learning_rate(self.inner), tf.float32)

    def _without_nonfinite(self, values, is_alone):
        """Returns momenta to exchange, and to take a step with alone.

        A gradient that is not finite is taken for the momentum itself. Where it is to
        raise an error, the exchange finds it.
        """
        known = [value for value in values if value is not None]
        is_finite = all_finite(known)
        safe = [
            None if value is None else tf.where(is_finite, value, before)
            for value, before in zip(values, compat.momenta(self.inner), strict=True)
        ]
        if self._raises:
            return values, safe
        left_out = tf.logical_not(is_finite | is_alone)
        skipped = self.scalars.skipped_steps
        skipped.assign(tf.convert_to_tensor(skipped) + tf.cast(left_out, tf.int64))
        told = [
            None if value is None else tf.where(is_alone, value, own)
            for value, own in zip(values, safe, strict=True)
        ]
        return told, safe

    def _set_means(self, values):
        for mean, value in zip(self.round.means, values, strict=True):
            if value is not None:
                mean.assign(tf.cast(value, mean.dtype))

    def _move_means(self, values, share):
        known = [index for index, value in enumerate(values) if value is not None]
        is_new = tf.equal(self.round.unsent.most(known), 0)
        for mean, value in zip(self.round.means, values, strict=True):
            if value is not None:
                before = tf.where(is_new, tf.zeros_like(mean), mean)
                moved = (tf.cast(value, mean.dtype) - before) * tf.cast(
                    share, mean.dtype
                )
                mean.assign(before + moved)

    def _begin(self, positions):
        for position in positions:
            weight = tf.convert_to_tensor(self._variables[position])
            self.round.starts[position].assign(weight)

    def exchange(self, variables: list) -> None:
        """Ends a round: a step from its start, by the mean momentum of all workers.

        Args:
            variables: Those that have had a gradient.
        """
        kept = self.round
        positions = compat.positions(self.inner, variables)

        def go_back():
            for position in positions:
                start = tf.convert_to_tensor(kept.starts[position])
                self._variables[position].assign(start)

        was_alone = kept.unsent.most(positions) > 0
        conditional(was_alone, go_back, lambda: None)
        means = [
            tf.convert_to_tensor(mean) if index in positions else None
            for index, mean in enumerate(kept.means)
        ]
        nothing = [None] * len(means)
        self.take_momenta(Gradients(means, moments=nothing), variables)
        kept.assigned.end_exchange(positions, variables)
        kept.steps.assign(tf.zeros([], tf.int64))
        kept.unsent.leave(positions)

    @override
    def _update(self, gradients, variables, direct):
        rate = tf.convert_to_tensor(self.round.rate)
        inner_step.update(self.inner, gradients, variables, direct, rate)

    @override
    def drop_window(self):
        super().drop_window()
        # Workers that were alone have no momentum in common.
        was_alone = tf.convert_to_tensor(self.round.unsent.variable) > 0
        for index, momentum in enumerate(compat.momenta(self.inner)):
            value = tf.convert_to_tensor(momentum)
            momentum.assign(tf.where(was_alone[index], tf.zeros_like(value), value))


class ZeroOneAdam(OneBitAdam):
    r"""1-bit Adam with rounds of local steps: less than a bit an element.

    It is `OneBitAdam`, and in between two exchanges workers take steps of Adam with
    their own momenta. A round has one step at first, and twice as many after each
    `double_every` steps, up to `local_steps`. At its end, of the steps
    \( h = 1 \dots H \) of worker i with rates \( \eta_h \),

    \( \bar m_i = \sum_h \eta_h m_{i,h} / \sum_h \eta_h \)

    travels as the momentum of 1-bit Adam does, with error feedback both ways, and the
    reply m is the momentum of all. From where the round began, every worker takes one
    step with it, of the rate \( \sum_h \eta_h \). (The paper sends
    \( \sum_h \eta_h m_{i,h} \) and divides the reply; with the mean, residuals are in
    units of m and stay right where learning rates change.)

    All workers have the same weights, to the bit, after each round. One ends also as
    each epoch of `fit` does, and before `evaluate` and `predict`; `synchronize` asks
    for that anywhere else. A model that is saved within a round holds this worker's
    weights; backups hold each worker's, and a run that resumes there ends in the same
    bits. Nothing is compared by `verify_every` within a round.

    A gradient that is not finite counts for nothing, in that worker's step alone, with
    `nonfinite="skip"`; with `"raise"` the error comes as the round ends. AdamW's decay
    is taken in each step alone, and again by the sum of rates in the step of all.

    Args:
        inner_optimizer: `keras.optimizers.Adam` or `AdamW`, without `amsgrad`.
        warmup_steps: Steps of plain Adam, 1 or more.
        refresh: After the warm-up v takes part again in steps whose distance doubles
            after so many of them, until the first round of 2 steps; None: in none. The
            paper's is 16.
        local_steps: The most steps of a round. The paper's is 16.
        double_every: See above. The paper's is 32,678.
        variance_floor: A part of the root mean square of \( \sqrt v \), as
            `OneBitAdam` explains it.
        block_size: Elements a block. None: a block is a parameter tensor.
        **kwargs: Those that `OneBitAdam` takes.

    Raises:
        ValueError: If an argument is out of range, or the inner optimizer is another,
            accumulates gradients or averages weights.

    Example:
        ```python
        adam = keras.optimizers.Adam(1e-3)
        optimizer = tfgradcomp.ZeroOneAdam(adam, warmup_steps=500, double_every=2_000)
        model.compile(optimizer, "mse")
        ```

    References:
        Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1
        Adam, 2022, Algorithm 1 and Section 6.
    """

    stepper_class = RoundStepper
    has_local_steps = True
    _stepper: RoundStepper
    _round: Round

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        warmup_steps: int,
        refresh: int | None = 16,
        local_steps: int = 16,
        double_every: int = 32_678,
        variance_floor: float = 0.1,
        block_size: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            inner_optimizer,
            warmup_steps,
            refresh,
            variance_floor,
            block_size,
            **kwargs,
        )
        accumulated = self.inner_optimizer.gradient_accumulation_steps
        if accumulated:
            raise ValueError(
                "Rounds of local steps accumulate momenta already. Expected: "
                "gradient_accumulation_steps=None, and more `local_steps`. "
                f"Received: gradient_accumulation_steps={accumulated}"
            )
        check_no_averages(self.inner_optimizer, "use_ema=False")
        self.keep_arguments(local_steps=local_steps, double_every=double_every)
        self.uncompressed_steps = RoundSteps(
            warmup_steps,
            refresh=refresh,
            variance_floor=variance_floor,
            local_steps=local_steps,
            double_every=double_every,
        )

    @override
    def _bind(self, is_fallback=None):
        super()._bind(is_fallback)
        if "_round" not in vars(self):
            weights = compat.trainable_variables(self)
            self._round = Round(weights, self._plan.collectives)
            compat.track(self, [*self._round.named().values()])
            self._end_now = tf.function(
                lambda positions, *observers: self._end_round(positions),
                autograph=False,
            )
        self._stepper.round = self._round
        self._stepper.notice = self._round.assigned

    @override
    def apply(self, grads, trainable_variables=None, second_moments=None):
        with assignments_ignored():
            super().apply(grads, trainable_variables, second_moments)

    @property
    def variables(self):
        """The inner optimizer's variables, the method's state, and the round's."""
        own = [*self._round.named().values()] if self.built else []
        return super().variables + own

    @property
    @override
    def traffic(self) -> Traffic:
        """The traffic of one worker in a step, as the mean over the longest rounds.

        Raises:
            ValueError: If the optimizer is not built yet.
        """
        return mean_traffic([super().traffic], self.local_steps)

    def _end_round(self, positions):
        counter = compat.step_counter(self.inner_optimizer)
        steps = tf.convert_to_tensor(counter)
        variables = compat.trainable_variables(self.inner_optimizer)
        with self._stepper.frozen_variance():
            self._stepper.exchange([variables[position] for position in positions])
        counter.assign(steps)

    @override
    def synchronize(self):
        """Ends the round, so that weights are equal everywhere.

        All workers must call it, outside of a graph. `fit` does as each epoch ends,
        `evaluate` and `predict` do as they begin.
        """
        if self._is_within_round():
            observers = self._stepper.observers.values()
            positions = self._round.unsent.positions()
            with assignments_ignored():
                self._strategy.run(self._end_now, args=(positions, *observers))

    def _is_within_round(self):
        return self.built and bool(self._round.unsent.positions())

    @override
    def verify(self, others=()):
        if not self._is_within_round():
            super().verify(others)

    @override
    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self._is_within_round():
            for name, variable in self._round.named().items():
                store[name] = variable.local_values()

    @override
    def load_own_variables(self, store):
        own = self._round.named() if self.built else {}
        if own:
            note_restore(self._round.assigned)
        names = [name for name in store.keys() if name not in own]
        super().load_own_variables({name: store[name] for name in names})
        for name, variable in own.items():
            values = variable.local_values()
            found = store[name] if name in store.keys() else np.zeros_like(values)
            variable.assign_local_values(np.array(found))
        if own and "round_unsent_steps" not in store.keys():
            # In version 0.2 all variables took part in a round.
            steps = self._round.steps.local_values()[:, np.newaxis]
            self._round.unsent.restore(steps)
