"""Steps that travel as float32 on real workers, and on the devices of one."""

import numpy as np
import pytest

from tests.engine import uncompressed_steps_cases


@pytest.mark.parametrize(
    ("workers", "kind", "transports"),
    [
        (2, "multi_worker", ["all_gather", "sharded"]),
        pytest.param(3, "multi_worker", ["sharded"], marks=pytest.mark.slow),
        # The same steps, and what is copied to devices is seen by other tests.
        pytest.param(2, "mirrored", ["sharded"], marks=pytest.mark.slow),
    ],
)
def test_what_workers_and_servers_owe_waits(pools, workers, kind, transports):
    digests = set()
    for transport in transports:
        pool = pools(workers, kind)
        for digest, owed in pool.run(uncompressed_steps_cases.train, transport).answers:
            digests.add(digest)
            # The 12th step travels as float32.
            before, after_float, after = owed
            assert np.any(before)
            np.testing.assert_array_equal(after_float, before)
            assert np.any(after != before)
    assert len(digests) == 1
