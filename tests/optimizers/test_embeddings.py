"""Gradients of embeddings, `IndexedSlices`, on real workers."""

import numpy as np
import pytest

from tests.optimizers import embedding_cases as cases


@pytest.mark.parametrize("how", ["fit", "tf.function"])
def test_gradients_of_unknown_length_train_as_stock_keras_does(pools, how):
    answers = pools(2).run(cases.case_unknown_length, how).answers
    expected = cases.stock_weights(2)
    for weights in answers:
        for got, stock in zip(weights, expected, strict=True):
            np.testing.assert_allclose(got, stock, rtol=1e-5, atol=1e-6)
