"""Gradients of embeddings, `IndexedSlices`, on real workers."""

import numpy as np
import pytest

from tests.engine import embedding_cases as cases
from tests.engine import row_cases


# What `fit` runs is a function, too.
@pytest.mark.parametrize(
    "how", ["fit", pytest.param("tf.function", marks=pytest.mark.slow)]
)
def test_gradients_of_unknown_length_train_as_stock_keras_does(pools, how):
    answers = pools(2).run(cases.case_unknown_length, how).answers
    expected = cases.stock_weights(2)
    for weights in answers:
        for got, stock in zip(weights, expected, strict=True):
            np.testing.assert_allclose(got, stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("TernGrad", 2),
        # `test_rows` has state, and the unions of three, exchanged between threads.
        pytest.param("DistEFBlockSGDM", 2, marks=pytest.mark.slow),
        pytest.param("DistEFBlockSGDM", 3, marks=pytest.mark.slow),
    ],
)
def test_only_rows_that_were_touched_travel_and_change(pools, name, workers):
    answers = pools(workers).run(cases.case_rows, name).answers
    tables, _ = row_cases.lazily(name, workers)
    for answer in answers:
        for got, first, expected in zip(
            answer["tables"], answers[0]["tables"], tables, strict=True
        ):
            assert got.tobytes() == first.tobytes()
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
        assert answer["traces"] == 1
        # Besides what varies: a size in each step, and TernGrad's scale.
        fixed = row_cases.STEPS * (2 if name == "TernGrad" else 1)
        assert answer["sent"] == (workers - 1) * (answer["given"] + fixed)
