"""Forecasts of a step of N workers, for every method and transport.

    step = compute + (arithmetic + software + waiting + link) / local steps

Arithmetic is measured on this machine; the other parts of an exchange are computed from
the collectives that the routes declare (`Route.calls`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import tensorflow as tf

from tfgradcomp import optimizers
from tfgradcomp.assignment.layer_method import MethodSettings
from tfgradcomp.collectives import CollectiveCall
from tfgradcomp.core import Layout
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.engine.plan import Settings, make_plan
from tfgradcomp.methods import Method
from tfgradcomp.planning.arithmetic import measured_arithmetic
from tfgradcomp.planning.candidates import FLOAT32, Candidate
from tfgradcomp.planning.network import GRPC, Handling, Link, Software, rounds
from tfgradcomp.planning.shapes import Shapes, sizes
from tfgradcomp.transports import Costs, Transport
from tfgradcomp.transports.auto import BY_NAME
from tfgradcomp.transports.costs import SimulatedCollectives
from tfgradcomp.transports.messages import has_variable_length

# Seconds of a method, given the class of its transport, its layout and N.
Arithmetic = Callable[[type[Transport], Method, Layout, int], float]


def no_arithmetic(
    kind: type[Transport], method: Method, layout: Layout, num_workers: int
) -> float:
    """Returns 0, for forecasts that leave the methods' arithmetic out."""
    return 0.0


def software_of(costs: Costs, num_workers: int) -> Software:
    """Returns the cost of the software, from collectives measured over loopback.

    Args:
        costs: Measured durations of the collectives, where the link takes no time.
        num_workers: Number of workers in the measurement, 2 or more.
    """
    return Software(
        *(
            Handling(
                cost.latency / rounds(kind, num_workers),
                cost.per_word / CollectiveCall(kind, 1).words_sent(num_workers),
            )
            for kind, cost in zip(Costs._fields, costs, strict=True)
        )
    )


class Profile(NamedTuple):
    """Durations of the work on each machine.

    Attributes:
        software: Cost of the software around the collectives.
        arithmetic: Seconds of a method's arithmetic: a function of the class of the
            transport, the method, the layout and the number of workers.
        costs: Durations of the collectives on the cluster itself, which take the place
            of the software and the link; None: not measured.
    """

    software: Software = GRPC
    arithmetic: Arithmetic = measured_arithmetic
    costs: Costs | None = None


@dataclass(frozen=True)
class Forecast:
    """Forecast of a step with one method and transport, on N workers.

    Attributes:
        method: Name of the candidate; `"float32"` for the stock optimizer.
        transport: Name of the transport; empty for one worker.
        workers: N.
        compute_seconds: Seconds of one worker's step without an exchange.
        arithmetic_seconds: Flattening, encoding, the server's rule, decoding, state.
        software_seconds: Software around the collectives.
        waiting_seconds: Latency of the link.
        link_seconds: Transfer over the link of a node.
        bytes_sent: Bytes that a worker sends, and receives.
        link_words: 32-bit words that leave a node.
        local_steps: Steps from one exchange to the next; the attributes from
            `arithmetic_seconds` on are per exchange.
        examples: Examples per worker and step.
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
        """Seconds of a step, with its share of the exchange."""
        return self.compute_seconds + self.exchange_seconds / self.local_steps

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a worker sends per step, on average."""
        return self.bytes_sent / self.local_steps

    @property
    def throughput(self) -> float:
        """Examples per second of all workers."""
        return self.workers * self.examples / self.step_seconds

    @property
    def speedup(self) -> float:
        """Throughput over that of one worker."""
        return self.workers * self.compute_seconds / self.step_seconds

    @property
    def efficiency(self) -> float:
        """Speed-up over the number of workers."""
        return self.speedup / self.workers


