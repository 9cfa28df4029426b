"""One worker of `tls.py`: times steps, in turns with another training.

TF_CONFIG=... python benchmarks/tls_worker.py FOLDER plain|tls
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

from worker import WARM_UP, Bench, make_strategy, prepare

FIRST, SECOND = "plain", "tls"


def rounds_done(folder: Path, way: str, workers: int) -> int:
    """Returns the rounds that all workers of a training have done."""
    return min(
        len(list(folder.glob(f"done-{way}-{rank}-*"))) for rank in range(workers)
    )


def main(folder: Path, way: str) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    strategy = make_strategy()
    rank = strategy.cluster_resolver.task_id
    workers = len(strategy.cluster_resolver.cluster_spec().as_dict()["worker"])
    bench = Bench(strategy, task["workload"])
    steps = [prepare(bench, variant)[1] for variant in task["variants"]]
    seconds = [[] for _ in steps]
    gc.collect()
    gc.disable()
    warm_up = min(WARM_UP, task["rounds"])
    for number in range(warm_up + task["rounds"]):
        other, behind = (SECOND, 0) if way == FIRST else (FIRST, 1)
        while rounds_done(folder, other, workers) < number + behind:
            time.sleep(0.01)
        for step, taken in zip(steps, seconds, strict=True):
            bench.barrier()
            begin = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begin)
        bench.barrier()
        (folder / f"done-{way}-{rank}-{number}").touch()
    (folder / f"answer-{way}-{rank}.json").write_text(
        json.dumps([{"seconds": taken[warm_up:]} for taken in seconds])
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
