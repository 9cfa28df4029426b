"""Sparse words: packed and averaged, against one element after the other."""

import numpy as np
import pytest
import tensorflow as tf

from tests import reference as oracle
from tests.ops import cases
from tests.ops.cases import same
from tfgradcomp.ops import SplitVector

SHAPES = [(0, "one"), (1, "one"), (2, "ones"), (65, "ones"), (1000, "ragged")]
SHAPES += [(513, "one"), (6007, "buckets of 100")]


def flushed(x):
    """Denormals are kept or not as the processor's state says."""
    tiny = np.abs(x) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), x), x)


def vectors(size):
    """x, moments, residual, variance: some selected, all, none, many magnitudes."""
    x, e, m, v = (cases.floats(size, seed=i) for i in range(4))
    m, v, zero = m * m, v * v / 2, np.zeros(size, np.float32)
    wide = np.exp(6 * e) * np.sign(x)
    yield x, m, e, v
    yield wide, zero, zero, zero
    yield wide, wide * wide, zero, zero
    yield x, m + 100, e, v
    # At a distance of 1.5 from a power of two, and beside it.
    halves = np.float32(1.5) * 2 ** np.round(x)
    for x in (halves, np.nextafter(halves, np.float32(0)), -halves):
        yield x, zero, zero, zero
    yield np.round(x), zero, -np.round(x) * (e > 0), zero
    x, e = cases.floats(size, "huge"), cases.floats(size, "huge", 1)
    yield x, m, e, np.float32(1e37) * v
    x, e = cases.floats(size, "tiny"), cases.floats(size, "tiny", 1)
    yield x, zero, np.copysign(e, x), zero
    yield np.tile(cases.SPECIAL, -(-size // 20))[:size], m, zero, v


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "layout"), SHAPES)
def test_words_are_sent_of_what_is_unambiguous(ops, size, layout):
    splits = cases.row_splits(size, layout)
    sent = []
    for given in vectors(size):
        for alpha, decay in ((1.5, 0.999), (1.0, 1.0)):
            arguments = *given, alpha, decay, splits
            with np.errstate(all="ignore"):
                expected = oracle.pack_unambiguous(*map(flushed, given), *arguments[4:])
            result = ops.pack_unambiguous(*map(tf.constant, given), *arguments[4:])
            for i, (a, b) in enumerate(zip(result[:4], expected, strict=False)):
                same(*(flushed(c) if i > 1 else c for c in (a.numpy(), b)), i)
            assert result[4] == expected[4] and result[4].dtype == tf.int64
            sent.append(len(expected[0]))
    assert size < 65 or len(set(sent)) > 5


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "layout"), SHAPES)
def test_signs_are_sent_of_what_is_over_a_threshold(ops, size, layout):
    splits = cases.row_splits(size, layout)
    for x, m, e, v in vectors(size):
        for moments, variance in ((m, v), (None, None)):
            given = [x, moments, e, variance]
            for middle, alpha, decay in ((0.6, 1.5, 0.999), (1e-3, 2.0, 1.0)):
                args = cases.thresholds(splits, middle), alpha, decay, splits
                with np.errstate(all="ignore"):
                    inputs = [a if a is None else flushed(a) for a in given]
                    expected = oracle.pack_over_threshold(*inputs, *args)
                tensors = [a if a is None else tf.constant(a) for a in given]
                result = ops.pack_over_threshold(*tensors, *args)
                same(result[0], expected[0])
                same(flushed(result[1].numpy()), flushed(expected[1]))
                if variance is None:
                    assert result[2] is None
                else:
                    same(flushed(result[2].numpy()), flushed(expected[2]))
                assert result[3] == expected[3] and result[3].dtype == tf.int64


