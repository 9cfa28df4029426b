"""Steps that travel as float32 on real workers, and on the devices of one."""

import pytest

from tests.optimizers import float_steps_cases


@pytest.mark.parametrize(
    ("workers", "kind", "transports"),
    [
        (2, "multi_worker", ["all_gather", "sharded"]),
        pytest.param(3, "multi_worker", ["sharded"], marks=pytest.mark.slow),
        # The same steps, and what is copied to devices is seen by other tests.
        pytest.param(2, "mirrored", ["sharded"], marks=pytest.mark.slow),
    ],
)
def test_all_workers_pay_what_they_owe(pools, workers, kind, transports):
    digests = set()
    for transport in transports:
        pool = pools(workers, kind)
        for digest, owed in pool.run(float_steps_cases.train, transport).answers:
            digests.add(digest)
            # After the 12th step nothing is owed, after the 13th something is.
            assert owed == [False, True]
    assert len(digests) == 1
