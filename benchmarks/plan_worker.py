"""One worker of `plan_validation.py`: measures what a plan is computed from.

    TF_CONFIG=... python benchmarks/plan_worker.py FOLDER

Reads FOLDER/task.json and writes FOLDER/answer-RANK.json. All workers measure at once,
so that they share this machine as they do in the steps that are predicted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import tensorflow as tf
from worker import PLAIN, Bench, make_strategy
from workloads import WORKLOADS

from tfgradcomp import planning
from tfgradcomp.collectives import across_hosts
from tfgradcomp.transports import Sharded
from tfgradcomp.transports.costs import arithmetic_seconds


def probe(hosts, kind: str, words: int, rounds: int) -> list[float]:
    """Returns the seconds of a collective of so many words, round by round."""
    count = hosts.num_workers
    words = -(-words // count) * count
    dtype = tf.float32 if kind == "sum" else tf.int32
    shape = [count, words // count] if kind == "all_to_all" else [words]
    vector = tf.zeros(shape, dtype)
    step = tf.function(
        lambda: getattr(hosts, kind)(vector, f"{kind} {words}"), autograph=False
    )
    return timed(hosts, step, rounds)


def timed(hosts, step, rounds: int) -> list[float]:
    """Returns the seconds of a step, each after a barrier; the first is not timed."""
    step()
    times = []
    for _ in range(rounds):
        hosts.max(tf.zeros([1]), "barrier").numpy()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


def arithmetic(task: dict, count: int) -> dict[str, float]:
    """Returns the seconds of each method's arithmetic on the processor."""
    made = planning.plan(
        WORKLOADS[task["workload"]](),
        1.0,
        planning.Link(1e9),
        [count],
        methods=task["methods"],
        profile=planning.Profile(
            # Only what is asked for: it takes seconds.
            arithmetic=lambda kind, *of: (
                arithmetic_seconds(kind, *of, clock=time.process_time)
                if kind is Sharded
                else 0.0
            )
        ),
    )
    return {
        one.method: one.arithmetic_seconds
        for one in made.forecasts
        if one.transport == "sharded"
    }


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    strategy, rounds = make_strategy(), task["rounds"]
    hosts = across_hosts(strategy)
    answer = {"collectives": {}, "arithmetic": {}}
    for kind, sizes in task["probes"].items():
        answer["collectives"][kind] = [
            [words, probe(hosts, kind, words, rounds)] for words in sizes
        ]
    if task["methods"]:
        bench = Bench(strategy, task["workload"])
        step = bench.plain_step(PLAIN["SGD"]())
        answer["compute"] = timed(hosts, step, rounds)
        answer["arithmetic"] = arithmetic(task, hosts.num_workers)
        hosts.max(tf.zeros([1]), "end").numpy()
    rank = strategy.cluster_resolver.task_id
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
