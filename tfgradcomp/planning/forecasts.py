"""Forecasts of a step of N workers, for every method and transport.

    step = compute + (arithmetic + software + waiting + link - hidden) / local steps

A part is hidden where a bucket travels while the next one is encoded.
Arithmetic is measured on this machine; the other parts of an exchange are computed from
the collectives that the routes declare (`Route.calls`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
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
from tfgradcomp.optimizers.delayed_exchange import check_delay
from tfgradcomp.planning.arithmetic import measured_arithmetic
from tfgradcomp.planning.candidates import FLOAT32, Candidate
from tfgradcomp.planning.network import (
    GRPC,
    TCP,
    Handling,
    Link,
    Software,
    rounds,
)
from tfgradcomp.planning.shapes import Shapes, sizes
from tfgradcomp.planning.training_plan import Forecast, TrainingPlan
from tfgradcomp.transports import Costs, Transport
from tfgradcomp.transports.auto import BY_NAME
from tfgradcomp.transports.costs import SimulatedCollectives
from tfgradcomp.transports.messages import has_variable_length

# Arguments of the wrappers that need some, which do not change a step's duration.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"warmup_steps": 1},
    "OneBitLAMB": {"warmup_steps": 1},
    "ZeroOneAdam": {"warmup_steps": 1},
    "Strom": {"threshold": "auto"},
    "Hybrid": {"threshold": "auto"},
}
# Reasons to leave a method out.
_NO_RATIO = "the number of elements that they send is not known: give a ratio"
_TAKING_METHODS = {"CompressedOptimizer", "LocalSteps"}
_NO_METHOD = "they take other methods: plan those"

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
        software: Cost of the software around the methods' collectives.
        arithmetic: Seconds of a method's arithmetic: a function of the class of the
            transport, the method, the layout and the number of workers.
        costs: Durations of the collectives on the cluster itself, which take the place
            of the software; the link is `NO_LINK` then. None: not measured.
        stock: Cost of the software around float32's all-reduce; None: the same.
    """

    software: Software = TCP
    arithmetic: Arithmetic = measured_arithmetic
    costs: Costs | None = None
    stock: Software | None = None


