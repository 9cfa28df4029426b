"""A client's connection to its hub: a gRPC stream of bytes."""

from __future__ import annotations

import queue
import threading

import grpc

from tfgradcomp.federated import wire

_LEAVE = 5.0
"""Seconds in which the last message reaches the hub."""


class Link:
    """A stream to a hub, read by a thread of its own.

    Args:
        address: The hub's address, `"host:port"`.
        credentials: Credentials of gRPC; None for a hub on this machine without TLS.
        most_bytes: Length of the longest message, as for `wire.options`.

    Attributes:
        inbox: The messages that have come, as bytes, and at the end of the stream the
            error that ended it, or None.
        sent: Bytes of all messages sent.
        received: Bytes of all messages received.
    """

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None,
        most_bytes: int,
    ):
        settings = wire.options(most_bytes)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, settings)
        else:
            self._channel = grpc.secure_channel(address, credentials, settings)
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.sent = self.received = 0
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        call = self._channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")
        self._stream = call(iter(self._outbox.get, None))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, data: bytes) -> None:
        """Sends a message, unless the stream has ended."""
        self.sent += len(data)
        self._outbox.put(data)

    def close(self) -> None:
        """Ends the stream when the messages sent so far have left."""
        self._outbox.put(None)
        self._reader.join(_LEAVE)
        self._channel.close()

    def _read(self):
        error = None
        try:
            for data in self._stream:
                self.received += len(data)
                self.inbox.put(data)
        except grpc.RpcError as raised:
            error = raised
        self.inbox.put(error)
