"""The traffic of a step, computed from the fields that methods declare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """The traffic of one worker in one step.

    If message sizes vary between steps, figures are means over the steps so far, and
    NaN before the first step.

    Attributes:
        num_workers: N.
        elements_compressed: Gradient elements that the method compresses.
        elements_plain: Gradient elements that are sent as float32.
        bits_per_element_up: Bits of a compressed element in a payload, scales and
            levels included, and numbers whose mean is taken in a first round.
        bits_per_element_reply: Bits of a compressed element in a reply, as the server
            declares them, and these means. Transports that run the server on every
            worker send no reply.
        words_sent: 32-bit words that a worker sends for any purpose.
        words_received: 32-bit words that a worker receives.
        elements_sent: Elements for which this worker has sent a value, compressed or
            not.
    """

    num_workers: int
    elements_compressed: int
    elements_plain: int
    bits_per_element_up: float
    bits_per_element_reply: float
    words_sent: float
    words_received: float
    elements_sent: float

    @property
    def bytes_sent(self) -> float:
        """Bytes that a worker sends."""
        return 4 * self.words_sent

    @property
    def bytes_received(self) -> float:
        """Bytes that a worker receives."""
        return 4 * self.words_received

    @property
    def ratio(self) -> float:
        """All elements over elements sent: the compression ratio of sparse methods."""
        elements = self.elements_compressed + self.elements_plain
        return elements / self.elements_sent if self.elements_sent else math.inf


def mean_traffic(parts: Sequence[Traffic], steps: int) -> Traffic:
    """Returns the mean traffic per step of parts that are each sent once in `steps`."""

    def total(name):
        return sum(getattr(part, name) for part in parts)

    def bits(name):
        elements = [part.elements_compressed for part in parts]
        pairs = zip(parts, elements, strict=True)
        return sum(getattr(p, name) * n for p, n in pairs) / max(sum(elements), 1)

    return Traffic(
        num_workers=parts[0].num_workers,
        elements_compressed=total("elements_compressed"),
        elements_plain=total("elements_plain"),
        bits_per_element_up=bits("bits_per_element_up"),
        bits_per_element_reply=bits("bits_per_element_reply"),
        words_sent=total("words_sent") / steps,
        words_received=total("words_received") / steps,
        elements_sent=total("elements_sent") / steps,
    )
