"""`transport="auto"` on real workers: whatever it chooses, the bits are the same."""

import pytest

from tests.methods import ROWS
from tests.optimizers import auto_cases

CHOSEN = {
    "all_gather": {"AllGatherRoute"},
    "all_reduce": {"AllReduceRoute"},
    "sharded": {"ShardedRoute"},
    "mixed": {"AllGatherRoute", "ShardedRoute"},
}


# Codes that are added up; one bit and a scale, with states and weight decay. On two
# workers the tests of `model.fit` compare Signum under different costs.
@pytest.mark.parametrize("name", ["TernGrad", "DistEFBlockSGDM"])
def test_every_choice_gives_the_same_weights(pools, name):
    digests = set()
    # Twice by measurement: the same program run again.
    for choice in (*CHOSEN, "measured", "measured"):
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
