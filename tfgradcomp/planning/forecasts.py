"""Forecasts of a step of N workers, for every method and transport.

    step = compute + (arithmetic + software + link) / local steps

Arithmetic is measured on this machine; software and link are computed from what the
routes declare (`Route.calls`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import keras
import tensorflow as tf

from tfgradcomp import optimizers
from tfgradcomp.collectives import Call
from tfgradcomp.core import Layout
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.engine.plan import make_plan
from tfgradcomp.methods import Method
from tfgradcomp.planning.arithmetic import measured_arithmetic
from tfgradcomp.planning.network import GRPC, Handling, Link, Software, rounds
from tfgradcomp.planning.shapes import Shapes
from tfgradcomp.transports import Costs, Transport
from tfgradcomp.transports.auto import BY_NAME
from tfgradcomp.transports.costs import Echo
from tfgradcomp.transports.messages import has_variable_length

FLOAT32 = "float32"
# Seconds of a method by a kind of transport, of a layout, on N workers.
Arithmetic = Callable[[type[Transport], Method, Layout, int], float]


def no_arithmetic(
    kind: type[Transport], method: Method, layout: Layout, num_workers: int
) -> float:
    """Returns 0: of workers whose arithmetic takes no time."""
    return 0.0


def software_of(costs: Costs, num_workers: int) -> Software:
    """Returns the software's part of collectives that were measured by loopback.

    Args:
        costs: Durations where the link is free.
        num_workers: The number of workers they were measured on, 2 or more.
    """
    return Software(
        *(
            Handling(
                line.latency / rounds(kind, num_workers),
                line.per_word / Call(kind, 1).words_sent(num_workers),
            )
            for kind, line in zip(Costs._fields, costs, strict=True)
        )
    )


class Profile(NamedTuple):
    """Durations of a machine's own work.

    Attributes:
        software: Of the collectives.
        arithmetic: Of the methods: a function of a class of transports, a method, a
            layout and the number of workers.
    """

    software: Software = GRPC
    arithmetic: Arithmetic = measured_arithmetic


@dataclass(frozen=True)
class Forecast:
    """A step of a method by a transport on N workers.

    Attributes:
        method: Name of the wrapper; `"float32"` for the stock optimizer.
        transport: Name of the transport; empty where nothing travels.
        workers: N.
        compute_seconds: The step of one worker without an exchange.
        arithmetic_seconds: What the method adds to a step here: flattening, encoding,
            the server's rule, decoding, its state.
        software_seconds: The software of the collectives.
        waiting_seconds: For the link's latency.
        link_seconds: For the words that cross the link of a node.
        bytes_sent: What a worker sends, and receives, in an exchange.
        link_words: 32-bit words that leave a node in an exchange.
        local_steps: An exchange comes after so many steps; the attributes above are of
            an exchange, those below of a step.
        examples: Examples a worker takes in a step.
    """

    method: str
    transport: str
    workers: int
    compute_seconds: float
    arithmetic_seconds: float = 0.0
    software_seconds: float = 0.0
    waiting_seconds: float = 0.0
    link_seconds: float = 0.0
    bytes_sent: float = 0.0
    link_words: float = 0.0
    local_steps: int = 1
    examples: int = 1

    @property
    def fixed_seconds(self) -> float:
        """Seconds of an exchange that do not depend on the link's bandwidth."""
        return self.arithmetic_seconds + self.software_seconds + self.waiting_seconds

    @property
    def exchange_seconds(self) -> float:
        """Seconds of an exchange."""
        return self.fixed_seconds + self.link_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, the exchange shared by the local steps."""
        return self.compute_seconds + self.exchange_seconds / self.local_steps

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a worker sends in a step, on average."""
        return self.bytes_sent / self.local_steps

    @property
    def throughput(self) -> float:
        """Examples a second of all workers."""
        return self.workers * self.examples / self.step_seconds

    @property
    def speedup(self) -> float:
        """Throughput over that of one worker."""
        return self.workers * self.compute_seconds / self.step_seconds

    @property
    def efficiency(self) -> float:
        """Speed-up over the number of workers."""
        return self.speedup / self.workers


