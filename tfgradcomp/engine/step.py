"""The step of a built optimizer: one exchange of all buckets, then the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.xla import in_xla
from tfgradcomp.core import Context
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.engine import inner_step, nonfinite
from tfgradcomp.engine import moments as second
from tfgradcomp.engine.consistency_check import path_of
from tfgradcomp.engine.dense import (
    dense,
    multiplied,
    touched_rows,
    unique_rows,
    with_values,
)
from tfgradcomp.engine.device_sharded_bucket import Bucket
from tfgradcomp.engine.exchange import Exchange, UncompressedExchange
from tfgradcomp.engine.fused_apply import FusedApply
from tfgradcomp.engine.plan import Plan
from tfgradcomp.engine.probe import IGNORE, ObservedStep, Observer
from tfgradcomp.engine.step_records import Gradients, Notice, StepInputs
from tfgradcomp.engine.step_variables import StepVariables


class Stepper:
    """Takes the steps of a built optimizer.

    Attributes:
        inner: The inner optimizer.
        buckets: The buckets of the gradient.
        scalars: The small variables.
        collectives: The collectives between the replicas, by whose number Keras has
            divided the loss.
        uncompressed_steps: The steps whose gradients travel as float32.
        observers: The observers of the steps, by their names.
        notice: What the workers tell each other with each step, or None.
        sends_momenta: Whether the inner optimizer's momenta travel.
    """

    sends_momenta: ClassVar[bool] = False
    notice: Notice | None = None

    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        plan: Plan,
        scalars: StepVariables,
        raises: bool,
    ):
        """Takes a built inner optimizer; `raises`: whether skipped steps are errors."""
        check_members(inner, plan.buckets)
        self.inner, self.buckets, self.scalars = inner, plan.buckets, scalars
        self.collectives, self._workers = plan.replicas, plan.collectives
        self.uncompressed_steps = plan.uncompressed_steps
        # By kind, and by the positions of the variables that have a gradient.
        self._exchanges: dict[tuple, Exchange] = {}
        self._variables = compat.trainable_variables(inner)
        self._raises = raises
        self.observers: dict[str, Observer] = {}

    def apply(self, gradients: list, moments: list, variables: list) -> None:
        """Takes a step, or adds to the gradients of a later step.

        Args:
            gradients: Tensors or `IndexedSlices`, this replica's share, which Keras
                divides by N.
            moments: Second moments in the units of `gradients` squared, or Nones.
            variables: The variables, in the same order.
        """
        inner = self.inner
        pairs = list(zip(gradients, variables, strict=True))
        gradients = [self._formed(gradient, variable) for gradient, variable in pairs]
        # Keras divides the loss by the number of replicas. This comes first, so that
        # clipping and the method see a replica's own mean gradient.
        scale = self.collectives.num_workers / (inner.loss_scale_factor or 1)
        if inner.gradient_accumulation_steps or inner_step.clips(inner):
            gradients = multiplied(gradients, scale)
            moments = second.multiplied(moments, scale)
            scale = 1.0

        def take(gradients, moments):
            self._clip_and_take(gradients, moments, variables, scale)

        def accumulate(gradients, moments):
            inner_step.accumulate(inner, _all_dense(gradients, variables), variables)
            table = self._by_position(moments, variables)
            for bucket in self.buckets:
                for part in bucket.parts:
                    part.accumulate(table)

        if not inner.gradient_accumulation_steps:
            take(gradients, moments)
        else:
            is_due = inner_step.is_update_step(inner)
            conditional(is_due, take, accumulate, args=(gradients, moments))

    def _clip_and_take(self, gradients, moments, variables, scale):
        """Takes a step by unscaled gradients; ends the window, if there is one."""
        inner = self.inner
        if inner.gradient_accumulation_steps:
            gradients = self._accumulated(gradients, variables)
        clipped = with_values(
            lambda values: inner_step.clipped(inner, values, variables), gradients
        )
        factors = None
        if inner_step.clips(inner) and any(m is not None for m in moments):
            factors = second.clip_factors(clipped, gradients)
            factors = self._by_position(factors, variables)
        table = Gradients(
            values=self._by_position(clipped, variables),
            scale=scale,
            moments=self._by_position(moments, variables),
            clip_factors=factors,
            calls=inner.gradient_accumulation_steps,
        )
        self.take(table, variables)

    def take(self, gradients: Gradients, variables: list) -> None:
        """Takes a step: a compressed or an uncompressed one, by the step counter.

        Args:
            gradients: This worker's gradients, over all variables.
            variables: The variables that have one.
        """
        if not self.uncompressed_steps:
            return self.take_compressed(gradients, variables)

        def branch(take):
            def taken(values, moments, factors):
                own = Gradients(
                    values, gradients.scale, moments, factors, gradients.calls
                )
                take(own, variables)

            return taken

        conditional(
            self.uncompressed_steps.include(self.context().step),
            branch(self.take_uncompressed),
            branch(self.take_compressed),
            args=(gradients.values, gradients.moments, gradients.clip_factors),
        )

    def take_compressed(self, gradients: Gradients, variables: list) -> None:
        """Takes a step whose gradients travel compressed."""
        self._take(gradients, variables, self.exchange_of(variables))

    def take_uncompressed(self, gradients: Gradients, variables: list) -> None:
        """Takes a step whose gradients travel as float32."""
        exchange = self.exchange_of(variables, UncompressedExchange)
        self._take(gradients, variables, exchange)

    def exchange_of(self, variables: list, kind: type[Exchange] = Exchange) -> Exchange:
        """Returns the exchange of a step in which some variables have a gradient.

        The others take no part: neither their weights nor any state of them change, and
        buckets without any gradient are not exchanged, unless an observer needs them.
        """
        positions = compat.positions(self.inner, variables)
        needs_all = any(one.needs_all_buckets for one in self.observers.values())
        key = kind, positions, needs_all
        if key not in self._exchanges:
            self._exchanges[key] = kind(
                [
                    bucket.with_gradients(positions)
                    for bucket in self.buckets
                    if needs_all
                    or bucket.route.exchanges_every_step
                    or not positions.isdisjoint(bucket.positions)
                ]
            )
        return self._exchanges[key]

    def _take(self, gradients, variables, exchange):
        """Exchanges the gradients of a step and updates the variables."""
        context, buckets = self.context(), exchange.buckets
        weights = compat.decayed(self.inner, self._variables)
        observed = None
        if self.observers:
            observed = ObservedStep(buckets, context, exchange.is_uncompressed)
        observers = observed.buckets if observed else [IGNORE] * len(buckets)
        notice = None
        if self.notice:
            notice = self.notice.tell(compat.positions(self.inner, variables))
        step = StepInputs(gradients, weights, context, notice)
        results = exchange.exchange_all(step, observers)
        updates, state = [], []
        for bucket, result in zip(buckets, results, strict=True):
            updates.append((bucket, result.update))
            state += pairs_of(bucket.state, result.state)
        if not exchange.is_uncompressed:
            elements = [result.elements_sent for result in results]
            words = [result.variable_length_words for result in results]
            state += self.scalars.counted(buckets, elements, words)
        flags = nonfinite.first_of([result.nonfinite_flags for result in results])
        if self.notice and notice is not None:
            flags, told = nonfinite.without_notices(flags)
            self.notice.hear(told)
        self.commit(updates, state, flags, variables, context)
        if observed:
            iterations = tf.convert_to_tensor(self.inner.iterations)
            observed.end(self.observers.values(), flags, iterations)

    def commit(
        self,
        updates: Sequence[tuple[Bucket, Vector]],
        state: list,
        flags: tf.Tensor,
        variables: list,
        context: Context,
    ) -> None:
        """Updates weights and state, or skips the step where a flag is not 0.

        Args:
            updates: Each bucket and its decoded reply.
            state: Pairs of a variable of the method's state and its new value.
            flags: All workers' flags.
            variables: The variables to update.
            context: The step.
        """
        inner = self.inner
        fused = FusedApply(inner, updates, variables)
        pieces: dict = {}
        for bucket, vector in fused.others:
            pieces.update(bucket.split(vector))
        applied = {}
        for index, variable in enumerate(variables):
            position = compat.position(inner, variable)
            if position not in fused.positions:
                joined = _joined(pieces, position, variable.shape)
                applied[index] = tf.cast(joined, variable.dtype)
        previous = context.unless_zero_lr(
            context.learning_rate, context.previous_learning_rate
        )
        state = [*state, (self.scalars.previous_learning_rate, previous)]
        targets, new_values = zip(*state, strict=True)

        def update(applied, words, new_values, flags):
            for variable, value in zip(targets, new_values, strict=True):
                if isinstance(value, tf.IndexedSlices):
                    variable.assign_rows(value)
                else:
                    variable.assign(value)
            gradients = [applied.get(index) for index in range(len(variables))]
            self._update(gradients, variables, fused.of(words))

        def skip(applied, words, new_values, flags):
            self.drop_window()
            self._report(flags)

        conditional(
            tf.reduce_all(tf.equal(flags, 0)),
            update,
            skip,
            args=(applied, fused.words, list(new_values), flags),
        )

    def _update(self, gradients, variables, fused):
        inner_step.update(self.inner, gradients, variables, fused)

    def drop_window(self) -> None:
        """Drops the gradients that are being accumulated, if any."""
        if self.inner.gradient_accumulation_steps:
            inner_step.drop_window(self.inner)
            self.forget_moments()

    def forget_moments(self) -> None:
        """Drops the second moments that are being accumulated."""
        for bucket in self.buckets:
            for part in bucket.parts:
                part.forget()

    def raise_unreported(self, reported: int) -> None:
        """Raises an error for steps skipped inside XLA, which cannot raise any.

        Args:
            reported: The number of skipped steps that count no more.

        Raises:
            FloatingPointError: If there were any others.
        """
        count = int(self.scalars.skipped_steps.numpy()) - reported
        if self._raises and count > 0:
            self.scalars.skipped_steps.assign(tf.constant(reported, tf.int64))
            raise FloatingPointError(
                f"{count} steps were skipped because a gradient was NaN or Inf. Lower "
                "the learning rate, clip (clipnorm=...), or go on with "
                "nonfinite='skip'."
            )

    def context(self) -> Context:
        """Returns the context of this step, all that methods may know about it."""
        inner, scalars = self.inner, self.scalars
        rate = inner_step.learning_rate(inner)
        return Context(
            step=tf.cast(tf.convert_to_tensor(inner.iterations), tf.int64),
            seed=tf.convert_to_tensor(scalars.seed),
            rank=self._workers.rank,
            num_workers=self._workers.num_workers,
            learning_rate=tf.cast(rate, tf.float32),
            previous_learning_rate=tf.convert_to_tensor(scalars.previous_learning_rate),
        )

    def _formed(self, gradient, variable):
        """Returns a gradient as its bucket takes it."""
        # XLA compiles nothing whose size varies.
        if isinstance(gradient, tf.IndexedSlices) and not in_xla():
            position = [compat.position(self.inner, variable)]
            if any(b.takes_rows and b.positions == position for b in self.buckets):
                return unique_rows(gradient, variable)
        return dense(gradient, variable)

    def _accumulated(self, gradients, variables):
        """Returns the mean gradients of a window; of tables, the rows touched in it."""
        given = _all_dense(gradients, variables)
        means = inner_step.accumulated(self.inner, given, variables)
        return [
            touched_rows(mean) if isinstance(gradient, tf.IndexedSlices) else mean
            for gradient, mean in zip(gradients, means, strict=True)
        ]

    def _by_position(self, values, variables):
        """Returns a list over all variables; None where there is no value."""
        table = [None] * len(self._variables)
        for variable, value in zip(variables, values, strict=True):
            table[compat.position(self.inner, variable)] = value
        return table

    def _report(self, flags):
        checks = []
        # XLA compiles no assertion: there `fit` raises at its end, by the count.
        if self._raises and not in_xla():
            paths = [path_of(variable) for variable in self._variables]
            checks = [nonfinite.assertion(flags, paths)]
        with tf.control_dependencies([check for check in checks if check is not None]):
            skipped = self.scalars.skipped_steps
            skipped.assign(skipped + 1)


def check_members(
    inner: keras.optimizers.Optimizer, buckets: tuple[Bucket, ...]
) -> None:
    """Raises ValueError if a `MultiOptimizer` inside cannot take one common step."""
    optimizers = compat.members(inner)
    if optimizers == [inner]:
        return
    names = [type(one).__name__ for one in optimizers]
    steps = [one.gradient_accumulation_steps for one in optimizers]
    if any(steps):
        raise ValueError(
            "All gradients are exchanged in one step, so that the optimizers in a "
            "MultiOptimizer cannot accumulate over steps of their own. Expected: "
            "gradient_accumulation_steps=None. Received: "
            f"optimizers={names}, gradient_accumulation_steps={steps}"
        )
    leaves = {name for bucket in buckets for _, name, _ in bucket.state.named_leaves()}
    residuals = sorted(name for name in leaves if name.endswith("residual"))
    if residuals:
        raise ValueError(
            "Residuals are in units of one learning rate, and the optimizers in a "
            "MultiOptimizer have one each. Expected: one optimizer, or a method that "
            "keeps no residuals, such as TernGrad, QSGD or HalfPrecision. Received: "
            f"optimizers={names}, state={residuals}"
        )


def pairs_of(variables: Any, values: Any) -> list[tuple]:
    """Returns pairs of a variable and its value, of two nests of one structure."""
    flat = tf.nest.flatten(variables), tf.nest.flatten(values)
    return list(zip(*flat, strict=True))


def _all_dense(gradients, variables):
    return [dense(g, v) for g, v in zip(gradients, variables, strict=True)]


def _joined(updates, position, shape):
    """Joins the pieces of a variable's update."""
    own = sorted(piece for piece in updates if piece.position == position)
    parts = [updates[piece] for piece in own]
    if not parts:
        # A variable without elements has none.
        return tf.zeros(shape)
    if isinstance(parts[0], tf.IndexedSlices):
        values = tf.reshape(parts[0].values, [-1, *shape[1:]])
        return tf.IndexedSlices(values, parts[0].indices, tf.constant([*shape]))
    vector = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
    return vector if vector.shape == shape else tf.reshape(vector, shape)
