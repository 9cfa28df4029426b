"""Figures of rounds for a `CompressionMonitor`, on a client and on a hub."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np

from tfgradcomp.callbacks.monitor import CompressionMonitor
from tfgradcomp.core import State
from tfgradcomp.federated import codec
from tfgradcomp.federated.client_logic import ClientLogic
from tfgradcomp.federated.hub_logic import HubLogic
from tfgradcomp.federated.rounds import Round
from tfgradcomp.federated.service import Traffic


@contextlib.contextmanager
def opened(monitors: Sequence[CompressionMonitor], name: str) -> Iterator[None]:
    """Keeps the folders and ports of monitors open.

    Args:
        monitors: The monitors.
        name: Name of this program in Prometheus.

    Raises:
        ValueError: If a monitor has histograms.
        OSError: If a port is taken, or a folder cannot be written.
    """
    for monitor in monitors:
        if monitor.histograms is not None:
            raise ValueError(
                "CompressionMonitor has no histograms in federated training. Leave "
                f"them out. Received: histograms={monitor.histograms!r}"
            )
    try:
        for monitor in monitors:
            monitor.outputs.open(name)
        yield
    finally:
        for monitor in monitors:
            monitor.outputs.close()


def in_rounds(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Returns the callback that takes a callback's place in a client's `fit`.

    A `CompressionMonitor` observes an optimizer of this package; here it only adds to
    the logs what the client has given it.
    """
    if not isinstance(callback, CompressionMonitor):
        return callback
    outputs = callback.outputs
    return keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(outputs.end_epoch())
    )


class ClientWatch:
    """Computes the figures of a client's rounds.

    Args:
        monitors: The monitors that show them.
        every: Local steps of a round; bytes are the mean of a step.
    """

    def __init__(self, monitors: Sequence[CompressionMonitor] = (), every: int = 1):
        self._monitors, self._every = monitors, every
        self._due: list[CompressionMonitor] = []
        self._step = 0
        self._figures: dict[str, float] = {}
        self._milliseconds: dict[str, float] = {}
        self._bytes = 0, 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the milliseconds of a phase, without those of phases in it."""
        times = self._milliseconds
        before, begin = sum(times.values()), time.perf_counter()
        yield
        passed = 1000 * (time.perf_counter() - begin)
        inside = sum(times.values()) - before
        times[name] = times.get(name, 0.0) + passed - inside

    def begin(self, sent: int, received: int) -> None:
        """Begins a round.

        Args:
            sent: Bytes that the client has sent before.
            received: Bytes that it has received before.
        """
        self._bytes = sent, received
        self._milliseconds.clear()

    def pushed(
        self, logic: ClientLogic, push: codec.Push, delta: np.ndarray, before: State
    ) -> None:
        """Computes the figures of a payload, if a monitor samples it.

        Args:
            logic: The client's logic, which has made the payload.
            push: The payload.
            delta: The difference that was compressed.
            before: The compressor's state before.
        """
        self._due = [m for m in self._monitors if (push.sequence - 1) % m.every == 0]
        if self._due:
            self._step = logic.anchor.round
            self._figures = logic.bound.figures(
                delta,
                push.payload,
                before,
                logic.compressor_state,
                push.sequence,
                logic.joined.number,
            )

    def end(self, logic: ClientLogic, sent: int, received: int) -> None:
        """Shows the figures of the round, and begins the next one.

        Args:
            logic: The client's logic.
            sent: Bytes that the client has sent so far.
            received: Bytes that it has received so far.
        """
        figures = {
            **self._figures,
            **self._milliseconds,
            "bytes_sent": (sent - self._bytes[0]) / self._every,
            "bytes_received": (received - self._bytes[1]) / self._every,
            "float32_bytes": 4 * logic.bound.layout.size,
        }
        # A client that was sent the anchor may have had no reply yet.
        if logic.reply_bytes:
            bits = logic.bound.bits_per_element(logic.reply_bytes)
            figures["reply_bits_per_element"] = bits
        for monitor in self._due:
            monitor.outputs.show(self._step, figures)
        self.begin(sent, received)


class HubWatch:
    """Computes the figures of a hub's rounds.

    Args:
        monitors: The monitors that show them.
        logic: The hub's logic.
        traffic: The bytes of all clients, which grow.
    """

    def __init__(
        self,
        monitors: Sequence[CompressionMonitor],
        logic: HubLogic,
        traffic: Mapping[str, Traffic],
    ):
        self._monitors, self._logic, self._traffic = monitors, logic, traffic
        self._bytes = self._all_bytes()
        self._noted: collections.deque[tuple] = collections.deque()

    def closed(self, closed: Round) -> None:
        """Notes the figures of a round, in the thread that has closed it.

        Args:
            closed: The round.
        """
        (sent, received), before = self._all_bytes(), self._bytes
        self._bytes = sent, received
        step = closed.round - 1
        due = [m for m in self._monitors if step % m.every == 0]
        if not due:
            return
        bound = self._logic.bound
        figures = {
            **bound.server_figures(self._logic.kept.server_state),
            "bytes_sent": sent - before[0],
            "bytes_received": received - before[1],
            "bits_per_element": bound.bits_per_element(closed.payload_bytes),
            "reply_bits_per_element": bound.bits_per_element(closed.reply_bytes),
            "clients_counted": len(closed.counted),
            "clients_carried": len(closed.carried),
            "clients_left_out": len(closed.left_out),
            "round_seconds": closed.seconds,
            "payload_norm": closed.payload_norm,
        }
        self._noted += [(monitor.outputs, step, figures) for monitor in due]

    def show(self) -> None:
        """Shows what was noted, in the thread of the hub."""
        while self._noted:
            outputs, step, figures = self._noted.popleft()
            outputs.show(step, figures)
            outputs.end_epoch()

    def _all_bytes(self) -> tuple[int, int]:
        clients = self._traffic.values()
        return sum(c.sent for c in clients), sum(c.received for c in clients)
