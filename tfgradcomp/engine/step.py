"""The step of a built optimizer: one exchange of all buckets, then the update."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import keras
import tensorflow as tf

from tfgradcomp.collectives import Collectives
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.compat.xla import in_xla
from tfgradcomp.core import Context
from tfgradcomp.core.split_vector import Vector
from tfgradcomp.engine import inner_step, nonfinite
from tfgradcomp.engine import moments as second
from tfgradcomp.engine.batched_all_gather import BatchedAllGather
from tfgradcomp.engine.consistency_check import path_of
from tfgradcomp.engine.dense import dense, touched_rows, unique_rows, with_values
from tfgradcomp.engine.fused_apply import FusedApply
from tfgradcomp.engine.gradient_bucket import GradientBucket, Gradients
from tfgradcomp.engine.probe import IGNORE, Probe
from tfgradcomp.engine.rows_bucket import RowsBucket
from tfgradcomp.engine.uncompressed_steps import UncompressedSteps


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
    def create(cls, seed: int, counts_traffic: bool) -> StepVariables:
        """Creates the variables."""
        counters = None
        if counts_traffic:
            counters = PerReplicaVariable(tf.zeros([3], tf.int64), "moved")
        return cls(
            PerReplicaVariable(tf.constant(seed, tf.int64), "seed"),
            PerReplicaVariable(tf.constant(0.0), "previous_learning_rate"),
            PerReplicaVariable(tf.constant(0, tf.int64), "skipped_steps"),
            counters,
        )

    def variables(self) -> list[PerReplicaVariable]:
        """Returns those that there are."""
        return [variable for variable in self if variable is not None]


class Stepper:
    """Takes the steps of an optimizer that has been built.

    Attributes:
        inner: The inner optimizer.
        buckets: The buckets of the gradient.
        scalars: The small variables.
        collectives: What moves vectors between the replicas.
        probe: Observes the steps; None where nobody does.
        sends_momenta: Whether the inner optimizer's momenta travel.
    """

    probe: Probe | None = None
    sends_momenta: ClassVar[bool] = False

    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        buckets: tuple[GradientBucket, ...],
        scalars: StepVariables,
        collectives: Collectives,
        variables: list,
        raises: bool,
        uncompressed_steps: UncompressedSteps,
        workers: Collectives | None = None,
    ):
        """Remembers what does not change from step to step.

        Args:
            inner: The inner optimizer, built.
            buckets: The buckets.
            scalars: The small variables.
            collectives: What moves vectors between the replicas, by whose number Keras
                has divided the loss.
            variables: All trainable variables.
            raises: Whether a skipped step ends in an error.
            uncompressed_steps: The steps that travel as float32.
            workers: What the buckets exchange by, where a worker has several replicas;
                None: `collectives`.
        """
        check_members(inner, buckets)
        self._shared = BatchedAllGather(buckets)
        self.inner = inner
        self.buckets = buckets
        self.scalars = scalars
        self.collectives = collectives
        self._workers = workers or collectives
        self._variables = variables
        self._raises = raises
        self._float_steps = uncompressed_steps

    def apply(self, gradients: list, moments: list, variables: list) -> None:
        """Takes a step, or adds to the gradients of a later one.

        Args:
            gradients: Tensors or `IndexedSlices`, this replica's share, which Keras
                divides by N.
            moments: Second moments in the units of `gradients` squared, or Nones.
            variables: The variables, in the same order.
        """
        inner = self.inner
        pairs = list(zip(gradients, variables, strict=True))
        gradients = [self._formed(gradient, variable) for gradient, variable in pairs]
        # Keras divides the loss by the number of replicas; undone first, so that
        # clipping and the method see a replica's own mean gradient, whatever it is.
        scale = self.collectives.num_workers / (inner.loss_scale_factor or 1)
        steps = inner.gradient_accumulation_steps
        if steps or inner_step.clips(inner):
            gradients = with_values(
                lambda values: [g * tf.cast(scale, g.dtype) for g in values], gradients
            )
            moments = second.multiplied(moments, scale)
            scale = 1.0

        def take(gradients, moments):
            if steps:
                gradients = self._accumulated(gradients, variables)
            clipped = with_values(
                lambda values: inner_step.clipped(inner, values, variables), gradients
            )
            factors = None
            if inner_step.clips(inner) and any(m is not None for m in moments):
                factors = self._by_position(
                    second.clip_factors(clipped, gradients), variables
                )
            table = Gradients(
                values=self._by_position(clipped, variables),
                scale=scale,
                moments=self._by_position(moments, variables),
                clip_factors=factors,
                calls=steps,
            )
            self.take(table, variables)

        def accumulate(gradients, moments):
            inner_step.accumulate(inner, _all_dense(gradients, variables), variables)
            table = self._by_position(moments, variables)
            for bucket in self.buckets:
                bucket.accumulate(table)

        if steps:
            is_due = inner_step.is_update_step(inner)
            conditional(is_due, take, accumulate, args=(gradients, moments))
        else:
            take(gradients, moments)

    def take(self, gradients: Gradients, variables: list) -> None:
        """Exchanges the gradients of a step and updates the variables.

        Args:
            gradients: This worker's gradients, over all variables.
            variables: Those that have one.
        """
        if not self._float_steps:
            return self._take(gradients, variables, False)

        def branch(is_uncompressed_step):
            def take(values, moments, factors):
                own = gradients._replace(
                    values=values, moments=moments, clip_factors=factors
                )
                self._take(own, variables, is_uncompressed_step)

            return take

        conditional(
            self._float_steps.include(self.context().step),
            branch(True),
            branch(False),
            args=(gradients.values, gradients.moments, gradients.clip_factors),
        )

    def _take(self, gradients, variables, is_uncompressed_step):
        context, decayed = self.context(), compat.decayed(self.inner, self._variables)
        observed = (
            self.probe.begin(context, is_uncompressed_step) if self.probe else None
        )
        observers = [
            observed.observer_of(b) if observed else IGNORE for b in self.buckets
        ]
        together = [] if is_uncompressed_step else self._shared.indices
        alone = {
            index: bucket.exchange(
                gradients, decayed, context, is_uncompressed_step, observers[index]
            )
            for index, bucket in enumerate(self.buckets)
            if index not in together
        }
        shared = {}
        if together:
            shared = self._shared.exchange(gradients, decayed, context, observers)
        by_index = alone | shared
        results = [by_index[index] for index in range(len(self.buckets))]
        updates, state = [], []
        for bucket, result in zip(self.buckets, results, strict=True):
            updates.append((bucket, result.update))
            state += _pairs(bucket.state, result.state)
        if self.scalars.traffic_counters is not None and not is_uncompressed_step:
            elements = [result.elements_sent for result in results]
            words = [result.variable_length_words for result in results]
            state.append(
                (self.scalars.traffic_counters, self._counted(elements, words))
            )
        flags = nonfinite.first_of([result.nonfinite_flags for result in results])
        self.commit(updates, state, flags, variables, context)
        if observed:
            observed.end(flags, tf.convert_to_tensor(self.inner.iterations))

    def commit(
        self,
        updates: list[tuple[GradientBucket, Vector]],
        state: list,
        flags: tf.Tensor,
        variables: list,
        context: Context,
    ) -> None:
        """Updates weights and state, or nothing where a flag is not 0.

        Args:
            updates: Each bucket and its decoded reply.
            state: Pairs of a variable of the method's state and its new value.
            flags: All workers' flags.
            variables: The variables to update.
            context: The step.
        """
        inner = self.inner
        direct = FusedApply(inner, updates, variables)
        pieces: dict = {}
        for bucket, vector in direct.others:
            pieces.update(bucket.split(vector))
        applied = {}
        for index, variable in enumerate(variables):
            position = compat.position(inner, variable)
            if position not in direct.positions:
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
            self._update(gradients, variables, direct.of(words))

        def skip(applied, words, new_values, flags):
            self.drop_window()
            self._report(flags)

        conditional(
            tf.reduce_all(tf.equal(flags, 0)),
            update,
            skip,
            args=(applied, direct.words, list(new_values), flags),
        )

    def _update(self, gradients, variables, direct):
        inner_step.update(self.inner, gradients, variables, direct)

    def drop_window(self) -> None:
        """Forgets the gradients that were to be accumulated, if any."""
        if self.inner.gradient_accumulation_steps:
            inner_step.drop_window(self.inner)
            self._forget_moments()

    def _forget_moments(self):
        for bucket in self.buckets:
            bucket.forget()

    def raise_unreported(self) -> None:
        """Raises an error for skipped steps that could raise none, inside XLA.

        Raises:
            FloatingPointError: If there were any.
        """
        count = int(self.scalars.skipped_steps.numpy())
        if self._raises and count:
            self.scalars.skipped_steps.assign(tf.zeros([], tf.int64))
            raise FloatingPointError(
                f"{count} steps were skipped because a gradient was NaN or Inf. Lower "
                "the learning rate, clip (clipnorm=...), or go on with "
                "nonfinite='skip'."
            )

    def context(self) -> Context:
        """Returns what methods may know about this step."""
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
        is_slices = isinstance(gradient, tf.IndexedSlices)
        # XLA compiles nothing whose size varies.
        if is_slices and not in_xla() and self._is_table(variable):
            return unique_rows(gradient, variable)
        return dense(gradient, variable)

    def _is_table(self, variable):
        position = compat.position(self.inner, variable)
        return any(
            isinstance(bucket, RowsBucket) and bucket.positions == [position]
            for bucket in self.buckets
        )

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

    def _counted(self, elements, words):
        """Returns the new traffic counters, by what each bucket has sent in a step."""
        counters = tf.convert_to_tensor(self.scalars.traffic_counters)
        counters += tf.constant([1, 0, 0], tf.int64)
        for bucket, *counts in zip(self.buckets, elements, words, strict=True):
            if bucket.has_variable_length:
                counters += tf.cast(tf.stack([0, *counts]), tf.int64)
        return counters

    def _report(self, flags):
        checks = []
        # XLA compiles no assertion; then this counts, and `fit` raises at its end.
        if self._raises and not in_xla():
            paths = [path_of(variable) for variable in self._variables]
            checks = [nonfinite.assertion(flags, paths)]
        with tf.control_dependencies([check for check in checks if check is not None]):
            skipped = self.scalars.skipped_steps
            skipped.assign(skipped + 1)


def check_members(
    inner: keras.optimizers.Optimizer, buckets: tuple[GradientBucket, ...]
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


def _pairs(variables, values):
    flat = tf.nest.flatten(variables), tf.nest.flatten(values)
    return list(zip(*flat, strict=True))


def _all_dense(gradients, variables):
    return [dense(g, v) for g, v in zip(gradients, variables, strict=True)]


def _joined(updates, position, shape):
    """Joins the pieces of a variable's update."""
    own = sorted(piece for piece in updates if piece.position == position)
    parts = [updates[piece] for piece in own]
    if isinstance(parts[0], tf.IndexedSlices):
        values = tf.reshape(parts[0].values, [-1, *shape[1:]])
        return tf.IndexedSlices(values, parts[0].indices, tf.constant([*shape]))
    vector = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
    return tf.reshape(vector, shape)
