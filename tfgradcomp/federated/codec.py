"""Messages between a hub and its clients, as bytes.

A message is `TGCF`, the protocol's number and the message's kind (a byte each), the
fields in the order of their declaration, and a CRC-32 of all bytes before it. Integers
and floats take 8 bytes; texts and bytes have their length, 4 bytes, before them. All
numbers are little-endian. `decode` reads any bytes: it returns a message or raises a
`MessageError`, and allocates no more than the bytes it was given.
"""

from __future__ import annotations

import struct
import typing
import zlib
from typing import Any, NamedTuple

PROTOCOL = 1
"""Number of the form of messages. Hub and clients must have the same."""

_MAGIC = b"TGCF"
_HEAD = struct.Struct("<4sBB")
_CRC = struct.Struct("<I")
_LENGTH = struct.Struct("<I")
_NUMBERS = {int: struct.Struct("<q"), float: struct.Struct("<d")}


class MessageError(ValueError):
    """Bytes that are no message, or a message that nobody should have sent."""


class Hello(NamedTuple):
    """A client says what it is and what it has; a hub answers with `Welcome`.

    Attributes:
        version: Version of the package.
        name: Name of the client; a certificate's name replaces it.
        model: Description of the model (`describe_model`).
        method: Description of the method; "" if the client takes the hub's.
        training: Identifier of the training in the client's folder; "" if it is new.
        life: Number of the client's folder, which the hub has given; 0 if it is new.
        round: Rounds in the client's anchor; -1 if it has none.
        digest: Digest of the anchor.
        token: A number that the answer repeats.
    """

    version: str
    name: str
    model: str
    method: str
    training: str
    life: int
    round: int
    digest: int
    token: int


class Welcome(NamedTuple):
    """The hub's answer to a `Hello`, before the missed replies or the anchor.

    Attributes:
        training: Identifier of the training.
        method: Description of the method.
        outer_rate: Learning rate of the outer step.
        outer_momentum: Momentum of the outer step.
        nesterov: 1 if this momentum is Nesterov's, else 0.
        seed: Seed of random numbers.
        number: Number of the client, in whose order payloads are added.
        life: Number of the client's folder.
        round: Rounds that are closed.
        rounds: Rounds of the whole training.
        settled: Sequence number of the client's last payload that is settled.
        received: Sequence number of the last payload that the hub has.
        token: The token of the `Hello`.
        by_examples: 1 if means are weighted by numbers of examples, else 0.
    """

    training: str
    method: str
    outer_rate: float
    outer_momentum: float
    nesterov: int
    seed: int
    number: int
    life: int
    round: int
    rounds: int
    settled: int
    received: int
    token: int
    by_examples: int


class Snapshot(NamedTuple):
    """The anchor, for clients that are new, have missed too many replies, or are slow.

    Attributes:
        round: Rounds that are in it.
        weights: float32 numbers.
        velocity: float32 numbers; empty without outer momentum.
        statistics: float32 numbers.
        digest: Digest of the three.
        token: The token of the client's last `Hello`.
        settled: As in `Welcome`.
    """

    round: int
    weights: bytes
    velocity: bytes
    statistics: bytes
    digest: int
    token: int
    settled: int


class Push(NamedTuple):
    """A payload of a client.

    Attributes:
        life: Number of the client's folder.
        sequence: Number of the payload: 1, 2, ... in each life.
        examples: Weight of the payload: a number of examples.
        payload: Words of the compressed difference from the anchor.
        statistics: float32 numbers.
    """

    life: int
    sequence: int
    examples: float
    payload: bytes
    statistics: bytes


class Reply(NamedTuple):
    """The reply that closes a round.

    Attributes:
        round: Number of rounds closed, this one included.
        num_workers: Number of payloads in it.
        payload: Words of the compressed mean.
        statistics: float32 numbers: the mean statistics.
        digest: Digest of the anchor after this round.
        settled: As in `Welcome`.
    """

    round: int
    num_workers: int
    payload: bytes
    statistics: bytes
    digest: int
    settled: int


