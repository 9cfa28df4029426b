"""Forecasts of a step, and what follows from those of all methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from tfgradcomp.planning.candidates import FLOAT32
from tfgradcomp.planning.network import TCP, Link, Software


@dataclass(frozen=True)
class Forecast:
    """Forecast of a step with one method and transport, on N workers.

    Attributes:
        method: Name of the candidate; `"float32"` for the stock optimizer.
        transport: Name of the transport; empty for one worker.
        workers: N.
        compute_seconds: Seconds of one worker's step without an exchange.
        arithmetic_seconds: Flattening, encoding, the server's rule, decoding, state;
            negative where that takes less time than the update that it replaces.
        software_seconds: Software around the collectives.
        waiting_seconds: Latency of the link.
        link_seconds: Transfer over the link of a node.
        bytes_sent: Bytes that a worker sends, and receives.
        link_words: 32-bit words that leave a node.
        buckets: Buckets that the compressed vector is cut into.
        local_steps: Steps from one exchange to the next; the attributes from
            `arithmetic_seconds` on are per exchange.
        delay: Steps from local steps to their exchange, which then travels beside the
            computing of a step; 0: it does not.
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
    buckets: int = 1
    local_steps: int = 1
    delay: int = 0
    examples: int = 1

    @property
    def fixed_seconds(self) -> float:
        """Seconds of an exchange that do not depend on the link's bandwidth."""
        return self.arithmetic_seconds + self.software_seconds + self.waiting_seconds

    @property
    def hidden_seconds(self) -> float:
        """Seconds in which a bucket travels while the next one is encoded.

        Encoding is about half of the arithmetic, and the last bucket hides nothing.
        With `delay` a step is computed meanwhile; about half is hidden, as measured.
        """
        on_the_way = self.waiting_seconds + self.link_seconds
        if self.delay:
            return 0.5 * min(self.compute_seconds, on_the_way)
        share = (self.buckets - 1) / self.buckets
        return 0.5 * min(max(self.arithmetic_seconds, 0.0), on_the_way) * share

    @property
    def exchange_seconds(self) -> float:
        """Seconds of an exchange."""
        return self.fixed_seconds + self.link_seconds - self.hidden_seconds

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
        software: Cost of the software around the methods' collectives.
        left_out: Reasons, by names of methods without a forecast.
    """

    forecasts: tuple[Forecast, ...]
    link: Link
    ratio: float | None = None
    software: Software = TCP
    left_out: Mapping[str, str] = MappingProxyType({})

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
        method is quicker on every link, or slower on every link; and with `delay`,
        where transfers are hidden.
        """
        if forecast.delay:
            return None
        plain = self.float32(forecast.workers)
        # Either the arithmetic is hidden, or what is on the way.
        hidden = 0.5 * (forecast.buckets - 1) / forecast.buckets
        for seconds_hidden, words_hidden in (
            (hidden * forecast.arithmetic_seconds, 0.0),
            (hidden * forecast.waiting_seconds, hidden * forecast.link_words),
        ):
            words = plain.link_words - (forecast.link_words - words_hidden)
            seconds = forecast.fixed_seconds - seconds_hidden - plain.fixed_seconds
            if words <= 0 or seconds <= 0:
                continue
            rate = 32 * words / (seconds * self.link.efficiency)
            link = self.link._replace(bandwidth=rate)
            there = replace(forecast, link_seconds=link.seconds(forecast.link_words))
            on_the_way = there.waiting_seconds + there.link_seconds
            if (words_hidden == 0) == (there.arithmetic_seconds <= on_the_way):
                return rate
        return None

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
