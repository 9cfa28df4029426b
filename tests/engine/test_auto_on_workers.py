"""`transport="auto"` on real workers: whatever it chooses, the bits are the same."""

import pytest

from tests.engine import auto_cases
from tests.methods import ROWS

CHOSEN = {
    "all_gather": {"AllGatherRoute"},
    "all_reduce": {"AllReduceRoute"},
    "sharded": {"ShardedRoute"},
    "mixed": {"AllGatherRoute", "ShardedRoute"},
}


# One bit and a scale, with states and weight decay; codes that are added up, which the
# tests of `model.fit` have on every transport, too. On two workers those compare Signum
# under different costs.
@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("DistEFBlockSGDM", ("all_gather", "mixed")),
        pytest.param("DistEFBlockSGDM", (*CHOSEN, "measured"), marks=pytest.mark.slow),
        pytest.param("TernGrad", (*CHOSEN, "measured"), marks=pytest.mark.slow),
    ],
)
def test_every_choice_gives_the_same_weights(pools, name, choices):
    digests = set()
    for choice in choices:
        if choice not in (*ROWS[name].transports, "mixed", "measured"):
            continue
        answers = pools(3).run(auto_cases.train, name, choice).answers
        transports = {tuple(names) for names, _ in answers}
        assert len(transports) == 1
        if choice in CHOSEN:
            # Of small buckets a shard's padding may outweigh what is saved.
            assert CHOSEN[choice] <= set(transports.pop()), choice
        digests |= {digest for _, digest in answers}
    assert len(digests) == 1


def test_worker_0_says_what_was_chosen_and_why(pools):
    first, second = pools(2).run(auto_cases.said, "TernGrad").answers
    assert second == []
    assert first[0].startswith("transport='auto' on 2 workers, by estimated ms")
    assert all("float32" in line for line in first)
