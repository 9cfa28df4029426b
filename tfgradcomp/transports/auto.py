"""Which transport carries a bucket: by name, or the one that should be quickest."""

from __future__ import annotations

import functools
import sys
import time
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp import compressors, servers
from tfgradcomp.compressors.base import Compressor, Context, Layout
from tfgradcomp.servers.base import Server
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce
from tfgradcomp.transports.base import Call, Transport
from tfgradcomp.collectives.base import Collectives
from tfgradcomp.transports.sharded import Sharded
from tfgradcomp.transports import messages

_BY_NAME = {"all_gather": AllGather, "all_reduce": AllReduce, "sharded": Sharded}
NAMES = ("auto", *_BY_NAME)
PLAIN = "float32"

# Uncompressed training is another method: it must be this much quicker to be chosen.
_PLAIN_MARGIN = 1.1
_PROBE_WORDS = 64, 1 << 15, 1 << 17, 1 << 19
_PROBE_SECONDS = 0.01
_PROBE_ELEMENTS = 1 << 17, 1 << 20
_ROUNDS = 5


def candidates(
    compressor: Compressor, server: Server, layout: Layout, collectives: Collectives
) -> list[str]:
    """Returns the names of the transports that can carry what a method sends."""
    method = compressor, servers.fused(server), layout
    return [
        name for name, kind in _BY_NAME.items() if kind(collectives).can_carry(*method)
    ]


def carriers(
    transport: str | Transport | Costs,
    compressor: Compressor,
    server: Server,
    layouts: list[Layout],
    collectives: Collectives,
    hosts: Collectives | None = None,
) -> list[tuple[Compressor, Server, Transport]]:
    """Returns what carries each bucket.

    Args:
        transport: A transport, the name of one, `"auto"`, or what the collectives cost.
        compressor: The worker's half of the method.
        server: The server's half.
        layouts: The blocks of each bucket.
        collectives: What the transports are made of.
        hosts: The collectives of the processes, where there are several: what `"auto"`
            measures. Without, and without costs, it takes what never is a bad choice.

    Raises:
        ValueError: If the transport cannot carry what the method sends.
    """
    method = compressor, server
    workers = collectives.num_workers
    if any(messages.varies(compressor.fields(layout)) for layout in layouts):
        # One transport carries them, and no size says what it takes.
        transport = "auto" if isinstance(transport, Costs) else transport
        hosts = None
    names = [transport] * len(layouts)
    if isinstance(transport, Costs) or (transport == "auto" and hosts is not None):
        costs = transport if isinstance(transport, Costs) else measure(hosts)
        choices = [quickest(*method, layout, workers, costs) for layout in layouts]
        names = [choice.name for choice in choices]
        if hosts is not None:
            names = agree(choices, hosts)
    plain = compressor.uncompressed(), server.uncompressed()
    chosen = []
    for name, layout in zip(names, layouts, strict=True):
        pair = plain if name == PLAIN else method
        possible = candidates(*pair, layout, collectives)
        if name in (PLAIN, "auto"):
            is_codes = any(f.base for f in pair[0].fields(layout).values())
            can_sum = "all_reduce" in possible and not is_codes
            name = "all_reduce" if can_sum else "all_gather"
        carrier = _BY_NAME[name](collectives) if isinstance(name, str) else name
        if not carrier.can_carry(pair[0], servers.fused(pair[1]), layout):
            raise ValueError(
                f"transport={name!r} cannot carry what this method sends: it carries "
                f"{carrier.carries}. Use 'auto' or one of {possible}. "
                f"Received: compressor={compressor}, server={server}"
            )
        chosen.append((*pair, carrier))
    return chosen


class Line(NamedTuple):
    """Seconds of a collective: `latency + words * per_word`.

    Attributes:
        latency: Seconds, whatever is sent.
        per_word: Seconds for each 32-bit word of a worker's message.
    """

    latency: float
    per_word: float


class Costs(NamedTuple):
    """What the collectives of a cluster cost, each for its number of workers.

    Attributes:
        gather: Of a vector from each worker.
        all_to_all: Of a row from each worker to each.
        sum: Of a vector of each worker.
    """

    gather: Line
    all_to_all: Line
    sum: Line

    def seconds(self, calls: list[Call]) -> float:
        """Returns how long some collectives take, one after the other."""
        lines = [getattr(self, call.kind) for call in calls]
        return sum(
            line.latency + line.per_word * call.words
            for line, call in zip(lines, calls, strict=True)
        )