def plan(
    shapes: Shapes,
    compute_seconds: float,
    link: Link,
    workers: Iterable[int] = (1, 2, 4, 8, 16, 32),
    *,
    methods: Sequence[str | Candidate] | None = None,
    examples: int = 1,
    local_steps: int = 1,
    delay: int = 0,
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
            all wrappers but those that take another method.
        examples: Examples per worker and step.
        local_steps: Steps from one exchange to the next.
        delay: Steps from local steps to their exchange, less than `local_steps`; with
            1 or more, the exchange travels beside the computing of a step.
        ratio: All elements over those that a sparse method sends, as
            `optimizer.traffic.ratio` reports it; None leaves these methods out.
        profile: Durations of the work on each machine; None: the arithmetic is
            measured, methods' messages travel by TCP, and the stock optimizer's by
            TensorFlow's gRPC.

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
    check_delay(local_steps, delay, None)
    check_integer("examples", examples, 1)
    counts = sorted(set(workers))
    for count in counts:
        check_integer("workers", count, 1)
    candidates = {}
    for method in planned_methods() if methods is None else methods:
        if isinstance(method, str):
            if method not in planned_methods():
                raise ValueError(
                    f"methods must be some of {planned_methods()}. Received: {method=}"
                )
            candidates[method] = Candidate(method, _ARGUMENTS.get(method, {}))
        else:
            candidates[method.name] = method
    profile = profile or Profile(stock=GRPC)
    planner = Planner(
        stand_ins(shapes),
        ratio,
        link,
        profile,
        compute_seconds=compute_seconds,
        local_steps=local_steps,
        delay=delay,
        examples=examples,
    )
    forecasts = []
    for count in counts:
        forecasts.append(planner.float32(count))
        if count > 1:
            for name, candidate in candidates.items():
                for forecast in planner.forecasts(candidate, count):
                    forecasts.append(replace(forecast, method=name))
    found = {forecast.method for forecast in forecasts}
    left_out = {}
    if max(counts) > 1:
        left_out = {name: _NO_RATIO for name in candidates if name not in found}
    if methods is None:
        left_out |= dict.fromkeys(sorted(_TAKING_METHODS), _NO_METHOD)
    return TrainingPlan(tuple(forecasts), link, ratio, profile.software, left_out)


def planned_methods() -> list[str]:
    """Returns the names of the wrappers that are methods by themselves."""
    return sorted({*optimizers.__all__} - _TAKING_METHODS)


@functools.cache
def known_methods() -> list[str]:
    """Returns the names of the wrappers that need no argument but the optimizer."""
    return [name for name in planned_methods() if not required_arguments(name)]


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
        link: As `plan` takes it.
        profile: Durations of the work on each machine.
        exclude: Variables that are not compressed, as the wrappers take them.
        **common: Fields of all forecasts.
    """

    def __init__(
        self,
        variables: Sequence,
        ratio: float | None,
        link: Link,
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
        return self._with(arithmetic=no_arithmetic)

    def _with(self, **durations):
        """Returns a planner that takes other durations."""
        planner = copy.copy(self)
        planner._profile = self._profile._replace(**durations)
        return planner

    def float32(self, count: int) -> Forecast:
        """Returns the forecast of the stock optimizer's all-reduce."""
        if count == 1:
            return self._forecast(FLOAT32, "", count, [])
        stock = self._with(software=self._profile.stock or self._profile.software)
        calls = [CollectiveCall("sum", self._elements)]
        return stock._forecast(FLOAT32, "all_reduce", count, [calls])

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
            exchanges: list[list[CollectiveCall]] = []
            compressed = []
            for bucket in buckets:
                layout = bucket.route.layout
                calls = list(bucket.route.calls)
                exchanges.append(calls)
                if has_variable_length(method.compressor.fields(layout)):
                    if self._ratio is None:
                        return
                    calls.append(
                        CollectiveCall("gather", math.ceil(layout.size / self._ratio))
                    )
                elif bucket.is_compressed:
                    compressed.append(bucket)
            arithmetic = 0.0
            if compressed:
                positions = sorted({p for one in compressed for p in one.positions})
                shapes = [self.variables[position].shape for position in positions]
                whole = Layout.from_shapes(shapes, method.block_size)
                arithmetic = self._profile.arithmetic(kind, method, whole, count)
            yield self._forecast(
                candidate.name, transport, count, exchanges, arithmetic, len(compressed)
            )

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

    def _forecast(self, method, transport, count, exchanges, arithmetic=0.0, buckets=0):
        """Returns a forecast, from the collectives of each bucket."""
        link = self._link
        calls = [call for own in exchanges for call in own]
        # Buckets wait for messages at the same time, and share the link.
        waits = [
            (
                self._software([call._replace(words=0) for call in own], count),
                sum(link.waiting(call, count) for call in own),
            )
            for own in exchanges
        ]
        latency, waiting = max(waits, key=sum, default=(0.0, 0.0))
        words = sum(link.words(call, count) for call in calls)
        transfer = self._software(calls, count) - sum(own for own, _ in waits)
        return Forecast(
            method,
            transport,
            count,
            arithmetic_seconds=arithmetic,
            software_seconds=latency + transfer,
            waiting_seconds=waiting,
            link_seconds=link.seconds(words),
            bytes_sent=4 * sum(call.words_sent(count) for call in calls),
            link_words=words,
            buckets=max(buckets, 1),
            **self._common,
        )

    def _software(self, calls, count) -> float:
        profile = self._profile
        if profile.costs is not None:
            return profile.costs.seconds(calls)
        return sum(profile.software.seconds(call, count) for call in calls)
