"""Residuals that are kept in bfloat16, rounded at random."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests import reference
from tests.helpers import bits, make_variables, split
from tests.reference import operations as oracle
from tfgradcomp import ops
from tfgradcomp.transports import AllGather, Loopback
from tfgradcomp.transports.sharded import Sharded

SEED = 77
SHAPES = [(40, 30), (33,), (8, 130)]
SIZE = 1200 + 33 + 1040
SPLITS = [0, 1200, 1233, SIZE]
STEPS = 4


def rounded(x, words):
    """x in bfloat16, as float32: up where its lower bits and the noise carry."""
    noise = words.astype(np.uint32) >> 16
    return ((x.view(np.uint32) + noise) >> 16 << 16).view(np.float32)


def test_rounding_is_unbiased_and_keeps_what_bfloat16_has():
    x = np.repeat(np.float32([1.001, -1.003, 3e-39, 1e30, -0.0, 1.5]), 40_000)
    words = reference.stream_bits(len(x), 7, 5)
    found = ops.round_to_bfloat16(tf.constant(x), tf.constant([7, 5, 0], tf.int64))
    assert found.dtype == tf.bfloat16
    # A cast of TensorFlow's flushes denormals.
    upper = tf.bitcast(found, tf.uint16).numpy().astype(np.uint32)
    found = (upper << 16).view(np.float32)
    assert bits(found) == bits(rounded(x, words))
    unit = np.ldexp(1.0, np.maximum(np.frexp(x)[1], -125) - 8)
    error = (found.astype(np.float64) - x) / unit
    assert np.abs(error).max() < 1
    for part in error.reshape(-1, 40_000):
        assert np.abs(part.mean()) < 4 * 0.5 / np.sqrt(40_000)
    assert bits(found[-80_000:]) == bits(x[-80_000:])


def gradients():
    return np.random.default_rng(4).normal(size=[STEPS, 2, SIZE]).astype(np.float32)


def make(transport, **kwargs):
    return tfgradcomp.DistEFBlockSGDM(
        keras.optimizers.SGD(0.05),
        min_size=1,
        seed=SEED,
        residual_dtype="bfloat16",
        transport=transport,
        **kwargs,
    )


def on_two_workers(transport, saved=None):
    """Weights of both after all steps; saved and read again after step `saved`."""

    def worker(rank, collectives):
        variables, optimizer = make_variables(SHAPES), make(transport(collectives))
        optimizer.build(variables)
        for index, step in enumerate(gradients()):
            if index == saved:
                store: dict = {}
                optimizer.save_own_variables(store)
                steps = optimizer.iterations
                optimizer = make(transport(collectives))
                optimizer.build(variables)
                optimizer.iterations.assign(steps)
                as_file = {name: np.array(value) for name, value in store.items()}
                optimizer.load_own_variables(as_file)
            share = [tf.constant(part) for part in split(step[rank] / 2, SHAPES)]
            optimizer.apply(share, variables)
        kept = {v.dtype for v in optimizer.variables if "residual" in v.path}
        assert kept == {"bfloat16"}
        return [bits(v.numpy()) for v in variables]

    return Loopback(2, timeout=60).run(worker)


def followed():
    """The weights, in NumPy."""
    weights = np.concatenate([v.numpy().ravel() for v in make_variables(SHAPES)])
    one, yes, rate = np.float32(1), np.array(True), np.float32(0.05)
    momenta, residuals = np.zeros([2, 2, SIZE], np.float32)
    left = np.zeros(SIZE, np.float32)
    for step, own in enumerate(gradients()):
        ratio = one * (step > 0)
        words, scales = [], []
        for rank, x in enumerate(own):
            sent = oracle.sign_error_feedback(
                x, momenta[rank], residuals[rank], np.float32(0.9), ratio, yes, SPLITS
            )
            words.append(sent[0])
            scales.append(sent[1])
            momenta[rank] = sent[2]
            drawn = reference.random_bits(SIZE, SEED, step, rank, 5)
            residuals[rank] = rounded(sent[3], drawn)
        word, scale, left = oracle.mean_sign_error_feedback(
            np.stack(words), np.stack(scales), left, ratio, yes, SPLITS
        )
        left = rounded(left, reference.random_bits(SIZE, SEED, step, None, 5))
        update = oracle.mean_of_signs(word[np.newaxis], scale[np.newaxis], SPLITS)
        weights = weights - update * rate
    return [bits(part) for part in split(weights, SHAPES)]


@pytest.mark.parametrize("transport", [AllGather, Sharded])
def test_dist_ef_in_bfloat16_is_that_of_numpy(transport):
    assert on_two_workers(transport) == [followed()] * 2


def test_dist_ef_in_bfloat16_goes_on_where_it_was_saved():
    assert on_two_workers(AllGather, saved=2) == [followed()] * 2


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="residual_dtype.*Received: .*float16"):
        tfgradcomp.DistEFSGD(keras.optimizers.SGD(), residual_dtype="float16")