@functools.cache
def measure(collectives: Collectives) -> Costs:
    """Measures the collectives on the cluster, once; all workers must call it.

    Vectors grow until one takes a hundredth of a second: what buffers on the way
    swallow costs nothing yet. At 100 Mbit/s all of it takes half a second.
    """
    num_workers = collectives.num_workers

    def seconds(kind, words):
        words = -(-words // num_workers) * num_workers
        shape = [num_workers, words // num_workers] if kind == "all_to_all" else [words]
        vector = tf.zeros(shape, tf.int32)
        collective, site = getattr(collectives, kind), f"measure/{words}"
        own = _least_seconds(lambda: collective(vector, site))
        # The slowest worker's, so that all stop at the same size.
        return float(collectives.max(tf.constant([own]), "measure/seconds")[0])

    def line(kind):
        few, *more = _PROBE_WORDS
        latency = high = seconds(kind, few)
        for many in more:
            low, high = high, seconds(kind, many)
            per_word = max(high - low, 0.0) / (many - few)
            few = many
            if high > _PROBE_SECONDS:
                break
        return Line(latency, per_word)

    return Costs(*(line(kind) for kind in Costs._fields))


class Choice(NamedTuple):
    """What carries a bucket.

    Attributes:
        name: Name of a transport, or `PLAIN`.
        milliseconds: What each candidate was estimated to take.
    """

    name: str
    milliseconds: dict[str, float]


def quickest(
    compressor: Compressor,
    server: Server,
    layout: Layout,
    num_workers: int,
    costs: Costs,
) -> Choice:
    """Returns the transport that should be quickest, or `PLAIN` where none pays."""
    compressor, server = compressors.fused(compressor), servers.fused(server)
    agreed = sum(field.count for field in compressor.agreed(layout).values())
    rounds = [Call("sum", agreed)] if agreed else []
    seconds = {}
    echo = _Echo(num_workers)
    for name in candidates(compressor, server, layout, echo):
        transport = _BY_NAME[name](echo)
        calls = rounds + transport.calls(compressor, server, layout)
        per_element = _seconds_per_element(
            name, compressor, server, num_workers, _block_size(layout)
        )
        seconds[name] = costs.seconds(calls) + per_element * layout.size
    best = min(seconds, key=seconds.get)
    seconds[PLAIN] = costs.seconds([Call("sum", layout.size)])
    if _PLAIN_MARGIN * seconds[PLAIN] < seconds[best]:
        best = PLAIN
    return Choice(best, {name: 1e3 * value for name, value in seconds.items()})


def agree(choices: list[Choice], collectives: Collectives) -> list[str]:
    """Returns worker 0's choices, on all workers; worker 0 says in a line what and why.

    Measured times differ a little between workers, and all must do the same.
    """
    names = [*_BY_NAME, PLAIN]
    mine = tf.constant([names.index(choice.name) for choice in choices])
    chosen = collectives.gather(mine, f"agree/{len(choices)}").numpy()[0]
    if collectives.rank == 0:
        reasons = "; ".join(
            f"{choice.name} ("
            + ", ".join(f"{name} {ms:.3g}" for name, ms in choice.milliseconds.items())
            + ")"
            for choice in choices
        )
        print(
            f"tfgradcomp: transport='auto' on {collectives.num_workers} workers, by "
            f"estimated ms a bucket: {reasons}",
            file=sys.stderr,
            flush=True,
        )
    return [names[index] for index in chosen]


class _Echo(Collectives):
    """N workers that all send the same: what is left to measure is the arithmetic."""

    rank = 0

    def __init__(self, num_workers):
        self.num_workers = num_workers

    def gather(self, vector, site):
        return tf.stack([vector] * self.num_workers)

    def all_to_all(self, rows, site):
        return rows

    def sum(self, vector, site):
        return vector


def _block_size(layout):
    """The size of the block that the middle element is in, as a probe can have it."""
    middle = layout.blocks_in(layout.size // 2, layout.size // 2 + 1).start
    width = layout.row_splits[middle + 1] - layout.row_splits[middle]
    return min(width, _PROBE_ELEMENTS[0])


@functools.lru_cache(maxsize=64)
def _seconds_per_element(name, compressor, server, num_workers, block_size):
    """What encoding, the server's rule and decoding take for each element."""
    context = Context(
        step=tf.constant(0, tf.int64),
        seed=tf.constant(0, tf.int64),
        rank=0,
        num_workers=num_workers,
        learning_rate=tf.constant(1.0),
        previous_learning_rate=tf.constant(1.0),
        max=tf.identity,
    )
    transport = _BY_NAME[name](_Echo(num_workers))

    def seconds(size):
        layout = Layout.from_sizes([size], block_size)
        x = tf.constant(np.random.default_rng(0).normal(size=size), tf.float32)
        state = compressor.init(layout)
        server_state = transport.init_server(compressor, server, layout)

        def step():
            payload, _ = compressor.compress(x, state, layout, context)
            return transport.exchange(
                *(payload, compressor, server, server_state, layout, context),
                tf.constant(0),
                "probe",
            )

        return _least_seconds(step)

    few, many = _PROBE_ELEMENTS
    low, high = seconds(few), seconds(many)
    # A neighbour's noise must not make it free.
    return max(high - low, high / 8) / (many - few)


def _least_seconds(function):
    function()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        tf.nest.flatten(function())[0].numpy()
        times.append(time.perf_counter() - began)
    # What else the machine does makes them longer, never shorter.
    return min(times)
