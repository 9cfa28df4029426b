"""Assertions in graphs."""

import pytest
import tensorflow as tf

from tfgradcomp.compat.assertions import checked


def double_of_valid(x):
    valid = checked(x, tf.reduce_all(x > 0), ["must be positive. Received: x=", x])
    return 2 * valid


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_invalid_tensors_raise_the_message(wrap):
    double = wrap(double_of_valid)
    assert double(tf.constant([1, 2])).numpy().tolist() == [2, 4]
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        double(tf.constant([1, -2]))
    assert "must be positive. Received: x=" in str(caught.value)
    assert "-2" in str(caught.value)


def test_a_graph_has_no_operation_in_a_sequence():
    spec = tf.TensorSpec([None], tf.int32)
    graph = tf.function(double_of_valid).get_concrete_function(spec).graph
    assert not any(op.op_def.is_stateful for op in graph.get_operations())
