"""The durations of collectives on a network: arithmetic, and nothing measured.

A step of a ring, or an exchange of all with all, waits for the link's latency and for
the bytes that cross the link of a node; the software that hands the bytes over costs
its own time before and after. Both add up: seen on links of 100 Mbit/s to 1 Gbit/s,
where TensorFlow's collectives overlap little of the two.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tfgradcomp.collectives import Call

LATENCY = 1e-4
EFFICIENCY = 0.8

_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def bits_per_second(rate: str) -> float:
    """Returns what a rate such as `"1gbit"` or `"2.5mbit"` stands for.

    Raises:
        ValueError: If it is not written so.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if not found or float(found[1]) == 0:
        raise ValueError(f"write a rate as 1gbit or 100mbit. Received: rate={rate!r}")
    return float(found[1]) * _BITS[found[2]]


def seconds_of(duration: str) -> float:
    """Returns what a duration such as `"0.1ms"`, `"50us"` or `"1s"` stands for.

    Raises:
        ValueError: If it is not written so.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms|us)", duration)
    if not found:
        raise ValueError(
            f"write a duration as 0.1ms or 50us. Received: duration={duration!r}"
        )
    return float(found[1]) * _SECONDS[found[2]]


def rounds(kind: str, num_workers: int) -> int:
    """Returns how many messages a worker waits for, one after the other.

    A gather goes once round a ring, a sum or a maximum twice; in an exchange of all
    with all every message is on its way at once.
    """
    if num_workers == 1:
        return 0
    if kind == "all_to_all":
        return 1
    return (1 if kind == "gather" else 2) * (num_workers - 1)


class Link(NamedTuple):
    """The link of each node to a switch that is never the bottleneck.

    Attributes:
        bandwidth: Bits a second, in each direction.
        latency: Seconds that a message takes from one node to another.
        devices_per_node: Workers that share a node and its link. Ranks follow nodes, so
            a ring leaves each node once; all messages between two nodes of an
            exchange of all with all share the link. Inside a node bytes are free.
        efficiency: Part of the bandwidth that carries words: what is left besides
            the headers of packets and the pauses between messages.
    """

    bandwidth: float
    latency: float = LATENCY
    devices_per_node: int = 1
    efficiency: float = EFFICIENCY

    def words(self, call: Call, num_workers: int) -> float:
        """Returns the 32-bit words that leave a node in a collective."""
        devices = self.devices_per_node
        if num_workers <= devices:
            return 0.0
        if call.kind == "all_to_all":
            return devices * (num_workers - devices) / num_workers * call.words
        return call.words_sent(num_workers)

    def waiting(self, call: Call, num_workers: int) -> float:
        """Returns the seconds that a collective waits for the link's latency."""
        if num_workers <= self.devices_per_node:
            return 0.0
        return self.latency * rounds(call.kind, num_workers)

    def seconds(self, words: float) -> float:
        """Returns the seconds that words take to cross the link."""
        return 32 * words / (self.bandwidth * self.efficiency)


class Handling(NamedTuple):
    """Seconds of the software around a kind of collective.

    Attributes:
        per_round: For each message that is waited for (`rounds`).
        per_word: For each 32-bit word that a worker sends, and receives.
    """

    per_round: float
    per_word: float


class Software(NamedTuple):
    """Seconds that a worker's software adds to what the link takes.

    Attributes:
        gather: Of a gather.
        all_to_all: Of an exchange of all with all.
        sum: Of a sum, and of a maximum.
    """

    gather: Handling
    all_to_all: Handling
    sum: Handling

    def seconds(self, call: Call, num_workers: int) -> float:
        """Returns the seconds of the software of a collective."""
        own = self.sum if call.kind == "max" else getattr(self, call.kind)
        return own.per_round * rounds(
            call.kind, num_workers
        ) + own.per_word * call.words_sent(num_workers)


# TensorFlow's collectives over gRPC, which copy each word several times: fitted by
# loopback to two workers with a core each (docs/planning.md).
GRPC = Software(
    gather=Handling(per_round=1.3e-3, per_word=15e-9),
    all_to_all=Handling(per_round=1.4e-3, per_word=11e-9),
    sum=Handling(per_round=1.1e-3, per_word=18e-9),
)
# A library that costs nothing besides the link.
NO_SOFTWARE = Software(*[Handling(0.0, 0.0)] * 3)
SOFTWARE = {"grpc": GRPC, "none": NO_SOFTWARE}
