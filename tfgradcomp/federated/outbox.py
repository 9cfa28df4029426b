"""Messages that wait until a client's link has carried those before."""

from __future__ import annotations

import collections
import threading

from tfgradcomp.federated import codec

MOST = 256
"""Greatest number of messages that wait for a client that does not read."""

_NEWS = (codec.Reply, codec.Snapshot)


class Outbox:
    """The messages for a client, in order: one thread puts them in, another sends them.

    Rounds can be faster than a client's link carries their replies. As soon as the
    anchor is shorter than the replies that wait, it takes their place, so that a slow
    client is at most that far behind, and the hub's memory holds no more.
    """

    def __init__(self):
        self._waiting: collections.deque[codec.Message] = collections.deque()
        self._is_open = True
        self._changed = threading.Condition()

    def put(self, message: codec.Message) -> None:
        """Adds a message; ends the stream if too many wait."""
        with self._changed:
            if len(self._waiting) >= MOST:
                # The client comes again and gets what it has missed.
                self._waiting.clear()
                self._is_open = False
            if self._is_open:
                self._waiting.append(message)
            self._changed.notify_all()

    def makes_way(self, reply: codec.Reply, nbytes: int) -> bool:
        """Drops the replies that wait if they have become longer than the anchor.

        Args:
            reply: A new reply, which has not been put in.
            nbytes: Bytes of the anchor.

        Returns:
            True if they have been dropped. The caller puts the anchor in, and not
            `reply`.
        """
        with self._changed:
            news = [each for each in self._waiting if isinstance(each, _NEWS)]
            if not news or _length(reply) + sum(map(_length, news)) <= nbytes:
                return False
            rest = (each for each in self._waiting if not isinstance(each, _NEWS))
            self._waiting = collections.deque(rest)
            return True

    def close(self) -> None:
        """Ends the stream after the messages that wait."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def get(self) -> codec.Message | None:
        """Waits for a message and returns it; None at the end of the stream."""
        with self._changed:
            while self._is_open and not self._waiting:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None


def _length(message: codec.Message) -> int:
    return sum(len(part) for part in message if isinstance(part, bytes))
