"""One worker of a benchmark: times optimizer steps on constant gradients.

    TF_CONFIG=... python benchmarks/worker.py FOLDER

Reads FOLDER/task.json (see `measuring.py`) and writes FOLDER/answer-RANK.json. Nothing
is trained: each worker applies its own constant gradients of the workload's shapes.
All steps under the strategy share one set of variables, those that exchange nothing
another.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from cluster import interface_bytes
from floor import LOOP_SIZE, TRIAD, TRIAD_SIZE
from op_rows import make_rows
from tensorflow.python.eager import context
from workloads import WORKLOADS

import tfgradcomp
from tfgradcomp import ops
from tfgradcomp.collectives import Collectives

RATE = 1e-3
WARM_UP = 6
# Steps before Adam's variance is frozen and momenta travel as signs.
ADAM_WARM_UP = 2
# Elements of vectors that an operation is timed with.
CACHED = 2**18, 2**10
SGD = keras.optimizers.SGD


def half(dtype):
    """Returns SGD whose gradients are added up as half floats."""
    return tfgradcomp.HalfPrecision(SGD(RATE), dtype=dtype, transport="all_reduce")


# What nothing is exchanged with: the update of the method that is compared.
PLAIN = {
    "SGD": lambda: SGD(RATE),
    "SGD, momentum": lambda: SGD(RATE, momentum=0.9),
    "SGD, Nesterov": lambda: SGD(RATE, momentum=0.9, nesterov=True),
}
OF_TENSORFLOW = {
    "float32": lambda: SGD(RATE),
    "float16": lambda: half("float16"),
    "bfloat16": lambda: half("bfloat16"),
}


def make_optimizer(
    name: str, transport: str | None, carrier: str
) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a variant."""
    if name in OF_TENSORFLOW:
        return OF_TENSORFLOW[name]()
    if name not in tfgradcomp.__all__:
        raise ValueError(
            "methods are classes of tfgradcomp, such as TernGrad. Received: "
            f"method={name!r}"
        )
    given = {"transport": transport, "carrier": carrier}
    if name == "OneBitAdam":
        adam = keras.optimizers.Adam(RATE)
        return tfgradcomp.OneBitAdam(adam, ADAM_WARM_UP, **given)
    return getattr(tfgradcomp, name)(SGD(RATE), **given)


def make_strategy() -> tf.distribute.MultiWorkerMirroredStrategy:
    """Returns the strategy, patient with links that one gradient fills for long.

    TensorFlow ends a run whose signs of life are stuck behind a gradient for seconds.
    """
    process = context.context()
    process.configure_coordination_service = functools.partial(
        process.configure_coordination_service, heartbeat_timeout_in_ms=600_000
    )
    return tf.distribute.MultiWorkerMirroredStrategy()


class Bench:
    """The variables, the gradients and the steps of this worker.

    Args:
        strategy: Of all workers.
        workload: Name of the list of shapes.
    """

    def __init__(self, strategy: tf.distribute.Strategy, workload: str):
        shapes = WORKLOADS[workload]()
        rng = np.random.default_rng(strategy.cluster_resolver.task_id)
        self.strategy = strategy
        self.gradients = [
            tf.constant(rng.standard_normal(shape, np.float32)) for shape in shapes
        ]
        self.plain = [keras.Variable(tf.zeros(shape)) for shape in shapes]
        with strategy.scope():
            self.shared = [keras.Variable(tf.zeros(shape)) for shape in shapes]
        one = tf.ones([1])

        @tf.function(autograph=False)
        def barrier():
            return strategy.run(
                lambda: tf.distribute.get_replica_context().all_reduce("SUM", one)
            )

        self.barrier = barrier

    def plain_step(self, optimizer):
        """Returns the step in which nothing leaves the worker."""
        optimizer.build(self.plain)
        return tf.function(
            lambda: optimizer.apply(self.gradients, self.plain), autograph=False
        )

    def shared_step(self, optimizer):
        """Returns the step of all workers."""
        with self.strategy.scope():
            optimizer.build(self.shared)
        return tf.function(
            lambda: self.strategy.run(
                lambda: optimizer.apply(self.gradients, self.shared)
            ),
            autograph=False,
        )

    def first_update(self, step, variables) -> list[float]:
        """Runs a first step from zero; returns weights of the largest variable."""
        with self.strategy.scope():
            for variable in variables:
                variable.assign(tf.zeros(variable.shape))
        self.barrier()
        step()
        largest = max(variables, key=lambda variable: math.prod(variable.shape))
        return largest.numpy().reshape(-1)[:8].tolist()


