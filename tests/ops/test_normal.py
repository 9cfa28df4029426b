"""Gaussian noise: its distribution, and the same bits wherever buckets are cut."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import bits, make_context, make_variables
from tfgradcomp.ops.normal import gaussian


def test_the_numbers_are_normal():
    count = 200_000
    stream = make_context(seed=5).random_stream(3, shared=True)
    values = np.sort(gaussian(stream, count).numpy().astype(np.float64))
    assert abs(values.mean()) < 5 / np.sqrt(count)
    assert abs(values.var() - 1) < 5 * np.sqrt(2 / count)
    assert abs(np.mean(values**4) - 3) < 5 * np.sqrt(96 / count)
    distribution = tf.math.erfc(-values / np.sqrt(2)).numpy() / 2
    # Kolmogorov and Smirnov: more in one of 5,000 runs; the seed is fixed besides.
    distance = np.abs(distribution - (np.arange(count) + 0.5) / count).max()
    assert distance < 2.2 / np.sqrt(count)


def test_buckets_get_the_noise_of_the_whole():
    weights = set()
    for bucket_bytes in (4_000, 2**26):
        optimizer = tfgradcomp.SignSGD(
            keras.optimizers.SGD(0.1),
            noise_std=1.0,
            bucket_bytes=bucket_bytes,
            transport="all_gather",
        )
        variables = make_variables([(50, 40), (7,), (3000,)])
        for _ in range(2):
            optimizer.apply([tf.ones(v.shape) for v in variables], variables)
        weights.add(b"".join(bits(v.numpy()) for v in variables))
    assert len(weights) == 1


@pytest.mark.parametrize("noise_std", [-0.1, float("inf"), float("nan")])
def test_no_deviation_is_refused(noise_std):
    with pytest.raises(ValueError, match="noise_std must be 0 or positive.*Received"):
        tfgradcomp.SignSGD("sgd", noise_std=noise_std)
