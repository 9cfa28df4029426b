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
    """Returns how many elements are broadcast for a variable and for each optimizer.

    The elements of each optimizer's state follow.
    """
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
            of_variable, of_optimizers, states = sum(sent), [], []
            for optimizer in (
                tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(0.1)),
                tfgradcomp.TernGrad(keras.optimizers.Adam()),
                tfgradcomp.TernGrad(keras.optimizers.Adagrad()),
            ):
                sent.clear()
                optimizer.build([kernel])
                of_optimizers.append(sum(sent))
                states.append(sum(math.prod(v.shape) for v in optimizer.variables))
    return of_variable, of_optimizers, states
