"""A test for graphs that XLA will compile."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext


def in_xla() -> bool:
    """Returns whether the current graph, or one around it, is compiled by XLA."""
    if tf.executing_eagerly():
        return False
    return GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
