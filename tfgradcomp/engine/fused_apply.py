"""Updates that a native operation takes into the weights in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.core.split_vector import DecodeOp, SplitVector, Vector
from tfgradcomp.engine import update_rules
from tfgradcomp.engine.device_sharded_bucket import Bucket
from tfgradcomp.engine.inner_step import FusedUpdate


class FusedApply:
    """The buckets of a step whose updates are applied by native operations.

    One pass reads a bucket's words, or its decoded update where no native operation
    decodes it, and updates the weights and the optimizer's momenta. The bits are those
    of the optimizer's own step, which writes and reads several vectors. This requires
    an inner optimizer with such a step, and float32 variables.

    Attributes:
        others: The other buckets, with their decoded updates.
        positions: Positions of the variables that are updated here.
        words: The tensors that each bucket is updated from.
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        updates: Sequence[tuple[Bucket, Vector | tf.IndexedSlices]],
        variables: Sequence[keras.Variable],
    ):
        """Chooses among buckets with their decoded replies, for some variables."""
        self._inner = inner
        self._rule = update_rules.rule_of(inner)
        self._variables = {
            compat.position(inner, variable): variable
            for variable in variables
            if variable.dtype == "float32"
        }
        taken = [(bucket, self._source(bucket, vector)) for bucket, vector in updates]
        # A variable's pieces, in buckets of one vector, are all applied alike.
        left = {bucket.vector for bucket, source in taken if source is None}
        self.others = [update for update in updates if update[0].vector in left]
        self._taken = [
            (bucket, source)
            for bucket, source in taken
            if source is not None and bucket.vector not in left
        ]
        self.positions = {p for bucket, _ in self._taken for p in bucket.positions}
        self.words = [
            source.arguments if isinstance(source, DecodeOp) else source.tensors
            for _, source in self._taken
        ]

    def of(self, words: Sequence[tuple[tf.Tensor, ...]]) -> FusedUpdate | None:
        """Returns the update by `words`, as the caller's graph knows them, or None."""
        rule = self._rule
        if rule is None or not self._taken:
            return None

        def apply():
            groups = [
                (
                    [self._variables[position] for position in bucket.positions],
                    [piece.begin for piece in bucket.pieces],
                )
                for bucket, _ in self._taken
            ]
            targets = update_rules.targets(self._inner, rule, groups)
            for (_, source), tensors, target in zip(
                self._taken, words, targets, strict=True
            ):
                if isinstance(source, DecodeOp):
                    decoding = source._replace(arguments=tuple(tensors))
                    ops.apply_decoded(decoding, *target)
                else:
                    ops.apply_vector(SplitVector(tensors), *target)

        return FusedUpdate(self.positions, apply)

    def _source(self, bucket, vector):
        """Returns what a bucket's update is read from; None: the optimizer takes it."""
        is_known = self._variables.keys() >= {*bucket.positions}
        if not self._rule or not is_known or isinstance(vector, tf.IndexedSlices):
            return None
        if isinstance(vector, SplitVector) and vector.decoding:
            return vector.decoding
        return SplitVector(bucket.split(vector).values()) if ops.can_apply() else None
