"""Replies whose words are decoded straight into the weights."""

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
    """The buckets of a step whose updates are applied without a decoded vector.

    One pass reads the words and updates the weights and the optimizer's momenta. The
    bits are those of decoding and the optimizer's own step, which write and read a
    vector each. This requires a native operation that decodes, an inner optimizer with
    such a step, and float32 variables.

    Attributes:
        others: The other buckets, with their decoded updates.
        positions: Positions of the variables that are updated here.
        words: The tensors that each bucket is decoded from.
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        updates: Sequence[tuple[Bucket, Vector]],
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
        taken = [(bucket, self._decoding(bucket, vector)) for bucket, vector in updates]
        # A variable's pieces, in buckets of one vector, are all applied alike.
        long = {bucket.vector for bucket, decoding in taken if decoding is None}
        self.others = [update for update in updates if update[0].vector in long]
        self._taken = [
            (bucket, decoding)
            for bucket, decoding in taken
            if decoding is not None and bucket.vector not in long
        ]
        self.positions = {p for bucket, _ in self._taken for p in bucket.positions}
        self.words = [decoding.arguments for _, decoding in self._taken]

    def of(self, words: Sequence[tuple[tf.Tensor, ...]]) -> FusedUpdate | None:
        """Returns the update by `words`, as the caller's graph knows them, or None."""
        rule = self._rule
        if rule is None or not self._taken:
            return None

        def apply():
            coefficients = update_rules.coefficients(self._inner)
            for (bucket, decoding), arguments in zip(self._taken, words, strict=True):
                own = [self._variables[position] for position in bucket.positions]
                ops.apply_decoded(
                    decoding._replace(arguments=tuple(arguments)),
                    coefficients,
                    update_rules.handles(self._inner, own),
                    [piece.begin for piece in bucket.pieces],
                    rule,
                )

        return FusedUpdate(self.positions, apply)

    def _decoding(self, bucket: Bucket, vector: Vector) -> DecodeOp | None:
        is_known = self._variables.keys() >= set(bucket.positions)
        decoding = vector.decoding if isinstance(vector, SplitVector) else None
        return decoding if self._rule and is_known else None
