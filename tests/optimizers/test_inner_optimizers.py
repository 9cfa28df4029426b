"""Every Keras optimizer around the identity moves as it does alone, on real workers."""

import numpy as np
import pytest

from tests.optimizers import inner_cases

# Those that do more in a step than Keras asks for, and one that does not.
UNUSUAL = ("Nadam", "Muon", "Lookahead", "SGD")
NAMES = (*inner_cases.OWN, *inner_cases.names())
CASES = {
    "multi_worker": [
        *[(name, "plain") for name in NAMES],
        *[(name, "all") for name in UNUSUAL if name in NAMES],
    ],
    # The replicas of one process take turns within a step.
    "mirrored": [
        (name, rule)
        for name, rule in (("Nadam", "all"), ("Muon", "plain"), ("Lookahead", "plain"))
        if name in NAMES
    ],
}


@pytest.mark.parametrize(
    "kind", ["multi_worker", pytest.param("mirrored", marks=pytest.mark.slow)]
)
def test_optimizers_move_as_alone_on_the_mean_gradient(pools, kind):
    cases = CASES[kind]
    workers = pools(2, kind).run(inner_cases.weights_of, cases).answers
    moved = set()
    for index, case in enumerate(cases):
        expected = inner_cases.alone(*case, num_workers=2)
        replicas = [
            [replica for worker in workers for replica in worker[index][position]]
            for position in range(len(expected))
        ]
        for weight, (first, second) in zip(expected, replicas, strict=True):
            np.testing.assert_array_equal(first, second, err_msg=str(case))
            np.testing.assert_allclose(first, weight, 1e-5, 1e-6, err_msg=str(case))
        moved.add(tuple(float(weight.sum()) for weight in expected))
    # A case that is another one in disguise would show nothing of its own.
    assert len(moved) == len(cases)