class Plan(NamedTuple):
    """Forecasts, and what follows from them.

    Attributes:
        forecasts: Of every number of workers: float32 first, then the methods.
        link: The link they are for.
        ratio: Elements over those that sparse methods send; None: left out.
    """

    forecasts: tuple[Forecast, ...]
    link: Link
    ratio: float | None = None

    @property
    def workers(self) -> list[int]:
        """The numbers of workers, in order."""
        return sorted({one.workers for one in self.forecasts})

    def float32(self, workers: int) -> Forecast:
        """Returns the forecast of the stock optimizer."""
        return next(
            one
            for one in self.forecasts
            if (one.method, one.workers) == (FLOAT32, workers)
        )

    def quickest(self, workers: int) -> list[Forecast]:
        """Returns float32, then each method by its quickest transport, in order."""
        best: dict[str, Forecast] = {}
        for one in self.forecasts:
            if one.workers == workers and one.method != FLOAT32:
                known = best.get(one.method, one)
                best[one.method] = min(known, one, key=lambda f: f.step_seconds)
        ordered = sorted(best.values(), key=lambda one: one.step_seconds)
        return [self.float32(workers), *ordered]

    def best(self, workers: int) -> Forecast:
        """Returns the forecast of the shortest step."""
        return min(self.quickest(workers), key=lambda one: one.step_seconds)

    def over_float32(self, forecast: Forecast) -> float:
        """Returns how many times as fast as float32 a forecast's step is."""
        return self.float32(forecast.workers).step_seconds / forecast.step_seconds

    def break_even(self, forecast: Forecast) -> float | None:
        """Returns the bits a second of a link on which float32 takes as long.

        On a faster link float32 is quicker. None: there is no such link, since the
        method is quicker on any, or slower on any.
        """
        plain = self.float32(forecast.workers)
        words = plain.link_words - forecast.link_words
        seconds = forecast.fixed_seconds - plain.fixed_seconds
        if words <= 0 or seconds <= 0:
            return None
        return 32 * words / (seconds * self.link.efficiency)

    def warning(self) -> str | None:
        """Returns a sentence where sparse messages cost more than they save, or None.

        By the cost model of Tsuzuku et al. (2018): with a ring all-gather, the speed-up
        is linear in the ratio c as long as c > p/2, on p workers.
        """
        most = max(self.workers)
        if self.ratio is None or self.ratio >= most / 2:
            return None
        return (
            f"Sparse methods send an element in {self.ratio:g} on each of {most} "
            "workers, and every worker receives the elements of all: with a ratio "
            f"below {most}/2 = {most / 2:g} that takes longer than float32 does."
        )


def plan(
    shapes: Shapes,
    compute_seconds: float,
    link: Link,
    workers: Iterable[int] = (1, 2, 4, 8, 16, 32),
    *,
    methods: Sequence[str] | None = None,
    examples: int = 1,
    local_steps: int = 1,
    ratio: float | None = None,
    profile: Profile | None = None,
) -> Plan:
    """Forecasts a step for every method and transport.

    Args:
        shapes: Of the model's trainable variables, such as `MODELS["resnet50"]()`.
        compute_seconds: Of one worker's step without an exchange: forward pass,
            backward pass, update. What is exchanged waits for all of it.
        link: The link of each node.
        workers: Numbers of workers, in any order.
        methods: Names of wrappers with their default arguments; None: all that need no
            arguments.
        examples: Examples that a worker takes in a step.
        local_steps: An exchange comes after so many steps.
        ratio: Elements over those that a sparse method sends, as
            `optimizer.traffic.ratio` has it; None leaves these methods out.
        profile: What this machine's own work takes; None: the arithmetic is measured,
            and the software is TensorFlow's.

    Raises:
        ValueError: If an argument is out of range; the message names the choices.
    """
    if not 0 < compute_seconds < math.inf:
        raise ValueError(
            "compute_seconds must be positive: what a step takes without an exchange. "
            f"Received: compute_seconds={compute_seconds!r}"
        )
    if ratio is not None and not ratio >= 1:
        raise ValueError(
            "ratio must be 1 or more: all elements over those that are sent. "
            f"Received: ratio={ratio!r}"
        )
    check_integer("local_steps", local_steps, 1)
    check_integer("examples", examples, 1)
    counts = sorted(set(workers))
    for count in counts:
        check_integer("workers", count, 1)
    names = known_methods() if methods is None else list(methods)
    for name in names:
        if name not in known_methods():
            raise ValueError(
                f"methods must be some of {known_methods()}. Received: method={name!r}"
            )
    planner = _Planner(
        [tf.TensorShape(shape) for shape in shapes], ratio, link, profile or Profile()
    )
    common = {
        "compute_seconds": compute_seconds,
        "local_steps": local_steps,
        "examples": examples,
    }
    found = []
    for count in counts:
        found.append(planner.float32(count, common))
        if count > 1:
            for name in names:
                found += planner.forecasts(name, count, common)
    return Plan(tuple(found), link, ratio)


