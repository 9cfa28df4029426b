"""The contract of collectives, which move vectors between workers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

# Instance keys are bound to one size, so vectors of variable size are padded to one of
# few sizes: 1 to 15, and eight sizes per power of two.
_EIGHTS = [eighths << shift for shift in range(1, 26) for eighths in range(8, 16)]
PADDED_SIZES = np.array([*range(1, 16), *_EIGHTS])


class CollectiveCall(NamedTuple):
    """One use of a collective.

    Attributes:
        kind: Name of a method of `Collectives`: gather, all_to_all, sum or max.
        words: 32-bit words that a worker passes to the collective.
    """

    kind: str
    words: float

    def words_sent(self, num_workers: int) -> float:
        """Returns the words that a worker sends; it receives as many."""
        others = num_workers - 1
        if self.kind == "gather":
            return others * self.words
        if self.kind == "all_to_all":
            return others / num_workers * self.words
        # In a ring every word goes round twice, except the worker's own part.
        return 2 * others / num_workers * self.words


class Collectives:
    """Gathers and reduces vectors over workers.

    Each method takes the name of its call site, which is bound to one shape and type.
    The size of a `gather` may vary if it is a `padded_size` and equal on all workers.

    Attributes:
        num_workers: Python integer N.
        process_index: Python integer, the index of this process.
        num_processes: Python integer, the number of processes.
    """

    num_workers: int
    process_index: int = 0
    num_processes: int = 1

    @property
    def rank(self) -> int:
        """This worker's index in [0, N); read it within a step."""
        raise NotImplementedError

    def renewed(self) -> Collectives:
        """Returns collectives of the same workers whose call sites are others.

        Two optimizers have call sites of the same names.
        """
        return self

    def words_sent(self, call: CollectiveCall) -> float:
        """Returns the 32-bit words that a worker sends for a call."""
        return call.words_sent(self.num_workers)

    def words_received(self, call: CollectiveCall) -> float:
        """Returns the 32-bit words that a worker receives for a call."""
        return self.words_sent(call)

    def gather(self, vector: tf.Tensor, call_site: str) -> tf.Tensor:
        """Returns all workers' vectors, shape `[N, size]`, in the order of ranks."""
        raise NotImplementedError

    def all_to_all(self, rows: tf.Tensor, call_site: str) -> tf.Tensor:
        """Sends row k of `[N, size]` to worker k; returns the rows from all workers."""
        raise NotImplementedError

    def sum(self, vector: tf.Tensor, call_site: str) -> tf.Tensor:
        """Returns the element-wise sum over workers."""
        raise NotImplementedError

    def max(self, vector: tf.Tensor, call_site: str) -> tf.Tensor:
        """Returns the element-wise maximum over workers."""
        raise NotImplementedError


def padded_size(size: tf.Tensor) -> tf.Tensor:
    """Returns the allowed size for a vector of variable size, at most an eighth larger.

    Args:
        size: int32 scalar, less than 2**28. 0 becomes 1.
    """
    return tf.gather(tf.constant(PADDED_SIZES, tf.int32), padded_size_index(size))


def padded_size_index(size: tf.Tensor) -> tf.Tensor:
    """Returns the index in `PADDED_SIZES` of the smallest sufficient size."""
    sizes = tf.constant(PADDED_SIZES, tf.int32)
    return tf.searchsorted(sizes, tf.reshape(size, [1]))[0]


class SingleWorker(Collectives):
    """The collectives of a single worker, which return their argument."""

    num_workers = 1

    @property
    @override
    def rank(self):
        return 0

    @override
    def gather(self, vector, call_site):
        return vector[tf.newaxis]

    @override
    def all_to_all(self, rows, call_site):
        return rows

    @override
    def sum(self, vector, call_site):
        return vector

    @override
    def max(self, vector, call_site):
        return vector