class TrainingPlan(NamedTuple):
    """Forecasts of all methods, and the conclusions from them.

    Attributes:
        forecasts: The forecasts: for each number of workers float32, then the methods.
        link: The link of each node.
        ratio: All elements over those that sparse methods send; None: these methods
            are left out.
    """

    forecasts: tuple[Forecast, ...]
    link: Link
    ratio: float | None = None

    @property
    def workers(self) -> list[int]:
        """The numbers of workers, in ascending order."""
        return sorted({forecast.workers for forecast in self.forecasts})

    def float32(self, workers: int) -> Forecast:
        """Returns the forecast of the stock optimizer."""
        key = FLOAT32, workers
        return next(f for f in self.forecasts if (f.method, f.workers) == key)

    def quickest(self, workers: int) -> list[Forecast]:
        """Returns float32, then each method by its quickest transport, in order."""
        best: dict[str, Forecast] = {}
        for forecast in sorted(self.forecasts, key=lambda f: f.step_seconds):
            if forecast.workers == workers and forecast.method != FLOAT32:
                best.setdefault(forecast.method, forecast)
        return [self.float32(workers), *best.values()]

    def best(self, workers: int) -> Forecast:
        """Returns the forecast of the shortest step."""
        return min(self.quickest(workers), key=lambda f: f.step_seconds)

    def over_float32(self, forecast: Forecast) -> float:
        """Returns the speed of a forecast's step over that of float32."""
        return self.float32(forecast.workers).step_seconds / forecast.step_seconds

    def break_even(self, forecast: Forecast) -> float | None:
        """Returns the link's bits per second at which float32 takes as long.

        Float32 is quicker on a faster link. None if there is no such rate, because the
        method is quicker on every link, or slower on every link.
        """
        plain = self.float32(forecast.workers)
        words = plain.link_words - forecast.link_words
        seconds = forecast.fixed_seconds - plain.fixed_seconds
        if words <= 0 or seconds <= 0:
            return None
        return 32 * words / (seconds * self.link.efficiency)

    def warning(self) -> str | None:
        """Returns a sentence if sparse messages cost more than they save, else None.

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


Plan = TrainingPlan


def plan(
    shapes: Shapes,
    compute_seconds: float,
    link: Link,
    workers: Iterable[int] = (1, 2, 4, 8, 16, 32),
    *,
    methods: Sequence[str | Candidate] | None = None,
    examples: int = 1,
    local_steps: int = 1,
    ratio: float | None = None,
    profile: Profile | None = None,
) -> TrainingPlan:
    """Forecasts a step for every method and transport.

    Args:
        shapes: Shapes of the trainable variables, such as `MODELS["resnet50"]()`.
        compute_seconds: Seconds of one worker's step without an exchange: forward pass,
            backward pass, update. The exchange does not overlap with it.
        link: The link of each node.
        workers: Numbers of workers, in any order.
        methods: Candidates, or names of wrappers with their default arguments; None:
            all wrappers that need no arguments.
        examples: Examples per worker and step.
        local_steps: Steps from one exchange to the next.
        ratio: All elements over those that a sparse method sends, as
            `optimizer.traffic.ratio` reports it; None leaves these methods out.
        profile: Durations of the work on each machine; None: the arithmetic is
            measured, and the software is TensorFlow's gRPC.

    Raises:
        ValueError: If an argument is out of range; the message names the choices.
    """
    if not 0 < compute_seconds < math.inf:
        raise ValueError(
            "compute_seconds must be positive: the duration of a step without an "
            f"exchange. Received: compute_seconds={compute_seconds!r}"
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
    candidates = []
    for method in known_methods() if methods is None else methods:
        if isinstance(method, str):
            if method not in known_methods():
                raise ValueError(
                    f"methods must be some of {known_methods()}. "
                    f"Received: {method=}"
                )
            method = Candidate(method)
        candidates.append(method)
    planner = Planner(
        stand_ins(shapes),
        ratio,
        link,
        profile or Profile(),
        compute_seconds=compute_seconds,
        local_steps=local_steps,
        examples=examples,
    )
    forecasts = []
    for count in counts:
        forecasts.append(planner.float32(count))
        if count > 1:
            for candidate in candidates:
                forecasts += planner.forecasts(candidate, count)
    return TrainingPlan(tuple(forecasts), link, ratio)


@functools.cache
def known_methods() -> list[str]:
    """Returns the names of the wrappers that need no argument but the optimizer."""
    named = sorted({*optimizers.__all__} - {"CompressedOptimizer"})
    return [name for name in named if not required_arguments(name)]


def required_arguments(name: str) -> list[str]:
    """Returns a wrapper's arguments without default, except the inner optimizer."""
    _, *parameters = inspect.signature(getattr(optimizers, name)).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
    ]


