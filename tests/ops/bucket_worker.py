"""A worker of `test_workers.py`, on one core with one thread for operations."""

import os
import sys

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

# After the core is chosen: TensorFlow counts what there is.
from tests.cluster import report  # noqa: E402
from tests.ops.worker_cases import strategy_and_rank, train_buckets  # noqa: E402

if __name__ == "__main__":
    folder, count, *transports = sys.argv[1:]
    answers = [train_buckets(transport, int(count)) for transport in transports]
    report(folder, strategy_and_rank()[1], answers)