class LeftOut(NamedTuple):
    """A payload is settled, but not counted.

    Attributes:
        settled: Sequence number of the payload.
        reason: A sentence.
    """

    settled: int
    reason: str


class Leave(NamedTuple):
    """A client leaves, with a word."""

    life: int


class Refused(NamedTuple):
    """The hub ends a connection.

    Attributes:
        reason: A sentence.
        final: 1 if the client need not come again, else 0.
    """

    reason: str
    final: int


class Finished(NamedTuple):
    """All rounds are closed.

    Attributes:
        round: Their number.
    """

    round: int


Message = (
    Hello | Welcome | Snapshot | Push | Reply | LeftOut | Leave | Refused | Finished
)
_KINDS: tuple = typing.get_args(Message)
# Types of the fields by their names, in order.
_TYPES = {kind: tuple(typing.get_type_hints(kind).items()) for kind in _KINDS}


def encode(message: Message) -> bytes:
    """Returns a message as bytes."""
    kind = type(message)
    parts = [_HEAD.pack(_MAGIC, PROTOCOL, _KINDS.index(kind))]
    values: tuple[Any, ...] = message
    for (_, declared), value in zip(_TYPES[kind], values, strict=True):
        if declared in _NUMBERS:
            parts.append(_NUMBERS[declared].pack(value))
        else:
            data = value.encode() if declared is str else value
            parts += [_LENGTH.pack(len(data)), data]
    body = b"".join(parts)
    return body + _CRC.pack(zlib.crc32(body))


def decode(data: bytes) -> Message:
    """Returns the message that bytes hold.

    Raises:
        MessageError: If they hold none, or one of another protocol.
    """
    if len(data) < _HEAD.size + _CRC.size:
        raise MessageError(
            f"A message has at least {_HEAD.size + _CRC.size} bytes. "
            f"Received: {len(data)} bytes"
        )
    magic, protocol, kind = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise MessageError(
            f"A message begins with {_MAGIC!r}: the other side is no tfgradcomp "
            f"program. Received: {magic!r}"
        )
    if protocol != PROTOCOL:
        raise MessageError(
            f"This program speaks protocol {PROTOCOL}. Install the same version of "
            f"tfgradcomp on both sides. Received: protocol={protocol}"
        )
    if kind >= len(_KINDS):
        raise MessageError(
            f"There are {len(_KINDS)} kinds of messages. Received: kind={kind}"
        )
    end = len(data) - _CRC.size
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end]):
        raise MessageError(
            f"A {_KINDS[kind].__name__} was damaged on its way: its checksum differs. "
            f"Received: {len(data)} bytes"
        )
    return _fields(data, end, _KINDS[kind])


def _fields(data: bytes, end: int, kind: type) -> Message:
    values, begin = [], _HEAD.size

    def take(size: int, name: str) -> int:
        nonlocal begin
        if size > end - begin:
            raise MessageError(
                f"{name} of a {kind.__name__} needs {size} bytes, but {end - begin} "
                f"are left. Received: {len(data)} bytes"
            )
        begin += size
        return begin - size

    for name, declared in _TYPES[kind]:
        if declared in _NUMBERS:
            number = _NUMBERS[declared]
            values.append(number.unpack_from(data, take(number.size, name))[0])
            continue
        (size,) = _LENGTH.unpack_from(data, take(_LENGTH.size, name))
        start = take(size, name)
        part = data[start : start + size]
        values.append(_text(part, name, kind) if declared is str else part)
    if begin != end:
        raise MessageError(
            f"{end - begin} bytes are left behind a {kind.__name__}. "
            f"Received: {len(data)} bytes"
        )
    return kind(*values)


def _text(part: bytes, name: str, kind: type) -> str:
    try:
        return part.decode()
    except UnicodeDecodeError as error:
        raise MessageError(
            f"{name} of a {kind.__name__} must be text in UTF-8. Received: {error}"
        ) from error
