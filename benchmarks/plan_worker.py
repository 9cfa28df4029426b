"""One worker of `plan_validation.py`: measures a plan's profile, or its steps.

    TF_CONFIG=... python benchmarks/plan_worker.py FOLDER

Reads FOLDER/task.json and writes FOLDER/answer-RANK.json. All workers measure at once,
so that they share this machine as they do in the steps that are predicted.

The profile is the seconds of the collectives and, with collectives that cost nothing,
of each case's step. Workers share the cores, but in a real step they also wait for
messages, and then leave the cores to others. So only as many workers as there are cores
take a step of the profile at once; the others wait.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras
import tensorflow as tf
from worker import RATE, Bench, in_turn, make_strategy

import tfgradcomp
from tfgradcomp.collectives import (
    Collectives,
    across_hosts,
    for_strategy,
    over_carrier,
)
from tfgradcomp.planning.candidates import Candidate
from tfgradcomp.transports.auto import BY_NAME
from tfgradcomp.transports.costs import SimulatedCollectives


class Case(NamedTuple):
    """A way to exchange gradients.

    Attributes:
        name: Its name in the table.
        wrapper: Name of the wrapper; None for the stock optimizer.
        transport: Name of the transport.
        arguments: Arguments of the wrapper.
        inner: Name of the inner optimizer.
        local_steps: Steps from one exchange to the next.
    """

    name: str
    wrapper: str | None
    transport: str
    arguments: dict = {}
    inner: str = "SGD"
    local_steps: int = 1

    @property
    def candidate(self) -> Candidate:
        """The candidate of `tfgradcomp.planning`."""
        return Candidate(self.wrapper, self.arguments)

    def optimizer(
        self, collectives: Collectives | None = None
    ) -> keras.optimizers.Optimizer:
        """Returns the optimizer; it exchanges by collectives, if they are given."""
        inner = keras.optimizers.get(self.inner)
        inner.learning_rate = RATE
        if self.wrapper is None:
            return inner
        transport = self.transport
        if collectives is not None:
            transport = BY_NAME[transport](collectives)
        wrapper = self.candidate.wrap(inner, transport=transport)
        if self.local_steps == 1:
            return wrapper
        own = keras.optimizers.SGD(RATE)
        return tfgradcomp.LocalSteps(own, wrapper, self.local_steps)

    def of_one(self, step: Callable) -> Callable:
        """Returns a function that takes a step, or all from one exchange to another."""

        def take():
            for _ in range(self.local_steps):
                step()

        return take


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
    step()
    times = []
    for _ in range(rounds):
        hosts.max(tf.zeros([1]), "barrier").numpy()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


def profile(bench: Bench, hosts: Collectives, cases: list[Case], rounds: int) -> dict:
    """Returns the seconds of each case's step whose collectives cost nothing."""
    steps = {}
    for case in cases:
        simulated = SimulatedCollectives(hosts.num_workers)
        step = bench.plain_step(case.optimizer(simulated))
        steps[case.name] = case.of_one(step)
        steps[case.name]()
    at_once = min(hosts.num_workers, len(os.sched_getaffinity(0)))
    times = in_turn(hosts, steps, rounds, at_once=at_once)
    # The processor's work is the same in every order.
    share = hosts.num_workers / at_once
    return {name: [share * t for t in taken] for name, taken in times.items()}


def measured(bench: Bench, hosts: Collectives, cases: list[Case], task: dict) -> dict:
    """Returns the seconds of each case's step."""
    steps = {}
    for case in cases:
        with bench.strategy.scope():
            optimizer = case.optimizer()
        steps[case.name] = case.of_one(bench.shared_step(optimizer))
        steps[case.name]()
    return in_turn(hosts, steps, task["rounds"], task["patience"])


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    strategy, rounds = make_strategy(), task["rounds"]
    hosts, answer = across_hosts(strategy), {}
    cases = [Case(*case) for case in task["cases"]]
    bench = Bench(strategy, task["workload"])
    if "probes" in task:
        for carrier in ("grpc", "tcp"):
            _, between = over_carrier(carrier, for_strategy(strategy), hosts)
            answer[carrier] = {
                kind: [[words, probe(between, kind, words, rounds)] for words in sizes]
                for kind, sizes in task["probes"].items()
            }
        answer["seconds"] = profile(bench, hosts, cases, rounds)
    else:
        answer["seconds"] = measured(bench, hosts, cases, task)
    rank = strategy.cluster_resolver.task_id
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
