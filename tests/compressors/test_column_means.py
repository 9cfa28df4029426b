"""1-bit SGD: two means a column, and three workers beside NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import flat, split
from tests.optimizers.trajectories import SEED, Run, sgd
from tfgradcomp import methods
from tfgradcomp.compressors import ColumnMeans
from tfgradcomp.core import Layout
from tfgradcomp.testing.exchanges import run
from tfgradcomp.testing.inputs import decoded_step, first_step, gradient_of
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.direct import DirectExchange

# A matrix, a vector, a convolution's kernel, a scalar, one row, one column.
SHAPES = [(20, 6), (9,), (3, 2, 4, 5), (), (1, 7), (8, 1)]
COLUMNS = 6 + 1 + 5 + 1 + 1 + 1
LAYOUT = Layout.from_shapes(SHAPES)


def one_bit(vector):
    """The paper's quantizer: each column's elements become the mean of their sign."""
    decoded = []
    for tensor in split(np.asarray(vector, np.float64), SHAPES):
        is_matrix = tensor.ndim > 1 and tensor.size > tensor.shape[-1]
        columns = tensor.reshape(-1, tensor.shape[-1] if is_matrix else 1)
        result = np.empty_like(columns)
        for column, own in zip(columns.T, result.T, strict=True):
            for side in (column >= 0, column < 0):
                own[side] = column[side].mean() if side.any() else 0
        decoded.append(result)
    return flat(decoded)


class OneBitSGD:
    """Seide et al.: quantization with error feedback, of each worker and of the sum."""

    def __init__(self, is_two_way):
        self.is_two_way = is_two_way
        self.errors, self.server_error, self.previous_rate = 0.0, 0.0, 0.0

    def update(self, step, gradients, weights, rate):
        ratio = self.previous_rate / rate if rate else 0.0
        given = gradients + ratio * self.errors
        sent = np.stack([one_bit(vector) for vector in given])
        total = update = sent.mean(0)
        if self.is_two_way:
            total = total + ratio * self.server_error
            update = one_bit(total)
        if rate:
            self.errors, self.server_error = given - sent, total - update
            self.previous_rate = rate
        return update


@pytest.mark.slow
@pytest.mark.parametrize("transport", [AllGather, DirectExchange])
@pytest.mark.parametrize("reply", ["float32", "requantize"])
def test_steps_of_three_workers_follow_numpy(reply, transport):
    def make(transport):
        return tfgradcomp.OneBitSGD(
            sgd(0.6),
            reply,
            transport=transport,
            seed=SEED,
            min_size=1,
            allow_inner_momentum=True,
        )

    trained = Run(make, 3, SHAPES, transport)
    rule = OneBitSGD(reply == "requantize")
    trained.follows(rule.update, momentum=0.6, atol=1e-5)


def test_two_means_of_each_column_are_decoded():
    for seed in range(3):
        x = gradient_of(LAYOUT, seed)
        x[5], x[6] = 0.0, -0.0
        found = decoded_step(ColumnMeans(), x, LAYOUT)
        np.testing.assert_allclose(found, one_bit(x), rtol=1e-6)


def test_columns_of_one_sign_and_of_zeros_have_one_mean():
    layout = Layout.from_shapes([(4, 3)])
    x = np.array([[1, -1, 0], [2, -2, -0.0], [3, -3, 0], [6, -6, 0]], np.float32)
    payload = first_step(ColumnMeans(), x.reshape(-1), layout).payload
    means = np.reshape(payload["means"], [3, 2])
    np.testing.assert_array_equal(means, [[0, 3], [-3, 0], [0, 0]])


def test_an_element_takes_a_bit_and_a_column_two_numbers():
    for workers in (2, 3):
        (worker, *_) = run(workers, AllGather, methods.one_bit_sgd(), LAYOUT, steps=1)
        (call,) = worker.route.calls
        assert call.words == 1 + -(-LAYOUT.size // 32) + 2 * COLUMNS


def test_a_vector_of_unknown_tensors_is_one_column():
    x = gradient_of(Layout((0, 50)))
    found = decoded_step(ColumnMeans(), tf.constant(x), Layout((0, 50))).numpy()
    assert len({*found}) == 2
