"""The records that a step hands from function to function."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from tfgradcomp.core import Context, State
from tfgradcomp.core.split_vector import Vector


class Gradients(NamedTuple):
    """The gradients of one worker in a step, as lists over all variables.

    Attributes:
        values: Tensors, or `IndexedSlices` with each row once, for a `RowsBucket`; None
            where a variable has no gradient, which counts as zero.
        scale: Factor that makes the values this worker's own mean gradients.
        moments: Second moments, in the units of `values` squared; None where unknown.
        clip_factors: Factors by which clipping changed each element; None where
            nothing is clipped.
        calls: Number of calls whose gradients `values` are the mean of, or None.
    """

    values: list[tf.Tensor | None]
    scale: float = 1.0
    moments: Sequence[tf.Tensor | None] = ()
    clip_factors: list[tf.Tensor | None] | None = None
    calls: int | None = None


class StepInputs(NamedTuple):
    """The inputs of a step that all buckets share.

    Attributes:
        gradients: This worker's gradients.
        weights: All variables, in the order of the model; None for each that is
            excluded from weight decay.
        context: The step.
        notice: What this worker tells the others: 0 or 1, int32; None: nothing is told.
    """

    gradients: Gradients
    weights: Sequence
    context: Context
    notice: tf.Tensor | None = None


class Notice(Protocol):
    """A bit that each worker tells all others with the gradients of a step."""

    def tell(self, positions: Collection[int]) -> tf.Tensor | None:
        """Returns this worker's bit, int32, where some variables have a gradient."""

    def hear(self, told: tf.Tensor) -> None:
        """Takes the largest bit of all workers."""


class StateLeaf(NamedTuple):
    """A vector of a bucket's state.

    Attributes:
        role: `"worker"`: differs between workers; `"moments"` as well; `"server"`: cut
            by elements between the servers; `"local"`: the same on all workers.
        name: Name in files.
        sizes: Items of each tensor of the bucket's layout.
    """

    role: str
    name: str
    sizes: tuple[int, ...]


class BucketState(NamedTuple):
    """The state of a bucket by its roles: nests of variables, or of their values.

    Attributes:
        worker: The compressor's state; differs between workers.
        moments: Second moments that accumulate until a step is taken, or `()`.
        server: The server's state, as far as it is held here.
        local: The weight decay's state, the same on all workers.
    """

    worker: State
    moments: State
    server: State
    local: State

    def named_leaves(self) -> Iterator[tuple[str, str, Any]]:
        """Yields the role, the name and the leaf, in the order of `tf.nest.flatten`."""
        for role, nest in self._asdict().items():
            for path, leaf in keras.tree.flatten_with_path(nest):
                keys = [str(key) for key in path if key != "inner"]
                # Second moments are a worker's own, too.
                names = ["worker", "moments"] if role == "moments" else [role, *keys]
                yield role, ".".join(names), leaf


class CompressedBucket(NamedTuple):
    """A compressed bucket, ready to be pushed.

    Attributes:
        payload: A tensor for each field.
        context: The step, with the results of the first round.
        flag: int32 scalar, 0 where all is finite; else see `nonfinite`.
        worker_state: The compressor's new state.
        elements_sent: Elements that this worker sends a value for.
    """

    payload: dict[str, tf.Tensor]
    context: Context
    flag: tf.Tensor
    worker_state: State
    elements_sent: tf.Tensor | int


class BucketResult(NamedTuple):
    """The result of a bucket's exchange.

    Attributes:
        update: float32, the same on all workers.
        state: The new state.
        nonfinite_flags: All workers' flags, int32 `[N]`.
        elements_sent: Elements that this worker sent a value for.
        variable_length_words: See `tfgradcomp.transports.ExchangeResult`.
    """

    update: Vector
    state: BucketState
    nonfinite_flags: tf.Tensor
    elements_sent: tf.Tensor | int
    variable_length_words: tf.Tensor | int
