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
from worker import PLAIN, RATE, SGD, Bench, make_strategy

import tfgradcomp
from tfgradcomp.collectives import across_hosts
from tfgradcomp.transports import Sharded
from tfgradcomp.transports.costs import SimulatedCollectives


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


def methods(bench: Bench, hosts, task: dict) -> dict[str, list[float]]:
    """Returns the seconds of each method's step whose collectives cost nothing."""
    found = {}
    for name in task["methods"]:
        transport = Sharded(SimulatedCollectives(hosts.num_workers))
        optimizer = getattr(tfgradcomp, name)(SGD(RATE), transport=transport)
        step = bench.plain_step(optimizer)
        found[name] = timed(hosts, step, task["rounds"])
    return found


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    strategy, rounds = make_strategy(), task["rounds"]
    hosts = across_hosts(strategy)
    answer = {"collectives": {}, "methods": {}}
    for kind, sizes in task["probes"].items():
        answer["collectives"][kind] = [
            [words, probe(hosts, kind, words, rounds)] for words in sizes
        ]
    if task["methods"]:
        bench = Bench(strategy, task["workload"])
        step = bench.plain_step(PLAIN["SGD"]())
        answer["compute"] = timed(hosts, step, rounds)
        answer["methods"] = methods(bench, hosts, task)
    rank = strategy.cluster_resolver.task_id
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
