"""Second moments in `fit` on two devices and on two processes."""

import numpy as np
import pytest

from tests.per_example import moments_cases
from tests.per_example.brute_force import Keep, brute_force

pytestmark = pytest.mark.timeout(600)


# On devices of one process the next test checks the moments.
@pytest.mark.parametrize(
    "kind", [pytest.param("mirrored", marks=pytest.mark.slow), "multi_worker"]
)
def test_moments_do_not_change_the_bits_of_training_on_workers(pools, kind):
    for answer in pools(2, kind).run(moments_cases.case_bits).answers:
        assert answer["plain"] == answer["with_moments"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "manner"), [("mirrored", "several_steps"), ("multi_worker", "mixed")]
)
def test_each_worker_has_the_moments_of_its_own_examples(pools, kind, manner):
    answers = pools(2, kind).run(moments_cases.case_moments, manner).answers
    got = [moments for answer in answers for moments in answer["moments"]]
    model = moments_cases.network(mixing=False, dtype="float64")
    model.compile(Keep(), "mse")
    model.set_weights([np.array(w) for w in answers[0]["weights"]])
    x, y = moments_cases.data()
    rtol = 0.05 if manner == "mixed" else 1e-4
    for rank, moments in enumerate(got):
        mine = slice(8 + 4 * rank, 12 + 4 * rank)
        # Keras divides by the number of replicas.
        expected = [e / 4 for e in brute_force(model, x[mine], y[mine])]
        for moment, want in zip(moments, expected, strict=True):
            np.testing.assert_allclose(moment, want, rtol, 1e-3 * np.max(want))
    assert len(got) == 2
