"""The hub's gRPC service: a stream of bytes for each client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator

import grpc

from tfgradcomp.core.logging import logger
from tfgradcomp.federated import codec, wire
from tfgradcomp.federated.certificates import peer_name
from tfgradcomp.federated.codec import MessageError
from tfgradcomp.federated.hub_logic import HubLogic, Outgoing
from tfgradcomp.federated.outbox import Outbox
from tfgradcomp.federated.rate_limit import RateLimit
from tfgradcomp.federated.rounds import Round

MESSAGES = 50.0, 200
"""Messages of a connection: a second in the long run, and at once."""

HELLOS = 0.2, 20
"""The same for the `Hello`s of a client, which the whole anchor may answer."""


class Traffic:
    """Bytes that have travelled between the hub and a client.

    Attributes:
        received: Bytes of the client's messages.
        sent: Bytes of the hub's messages.
    """

    def __init__(self):
        self.received = 0
        self.sent = 0


class _Connection:
    """A stream: what waits to be sent, and who is at the other end."""

    def __init__(self, name: str):
        self.name = name
        self.outbox = Outbox()
        self.limit = RateLimit(*MESSAGES)


class Service:
    """Passes messages between gRPC and the logic, one at a time.

    Args:
        logic: The hub's logic.
        save: Function that saves the logic's state.
        accepted: Function that returns the names of the clients that may join; None
            for all who can connect.

    Attributes:
        traffic: Bytes that have travelled, by the names of clients.
        changed: Lock of the logic; it notifies of each change.
        on_closed: Function that is called with each round that has been closed and
            saved, before its reply is sent. The caller holds `changed`.
    """

    def __init__(
        self,
        logic: HubLogic,
        save: Callable[[], None],
        accepted: Callable[[], Collection[str]] | None = None,
    ):
        self.logic = logic
        self.traffic: dict[str, Traffic] = {}
        self.changed = threading.Condition()
        self.on_closed: Callable[[Round], None] = lambda closed: None
        self._save, self._accepted = save, accepted
        self._hellos: dict[str, RateLimit] = {}
        self._error: BaseException | None = None
        self._reported = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns the handler for a gRPC server: bytes in, bytes out."""
        stream = grpc.stream_stream_rpc_method_handler(self._exchange)
        return grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: stream})

    def check(self) -> None:
        """Raises the error that has stopped the hub in another thread, if any."""
        if self._error is not None:
            raise self._error

    def tick(self) -> None:
        """Closes the open round if it is time. The caller holds `changed`."""
        self._do(self.logic.tick)

    def save(self) -> None:
        """Saves the logic's state if it has changed."""
        if self.logic.unsaved:
            self._save()
            self.logic.unsaved = False

    def _exchange(self, requests: Iterator[bytes], context) -> Iterator[bytes]:
        connection = _Connection(peer_name(context))
        reader = threading.Thread(
            target=self._read, args=(connection, requests), daemon=True
        )
        context.add_callback(connection.outbox.close)
        reader.start()
        while (message := connection.outbox.get()) is not None:
            data = codec.encode(message)
            self._count(connection, sent=len(data))
            yield data

    def _read(self, connection, requests):
        try:
            for data in requests:
                if not self._handle(connection, data):
                    break
        except Exception as error:
            # gRPC raises its errors, of several types, where a stream breaks.
            logger.debug("A stream of %s has ended: %r", connection.name, error)
        with self.changed:
            self._do(lambda now: self.logic.disconnected(connection, now))
        connection.outbox.close()

    def _handle(self, connection, data):
        """Handles a message and returns whether the stream goes on."""
        try:
            try:
                message = self._message(connection, data)
            finally:
                self._count(connection, received=len(data))
            with self.changed:
                self._do(lambda now: self.logic.receive(connection, message, now))
        except MessageError as error:
            logger.warning("%s is cut off: %s", connection.name or "A client", error)
            connection.outbox.put(codec.Refused(str(error), final=0))
            return False
        return self._error is None

    def _message(self, connection, data):
        """Returns the message that a client may send; a `Hello` has its true name."""
        message = codec.decode(data)
        if isinstance(message, codec.Hello):
            # A certificate's name is proven; a name in a message is not.
            message = message._replace(name=connection.name or message.name)
            self._check_hello(message)
            connection.name = message.name
        if not connection.limit.allows(time.monotonic()):
            raise MessageError("it sends too many messages a second")
        return message

    def _check_hello(self, hello):
        if self._accepted is not None and hello.name not in self._accepted():
            raise MessageError(f"the hub does not accept a client {hello.name!r}")
        if len(self._hellos) > self.logic.rules.most_clients:
            self._hellos.clear()
        limit = self._hellos.setdefault(hello.name, RateLimit(*HELLOS))
        if not limit.allows(time.monotonic()):
            raise MessageError("it connects too often")

    def _do(self, act: Callable[[float], Outgoing]) -> None:
        """Lets the logic act, saves, then sends. The caller holds `changed`."""
        if self._error is not None:
            return
        try:
            outgoing = act(time.monotonic())
            self.save()
            self._report_rounds()
        except MessageError:
            raise
        except Exception as error:
            # `serve` raises it. Nothing that is not saved is sent.
            self._error = error
            self.changed.notify_all()
            return
        for connection, message in outgoing:
            outbox = connection.outbox
            if isinstance(message, codec.Reply) and outbox.makes_way(
                message, self.logic.anchor.nbytes
            ):
                message = self.logic.snapshot(connection)
            outbox.put(message)
            if isinstance(message, codec.Refused):
                outbox.close()
        self.changed.notify_all()

    def _report_rounds(self):
        rounds = self.logic.rules.rounds
        for closed in self.logic.history[self._reported :]:
            logger.info("Round %d/%d: %s", closed.round, rounds, closed)
            self.on_closed(closed)
        self._reported = len(self.logic.history)

    def _count(self, connection, received=0, sent=0):
        with self.changed:
            traffic = self.traffic.setdefault(connection.name, Traffic())
            traffic.received += received
            traffic.sent += sent