def in_turn(
    hosts: Collectives,
    steps: dict[str, Callable],
    rounds: int,
    patience: float = math.inf,
    at_once: int | None = None,
) -> dict[str, list[float]]:
    """Times steps round by round; all workers get the seconds of the slowest one.

    The first rounds do not count: on links of 1 Gbit/s and less, a step takes up to
    three times as long in the first rounds as in later ones.

    Args:
        hosts: The collectives between the workers.
        steps: Functions, already traced.
        rounds: How often each is timed.
        patience: Seconds; longer steps are taken twice and timed once. They vary
            least, relative to their duration.
        at_once: So many workers take a step at once, then the next ones; None: all.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    at_once = at_once or hosts.num_workers
    own = hosts.rank // at_once
    gc.collect()
    gc.disable()
    for _ in range(WARM_UP + rounds):
        for name, step in steps.items():
            if len(times[name]) > 1 and times[name][-1] > patience:
                continue
            seconds = 0.0
            for group in range(-(-hosts.num_workers // at_once)):
                hosts.max(tf.zeros([1]), "barrier").numpy()
                if group == own:
                    began = time.perf_counter()
                    step()
                    seconds = time.perf_counter() - began
            slowest = hosts.max(tf.constant([seconds]), "seconds")
            times[name].append(float(slowest[0]))
    gc.enable()
    return {
        name: taken[min(WARM_UP, len(taken) - 1) :] for name, taken in times.items()
    }


def prepare(bench: Bench, variant: dict) -> tuple[dict, object]:
    """Returns the answer of a variant, without times, and its step.

    A method that is unknown, or cannot go by the transport, is the answer's error;
    there is no step.
    """
    answer = {"seconds": [], "processor": [], "sent": [], "received": []}
    name = variant["name"]
    if name in PLAIN:
        variables, declared = bench.plain, 0.0
        step = bench.plain_step(PLAIN[name]())
    else:
        variables = bench.shared
        try:
            with bench.strategy.scope():
                carrier = variant.get("carrier", "auto")
                optimizer = make_optimizer(name, variant["transport"], carrier)
            step = bench.shared_step(optimizer)
        except ValueError as error:
            return {**answer, "error": str(error)}, None
        declared = None
        if hasattr(optimizer, "traffic"):
            declared = optimizer.traffic.bytes_received
    update = bench.first_update(step, variables)
    return {**answer, "update": update, "declared": declared}, step


def make_loops(names: list[str], elements: int) -> dict[str, Callable]:
    """Returns functions that give the seconds of an element, by what they measure.

    Args:
        names: `floor.TRIAD`, and rows of `op_rows.py`.
        elements: Of the gradient.
    """
    if not names:
        return {}
    count = min(elements, TRIAD_SIZE)
    threads = int(os.environ["TF_NUM_INTRAOP_THREADS"])
    x, y = (np.array_split(np.ones(count, np.float32), threads) for _ in range(2))
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    turns = math.ceil(LOOP_SIZE / count)

    def add(x, y):
        for _ in range(turns):
            np.add(x, y, y)

    def triad():
        begin = time.perf_counter()
        list(pool.map(add, x, y))
        return (time.perf_counter() - begin) / (turns * count)

    # Vectors that stay in the cache, and short ones, for what a call takes in any case.
    long, short = (
        {row.name: row.make(ops) for row in make_rows(size)} for size in CACHED
    )
    times = LOOP_SIZE // CACHED[0]

    def seconds_of(function, arguments):
        begin = time.perf_counter()
        for _ in range(times):
            function(*arguments)
        return time.perf_counter() - begin

    def operation(name):
        difference = seconds_of(*long[name]) - seconds_of(*short[name])
        return max(difference, 0.0) / times / (CACHED[0] - CACHED[1])

    loops = {name: functools.partial(operation, name) for name in names}
    return {name: triad if name == TRIAD else loop for name, loop in loops.items()}


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    strategy = make_strategy()
    bench = Bench(strategy, task["workload"])
    prepared = [prepare(bench, variant) for variant in task["variants"]]
    elements = sum(math.prod(variable.shape) for variable in bench.plain)
    loops = make_loops(task.get("loops", []), elements)
    taken = {name: [] for name in loops}
    interface = task["interface"]
    gc.collect()
    gc.disable()
    for round_ in range(-min(WARM_UP, task["rounds"]), task["rounds"]):
        for answer, step in prepared:
            if step is None:
                continue
            bench.barrier()
            if interface:
                before = interface_bytes(interface)
                # Nobody sends before all have read.
                bench.barrier()
            begin, processor = time.perf_counter(), time.process_time()
            step()
            seconds = time.perf_counter() - begin
            # When all have gone through, all bytes of the step have arrived.
            bench.barrier()
            # That of the barrier included.
            processor = time.process_time() - processor
            after = interface_bytes(interface) if interface else None
            if round_ < 0:
                continue
            answer["seconds"].append(seconds)
            answer["processor"].append(processor)
            if interface:
                answer["sent"].append(after.sent - before.sent)
                answer["received"].append(after.received - before.received)
        for name, loop in loops.items():
            bench.barrier()
            seconds = loop()
            if round_ >= 0:
                taken[name].append(seconds)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    variants = [answer for answer, _ in prepared]
    answers = {"peak": peak, "variants": variants, "loops": taken}
    rank = strategy.cluster_resolver.task_id
    (folder / f"answer-{rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
