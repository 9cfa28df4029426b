"""The header of a message to a parameter server, from any words."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import make_context
from tfgradcomp.parameter_server.header import HEADER_WORDS, read_header, write_header


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1000, 10**6])
def test_any_words_are_flags_and_a_step(rows):
    rng = np.random.default_rng(rows)
    words = rng.integers(0, 2**32, [rows, HEADER_WORDS], dtype=np.uint32).view(np.int32)
    flags, context = read_header(tf.constant(words), make_context(rank=1))
    np.testing.assert_array_equal(flags, words[:, 0])
    first = words[0].tobytes()
    assert context.step.numpy().tobytes() == first[4:12]
    assert context.seed.numpy().tobytes() == first[12:20]
    assert context.learning_rate.numpy().tobytes() == first[20:24]
    assert context.previous_learning_rate.numpy().tobytes() == first[24:28]
    assert context.rank == -1
    # Servers use these attributes.
    old, new = tf.constant([1.0]), tf.constant([2.0])
    for row in words[:: rows // 100]:
        _, context = read_header(tf.constant(row[np.newaxis]), make_context())
        rate = row[5:6].view(np.float32)[0]
        assert context.unless_zero_lr(new, old).numpy()[0] == (2 if rate > 0 else 1)
        assert context.random_stream().shape == [3]
        assert context.learning_rate_ratio.shape == []
        again = write_header(tf.constant(row[0]), context)
        np.testing.assert_array_equal(again, row)