def test_the_example_of_the_paper(ops):
    """Tsuzuku et al. 2018, appendix B; 0.04 is too small beside the largest."""
    x = tf.constant([0.31, -6.25, 22.25, 0.04, -35.75])
    words, exponents, r, v, nonfinite = ops.pack_unambiguous(
        x, tf.fill([5], 1e-4), tf.zeros(5), tf.zeros(5), 1.0, 0.5, [0, 5]
    )
    words = words.numpy().view(np.uint32)
    assert (words >> 31).tolist() == [0, 1, 0, 1]
    assert (words >> 28 & 7).tolist() == [7, 2, 1, 0]
    assert (words & 2**28 - 1).tolist() == [0, 1, 2, 4]
    assert exponents.numpy().tolist() == [5] and nonfinite == 0
    same(r, np.float32([0, 0, 0, 0.04, 0]))
    same(v, np.float32([0, 0, 0, np.float32(1e-4) / 2, 0]))
    mean = ops.mean_of_sparse(words.view(np.int32)[np.newaxis], [[32.0]], [0, 5])
    same(mean, np.float32([0.25, -8, 16, 0, -32]))


def test_what_is_no_normal_number_is_not_sent(ops):
    x = np.float32([np.inf, -np.inf, np.nan, 1e-40, -1e-45, 0.0, -0.0, 3.0])
    # Where v is negative, as no sum of squares is, even a zero outweighs it.
    words, exponents, r, v, nonfinite = ops.pack_unambiguous(
        x,
        np.full(8, -1, np.float32),
        np.zeros(8, np.float32),
        np.zeros(8, np.float32),
        1,
        1,
        [0, 7, 8],
    )
    assert words.numpy().tolist() == [7] and exponents.numpy().tolist() == [-128, 1]
    assert nonfinite == 3


@pytest.mark.sample(9)
@pytest.mark.parametrize("workers", [1, 3, 4, 9])
@pytest.mark.parametrize(("size", "layout"), SHAPES)
def test_the_mean_of_sparse_words(ops, workers, size, layout):
    splits = cases.row_splits(size, layout)
    scale = cases.positive([workers, len(splits) - 1])
    # A sum that shows the order in which workers are added.
    scale[::2] *= np.float32(1e6)
    for share in (0, 0.05, 0.7, 1):
        words = cases.sparse_words(workers, size, share)
        expected = oracle.mean_of_sparse(words, scale, splits)
        same(ops.mean_of_sparse(words, scale, splits), expected)
        parts = ops.mean_of_sparse(words, scale, splits, cases.cuts(size))
        assert isinstance(parts, SplitVector)
        same(parts.numpy(), expected)


def test_a_vector_has_at_most_as_many_elements_as_there_are_indices(ops):
    huge = tf.TensorSpec([2**28])

    @tf.function(input_signature=[huge, huge])
    def pack(x, residual):
        return ops.pack_over_threshold(
            x, None, residual, None, [1.0], 1.0, 1.0, [0, 2**28]
        )

    with pytest.raises(ValueError, match="less than 2.* elements; .*Received"):
        pack.get_concrete_function()


def test_both_vectors_may_be_cut_each_with_a_gain(ops):
    x, m, e, v = (tf.constant(cases.floats(1000, seed=i)) for i in range(4))
    x, m, v, splits = 10 * x, abs(m), abs(v), cases.row_splits(1000, "ragged")
    limits = cases.thresholds(splits, 0.8)
    cut = SplitVector(tf.split(x, cases.cuts(1000)), 0.3)
    moments = SplitVector(tf.split(m, cases.cuts(1000, 1)), 0.3**2)
    whole = np.float32(0.3) * x.numpy(), np.float32(0.3**2) * m.numpy()
    for pack, arguments in (
        (oracle.pack_unambiguous, (1.5, 0.999, splits)),
        (oracle.pack_over_threshold, (limits, 1.5, 0.999, splits)),
    ):
        result = getattr(ops, pack.__name__)(cut, moments, e, v, *arguments)
        expected = pack(*whole, e.numpy(), v.numpy(), *arguments)
        cases.same_results(result[:-1], expected[:-1])
        assert 100 < len(expected[0]) < 900
