"""One worker of `choices.py`: lets `Auto` choose, then times what it chose from.

    TF_CONFIG=... python benchmarks/choices_worker.py FOLDER

Reads FOLDER/task.json and writes FOLDER/answer-RANK.json. All workers measure at once.
For each rate, in turn, the worker

1. gives its host's link that rate;
2. measures the collectives, the stock optimizer's update and the exchanges that may be
   the quickest, and lets `planning.decision.decide` choose a method for each class of
   risk;
3. times the update with the stock optimizer's exchange and with each candidate.
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
import sys
from pathlib import Path

import cluster
import tensorflow as tf
from worker import RATE, SGD, Bench, in_turn, make_strategy
from workloads import WORKLOADS

from tfgradcomp.collectives import across_hosts
from tfgradcomp.engine.settings_check import gather_json
from tfgradcomp.planning.arithmetic import ExchangeTimer, typical_arithmetic
from tfgradcomp.planning.candidates import Candidate, Option, options
from tfgradcomp.planning.decision import decide
from tfgradcomp.planning.forecasts import Profile, stand_ins
from tfgradcomp.planning.risks import RISKS
from tfgradcomp.transports.costs import measure

MOMENTUM = 0.9
STOCK = "stock optimizer"


def inner() -> SGD:
    """Returns the optimizer that a method is chosen for."""
    return SGD(RATE, momentum=MOMENTUM)


def inner_of(candidate: Candidate) -> SGD:
    """Returns the optimizer that a candidate is wrapped around, as `Auto` does it."""
    return SGD(RATE) if candidate.keeps_momentum else inner()


class Contest:
    """The candidates on one cluster.

    Args:
        strategy: Of all workers.
        task: What `choices.py` asks for.
    """

    def __init__(self, strategy: tf.distribute.Strategy, task: dict):
        self._bench = Bench(strategy, task["workload"])
        self._variables = stand_ins(WORKLOADS[task["workload"]]())
        self._hosts, self._task = across_hosts(strategy), task
        self._options: list[Option] = [o for o in options(inner()) if not o.reason]
        self._plain = self._bench.plain_step(inner())
        # By name, and by the transports of the buckets.
        with strategy.scope():
            stock = inner()
        self._steps = {(STOCK, ()): self._bench.shared_step(stock)}
        for step in (self._plain, *self._steps.values()):
            step()

    def answer(self) -> dict:
        """Returns the choices and the times on links of the present rate."""
        measure.cache_clear()
        costs = measure(self._hosts)
        times = in_turn(self._hosts, {STOCK: self._plain}, self._task["rounds"])
        compute = self._task["compute_ms"] / 1e3 + statistics.median(times[STOCK])
        profile = Profile(arithmetic=typical_arithmetic, costs=costs)
        # The classes share candidates.
        timer = functools.cache(ExchangeTimer(self._hosts, self._variables).seconds)
        choices = {
            risk: decide(
                inner(),
                self._variables,
                self._hosts.num_workers,
                compute,
                risk=risk,
                profile=profile,
                timer=timer,
            )
            for risk in RISKS
        }
        # Worker 0 decides for all, as in `Auto`.
        rows = choices[RISKS[-1]].rows
        predicted = {row.name: row.seconds for row in rows}
        return {
            "compute": compute,
            "costs": costs,
            "choices": {risk: one.candidate.name for risk, one in choices.items()},
            "predicted": predicted,
            "methods": self._times(self._of_first({r.name: r.transport for r in rows})),
        }

    def _of_first(self, value):
        """Returns the value of worker 0, which decides."""
        first, *_ = gather_json(self._hosts, value, "transports")
        return first

    def _times(self, transports: dict[str, str]) -> dict[str, dict]:
        """Returns the risk, the transports and the seconds of each candidate."""
        found, steps = {}, {}
        for name, risk, key in self._prepared(transports):
            found[name] = {"risk": risk, "transports": key[1]}
            steps[name] = self._steps[key]
        rounds, patience = self._task["rounds"], self._task["patience"]
        for name, seconds in in_turn(self._hosts, steps, rounds, patience).items():
            found[name]["seconds"] = seconds
        return found

    def _prepared(self, transports):
        """Yields name, risk and key of each step; a new one is traced and taken."""
        yield STOCK, RISKS[0], (STOCK, ())
        for option in self._options:
            with self._bench.strategy.scope():
                # A rate may have transports of its own.
                transport = transports[option.name]
                optimizer = option.candidate.wrap(
                    inner_of(option.candidate), transport=transport
                )
            step = self._bench.shared_step(optimizer)
            routes = [type(bucket.route).__name__ for bucket in optimizer.plan.buckets]
            key = option.name, tuple(routes)
            if key not in self._steps:
                self._steps[key] = step
                step()
            # A step that is not taken leaves its state, as large as the model.
            del optimizer, step
            gc.collect()
            yield option.name, option.risk, key


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    strategy = make_strategy()
    rank = strategy.cluster_resolver.task_id
    host = cluster.Host(*task["hosts"][rank])
    contest, answers = Contest(strategy, task), {}
    for rate in task["rates"]:
        host.shape(rate)
        answers[rate] = contest.answer()
    (folder / f"answer-{rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