@functools.cache
def known_methods() -> list[str]:
    """Returns the names of the wrappers that need nothing but an inner optimizer."""
    named = sorted({*optimizers.__all__} - {"CompressedOptimizer"})
    return [name for name in named if not required_arguments(name)]


def required_arguments(name: str) -> list[str]:
    """Returns a wrapper's arguments without default, besides the inner optimizer."""
    parameters = inspect.signature(getattr(optimizers, name)).parameters.values()
    return [
        parameter.name
        for parameter in [*parameters][1:]
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
    ]


class _Planner(NamedTuple):
    """The arguments that all forecasts share."""

    shapes: list[tf.TensorShape]
    ratio: float | None
    link: Link
    profile: Profile

    def float32(self, count, common):
        elements = sum(shape.num_elements() for shape in self.shapes)
        calls = [Call("sum", elements)] if count > 1 else []
        name = "all_reduce" if calls else ""
        return self._forecast(FLOAT32, name, count, calls, 0.0, common)

    def forecasts(self, name, count, common):
        for transport, kind in BY_NAME.items():
            collectives = Echo(count)
            optimizer = getattr(optimizers, name)(
                keras.optimizers.SGD(), transport=kind(collectives)
            )
            method = optimizer.method
            try:
                buckets = self._buckets(optimizer)
            except ValueError:  # What it sends cannot go this way.
                continue
            calls, arithmetic = [], 0.0
            for bucket in buckets:
                layout = bucket.route.layout
                calls += bucket.route.calls
                if has_variable_length(method.compressor.fields(layout)):
                    if self.ratio is None:
                        return
                    calls.append(Call("gather", math.ceil(layout.size / self.ratio)))
                elif bucket.is_compressed:
                    arithmetic += self.profile.arithmetic(kind, method, layout, count)
            yield self._forecast(name, transport, count, calls, arithmetic, common)

    def _buckets(self, optimizer):
        # Tables of embeddings are counted as dense: their rows are the data's affair.
        variables = [
            SimpleNamespace(shape=shape, name="variable", path=f"variable_{index}")
            for index, shape in enumerate(self.shapes)
        ]
        settings, strategy = optimizer._settings(), tf.distribute.get_strategy()
        trained = [True] * len(variables)
        return make_plan(variables, trained, settings, strategy).buckets

    def _forecast(self, method, transport, count, calls, arithmetic, common):
        words = sum(self.link.words(call, count) for call in calls)
        software = self.profile.software
        return Forecast(
            method,
            transport,
            count,
            arithmetic_seconds=arithmetic,
            software_seconds=sum(software.seconds(call, count) for call in calls),
            waiting_seconds=sum(self.link.waiting(call, count) for call in calls),
            link_seconds=self.link.seconds(words),
            bytes_sent=4 * sum(call.words_sent(count) for call in calls),
            link_words=words,
            **common,
        )
