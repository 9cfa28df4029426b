"""Cost model of collectives on a network; nothing is measured here.

A collective takes the link's latency for each of its rounds, the transfer of its words
over the link of a node, and time of the software before and after. These parts add up:
on links of 100 Mbit/s to 1 Gbit/s, TensorFlow's collectives overlap them little.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tfgradcomp.collectives import CollectiveCall

LATENCY = 1e-4
EFFICIENCY = 0.9

_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def bits_per_second(rate: str) -> float:
    """Parses a rate such as `"1gbit"` or `"2.5mbit"`.

    Raises:
        ValueError: If the rate has another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if not found or float(found[1]) == 0:
        raise ValueError(f"write a rate as 1gbit or 100mbit. Received: {rate!r}")
    return float(found[1]) * _BITS[found[2]]


def seconds_of(duration: str) -> float:
    """Parses a duration such as `"0.1ms"`, `"50us"` or `"1s"`.

    Raises:
        ValueError: If the duration has another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms|us)", duration)
    if not found:
        raise ValueError(f"write a duration as 0.1ms or 50us. Received: {duration!r}")
    return float(found[1]) * _SECONDS[found[2]]


def rounds(kind: str, num_workers: int) -> int:
    """Returns the number of messages that a worker waits for, one after the other.

    A gather goes round a ring once, a sum or a maximum twice. An all-to-all sends all
    messages at once.
    """
    if num_workers == 1:
        return 0
    if kind == "all_to_all":
        return 1
    return (1 if kind == "gather" else 2) * (num_workers - 1)


class Link(NamedTuple):
    """The link of each node to a switch that is never the bottleneck.

    Attributes:
        bandwidth: Bits per second, in each direction.
        latency: Seconds of a message from one node to another.
        devices_per_node: Workers that share a node and its link. Ranks follow nodes, so
            a ring leaves each node once; an all-to-all sends all its messages between
            nodes over the link. Messages inside a node cost nothing.
        efficiency: Part of the bandwidth that carries words; the rest is lost to packet
            headers and pauses between messages.
    """

    bandwidth: float
    latency: float = LATENCY
    devices_per_node: int = 1
    efficiency: float = EFFICIENCY

    @classmethod
    def parse(cls, text: str) -> Link:
        """Returns the link that a rate describes, such as `"1gbit"`.

        A latency may follow: `"100mbit 20ms"`.

        Raises:
            ValueError: If the text has another form.
        """
        rate, _, latency = text.partition(" ")
        return cls(bits_per_second(rate), seconds_of(latency) if latency else LATENCY)

    def words(self, call: CollectiveCall, num_workers: int) -> float:
        """Returns the 32-bit words that leave a node in a collective."""
        devices = self.devices_per_node
        if num_workers <= devices:
            return 0.0
        if call.kind == "all_to_all":
            return devices * (num_workers - devices) / num_workers * call.words
        return call.words_sent(num_workers)

    def waiting(self, call: CollectiveCall, num_workers: int) -> float:
        """Returns the seconds that a collective waits for the link's latency."""
        if num_workers <= self.devices_per_node:
            return 0.0
        return self.latency * rounds(call.kind, num_workers)

    def seconds(self, words: float) -> float:
        """Returns the seconds of the transfer of words over the link."""
        return 32 * words / (self.bandwidth * self.efficiency)


# A link that takes no time, where measured collectives include it.
NO_LINK = Link(math.inf, latency=0.0)


class Handling(NamedTuple):
    """Cost of the software around one kind of collective.

    Attributes:
        per_round: Seconds for each message that a worker waits for (`rounds`).
        per_word: Seconds for each 32-bit word that a worker sends, and receives.
    """

    per_round: float
    per_word: float


class Software(NamedTuple):
    """Cost of the software around the collectives, in addition to the link's.

    Attributes:
        gather: Cost of a gather.
        all_to_all: Cost of an all-to-all.
        sum: Cost of a sum, and of a maximum.
    """

    gather: Handling
    all_to_all: Handling
    sum: Handling

    def seconds(self, call: CollectiveCall, num_workers: int) -> float:
        """Returns the seconds of the software in a collective."""
        per_round, per_word = getattr(self, "sum" if call.kind == "max" else call.kind)
        words = call.words_sent(num_workers)
        return per_round * rounds(call.kind, num_workers) + per_word * words


# Both are fitted over loopback to two workers with a core each (docs/planning.md).
# TensorFlow's collectives over gRPC, which copy each word several times:
GRPC = Software(
    gather=Handling(per_round=1.3e-3, per_word=15e-9),
    all_to_all=Handling(per_round=1.4e-3, per_word=11e-9),
    sum=Handling(per_round=1.1e-3, per_word=18e-9),
)
# Connections of our own between workers on CPUs (`carrier="tcp"`): gRPC's costs times
# the ratios of both in one run.
TCP = Software(
    gather=Handling(per_round=0.5e-3, per_word=4.4e-9),
    all_to_all=Handling(per_round=0.5e-3, per_word=2.2e-9),
    sum=Handling(per_round=0.26e-3, per_word=8.4e-9),
)
# A library of collectives that adds no cost to the link's.
NO_SOFTWARE = Software(*[Handling(0.0, 0.0)] * 3)
# What methods' messages travel by, and those of the stock optimizer.
SOFTWARE = {
    "tcp": (TCP, GRPC),
    "grpc": (GRPC, GRPC),
    "none": (NO_SOFTWARE, NO_SOFTWARE),
}