def stand_ins(shapes: Shapes) -> list:
    """Returns what stands for trainable variables of some shapes.

    Tables of embeddings count as dense: the rows that travel depend on the data.
    """
    return [
        SimpleNamespace(
            shape=tf.TensorShape(shape), name="variable", path=f"variable_{index}"
        )
        for index, shape in enumerate(shapes)
    ]


class Planner:
    """Makes forecasts of a model's steps.

    Args:
        variables: The trainable variables, or `stand_ins` of their shapes.
        ratio: As `plan` takes it.
        link: As `plan` takes it; None if the profile has costs.
        profile: Durations of the work on each machine.
        exclude: Variables that are not compressed, as the wrappers take them.
        **common: Fields of all forecasts.
    """

    def __init__(
        self,
        variables: Sequence,
        ratio: float | None,
        link: Link | None,
        profile: Profile,
        exclude: object = None,
        **common: Any,
    ):
        self.variables = variables
        self._elements = sum(sizes(variable.shape for variable in variables))
        self._ratio, self._link, self._exclude = ratio, link, exclude
        self._profile, self._common = profile, common

    def without_arithmetic(self) -> Planner:
        """Returns a planner whose forecasts leave the methods' arithmetic out."""
        planner = copy.copy(self)
        planner._profile = self._profile._replace(arithmetic=no_arithmetic)
        return planner

    def float32(self, count: int) -> Forecast:
        """Returns the forecast of the stock optimizer's all-reduce."""
        if count == 1:
            return self._forecast(FLOAT32, "", count, [])
        calls = [CollectiveCall("sum", self._elements)]
        return self._forecast(FLOAT32, "all_reduce", count, calls)

    def forecasts(
        self, candidate: Candidate, count: int, names: Iterable[str] = tuple(BY_NAME)
    ) -> Iterator[Forecast]:
        """Yields the forecasts of a method, for each transport that can carry it."""
        method = candidate.method
        for transport in names:
            kind = BY_NAME[transport]
            try:
                buckets = self._buckets(method, kind(SimulatedCollectives(count)))
            except ValueError:  # The transport cannot carry the method's payload.
                continue
            calls: list[CollectiveCall] = []
            arithmetic = 0.0
            for bucket in buckets:
                layout = bucket.route.layout
                calls += bucket.route.calls
                if has_variable_length(method.compressor.fields(layout)):
                    if self._ratio is None:
                        return
                    calls.append(
                        CollectiveCall("gather", math.ceil(layout.size / self._ratio))
                    )
                elif bucket.is_compressed:
                    arithmetic += self._profile.arithmetic(kind, method, layout, count)
            yield self._forecast(candidate.name, transport, count, calls, arithmetic)

    def _buckets(self, method, transport):
        settings = Settings(
            MethodSettings(method, method.min_size),
            policy=None,
            transport=transport,
            fallback=None,
            exclude=self._exclude,
            bucket_bytes=None,
        )
        trained = [True] * len(self.variables)
        strategy = tf.distribute.get_strategy()
        return make_plan(self.variables, trained, settings, strategy).buckets

    def _forecast(self, method, transport, count, calls, arithmetic=0.0):
        link, software = self._link, self._profile.software
        if self._profile.costs is not None:
            seconds = self._profile.costs.seconds(calls)
            return Forecast(
                method,
                transport,
                count,
                arithmetic_seconds=arithmetic,
                software_seconds=seconds,
                bytes_sent=4 * sum(call.words_sent(count) for call in calls),
                **self._common,
            )
        words = sum(link.words(call, count) for call in calls)
        return Forecast(
            method,
            transport,
            count,
            arithmetic_seconds=arithmetic,
            software_seconds=sum(software.seconds(call, count) for call in calls),
            waiting_seconds=sum(link.waiting(call, count) for call in calls),
            link_seconds=link.seconds(words),
            bytes_sent=4 * sum(call.words_sent(count) for call in calls),
            link_words=words,
            **self._common,
        )
