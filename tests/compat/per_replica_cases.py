"""Per-replica variables that a pool's workers create."""

import contextlib
import math
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import collective_ops

import tfgradcomp
from tests.cluster import strategy_and_rank


def sends_of_state():
    """Returns how many elements are broadcast for variables and for an optimizer."""
    strategy, _ = strategy_and_rank()
    sent = []

    def counted(original, shape_at):
        def call(*args, **kwargs):
            sent.append(int(np.prod(args[shape_at].as_list())))
            return original(*args, **kwargs)

        return call

    functions = {"broadcast_send": 1, "broadcast_recv": 0}
    with contextlib.ExitStack() as stack:
        for name, shape_at in functions.items():
            function = counted(getattr(collective_ops, name), shape_at)
            stack.enter_context(mock.patch.object(collective_ops, name, function))
        with strategy.scope():
            kernel = keras.Variable(tf.zeros([3000]))
            of_variable = sum(sent)
            optimizer = tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(0.1))
            optimizer.build([kernel])
    state = sum(math.prod(v.shape) for v in optimizer.variables)
    return of_variable, sum(sent) - of_variable, state
