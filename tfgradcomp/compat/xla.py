"""Whether what is being traced will be compiled by XLA."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext


def in_xla() -> bool:
    """Whether operations go into a graph for XLA (`jit_compile`), or one inside it."""
    if tf.executing_eagerly():
        return False
    return GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
