"""A conditional whose branches may update variables in any strategy."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfgradcomp.compat.strategy import runs_without_merge_call


def conditional(
    predicate: tf.Tensor, then: Callable, otherwise: Callable, args: tuple = ()
) -> None:
    """Runs `then(*args)` or `otherwise(*args)` in replica context, for its effects.

    Local replicas meet where a variable is updated. They cannot meet inside a `tf.cond`
    that each of them entered by itself, and TensorFlow has no conditional for all
    replicas. So they meet first, and enter it together. For the same reason a branch
    must take per-replica tensors as arguments, never from its closure.

    Args:
        predicate: bool scalar, equal in all replicas.
        then: The branch if the predicate holds.
        otherwise: The other branch.
        args: Nest of per-replica tensors for either branch.
    """
    if runs_without_merge_call():
        tf.cond(predicate, _effects(then, *args), _effects(otherwise, *args))
        return

    def across_replicas(strategy, predicate, args):
        def together(branch):
            return _effects(strategy.extended.call_for_each_replica, branch, args)

        (first, *_) = strategy.experimental_local_results(predicate)
        tf.cond(first, together(then), together(otherwise))

    tf.distribute.get_replica_context().merge_call(
        across_replicas, args=(predicate, args)
    )


def _effects(function, *args):
    def run():
        function(*args)
        return tf.constant(True)

    return run
