"""A test for graphs that XLA compiles."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext


def in_xla() -> bool:
    """Returns whether XLA compiles the current graph, or a graph around it.

    TensorFlow has no public test, and XLA cannot compile some operations.
    """
    if tf.executing_eagerly():
        return False
    return GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
