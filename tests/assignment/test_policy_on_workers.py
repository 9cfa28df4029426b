"""Several methods in one optimizer on real workers, and on the devices of one."""

import pytest

from tests.assignment import policy_cases

# In one process `test_policy.py` follows each method step by step.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["multi_worker", "mirrored"])
def test_shared_messages_give_the_bits_of_others(pools, kind):
    # What is gathered shares a message, shards do not.
    answers = [
        answer
        for transport in ("all_gather", "sharded")
        for answer in pools(2, kind).run(policy_cases.train, transport).answers
    ]
    assert len({digest for digest, _ in answers}) == 1
    assert answers[0][1] == ["compressed", "plain", "policy_0", "policy_1"]
