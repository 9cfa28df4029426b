"""The hub's bookkeeping: a state machine without network, clock or files.

A message goes in with the time, messages come out. Before these are sent, the caller
saves the state if `unsaved` is true. So whatever a client has heard, the hub knows
after a restart, and whatever it forgets, the clients send again.
"""

from __future__ import annotations

import collections
import math
import secrets
import statistics as numbers
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from tfgradcomp.core.logging import logger
from tfgradcomp.federated import codec
from tfgradcomp.federated.anchor import Anchor, OuterStep
from tfgradcomp.federated.bound_method import BoundMethod, arrays_of
from tfgradcomp.federated.codec import MessageError
from tfgradcomp.federated.description import Description, first_difference

NORMS_KEPT = 64
"""Number of accepted norms whose median judges further payloads."""

Outgoing = list[tuple[Any, codec.Message]]
"""Connections, and the messages that they get, in order."""


class Rules(NamedTuple):
    """Rules of a training.

    Attributes:
        rounds: Number of rounds of the whole training.
        deadline: Seconds after which a round closes without those who have not come.
        quorum: Least number of payloads that close a round.
        replies_kept: Greatest number of replies that are kept for clients who missed
            them.
        norm_limit: A payload whose norm is more than so many times the median is left
            out.
        most_clients: Greatest number of clients that may ever join.
    """

    rounds: int
    deadline: float
    quorum: int = 1
    replies_kept: int = 32
    norm_limit: float = 10.0
    most_clients: int = 1000


@dataclass
class Member:
    """A client that has joined at some time.

    Attributes:
        number: Its place in sums.
        life: Number of its folder; a client that has lost its folder gets another.
        settled: Sequence number of its last payload that was counted or left out.
    """

    number: int
    life: int = 0
    settled: int = 0


class Waiting(NamedTuple):
    """A payload that has come and is in no round yet."""

    name: str
    life: int
    sequence: int
    examples: float
    payload: bytes
    statistics: np.ndarray
    norm: float


class Round(NamedTuple):
    """A closed round.

    Attributes:
        round: Its number, from 1.
        counted: Names of the clients whose payloads it counted, in order.
        carried: Names of the clients that were awaited and did not come in time.
        left_out: Names of the clients whose payloads were left out.
        seconds: Seconds since the round before.
        payload_bytes: Bytes of the longest payload.
        reply_bytes: Bytes of the reply.
    """

    round: int
    counted: tuple[str, ...]
    carried: tuple[str, ...]
    left_out: tuple[str, ...]
    seconds: float
    payload_bytes: int
    reply_bytes: int


class HubLogic:
    """Knows the anchor, the last replies, and what was counted of each client.

    Args:
        bound: The method, bound to the model.
        description: What clients must agree with.
        anchor: The first anchor.
        outer: The outer step.
        rules: The rules of the training.
        seed: Seed of random numbers.
        saved: The result of `state`, to go on from there.
    """

    def __init__(
        self,
        bound: BoundMethod,
        description: Description,
        anchor: Anchor,
        outer: OuterStep,
        rules: Rules,
        seed: int = 0,
        saved: tuple[Mapping, Mapping[str, np.ndarray]] | None = None,
    ):
        self.rules, self.outer, self._seed = rules, outer, seed
        self._bound, self._description = bound, description
        self.training = secrets.token_hex(8)
        self.anchor, self._server_state = anchor, bound.server_state()
        self._members: dict[str, Member] = {}
        self._replies: collections.deque[codec.Reply] = collections.deque()
        self._norms: collections.deque[float] = collections.deque(maxlen=NORMS_KEPT)
        self.history: list[Round] = []
        if saved is not None:
            self._restore(*saved)
        self.unsaved = saved is None
        # Lost at a restart.
        self._names: dict[Any, str] = {}
        self._hellos: dict[Any, int] = {}
        self._queue: dict[str, Waiting] = {}
        self._behind: set[str] = set()
        self._opened: float | None = None
        self._closed: float | None = None
        self._left_out: list[str] = []
        self._waits_for_quorum = False

    # What the caller asks.

    @property
    def is_finished(self) -> bool:
        """True if all rounds are closed."""
        return self.anchor.round >= self.rules.rounds

    @property
    def connected(self) -> dict[Any, str]:
        """Names of the clients, by their connections."""
        return dict(self._names)

    @property
    def due(self) -> float | None:
        """Time of the deadline of the open round; None while nobody is there."""
        return None if self._opened is None else self._opened + self.rules.deadline

    def state(self) -> tuple[dict, dict[str, np.ndarray]]:
        """Returns what a restart needs: small values, and arrays by their names."""
        arrays = {f"server.{k}": v for k, v in arrays_of(self._server_state).items()}
        for name in ("weights", "velocity", "statistics"):
            arrays[name] = getattr(self.anchor, name)
        for reply in self._replies:
            arrays[f"reply.{reply.round}.payload"] = _array(reply.payload)
            arrays[f"reply.{reply.round}.statistics"] = _array(reply.statistics)
        empty = {"payload": b"", "statistics": b""}
        values = {
            "training": self.training,
            "description": self._description._asdict(),
            "outer": asdict(self.outer),
            "seed": self._seed,
            "round": self.anchor.round,
            "digest": self.anchor.digest,
            "members": {name: asdict(m) for name, m in self._members.items()},
            "replies": [{**r._asdict(), **empty} for r in self._replies],
            "norms": list(self._norms),
        }
        return values, arrays

    def _restore(self, values, arrays):
        _check_same_training(values, self._description, asdict(self.outer), self._seed)
        self.training = values["training"]
        names = "weights", "velocity", "statistics"
        self.anchor = Anchor(values["round"], *(arrays[name] for name in names))
        begin = "server."
        kept = {k[len(begin) :]: v for k, v in arrays.items() if k.startswith(begin)}
        self._server_state = self._bound.server_state(kept)
        self._members = {n: Member(**m) for n, m in values["members"].items()}
        self._norms.extend(values["norms"])
        for fields in values["replies"]:
            of = f"reply.{fields['round']}"
            parts = {n: arrays[f"{of}.{n}"].tobytes() for n in ("payload", "statistics")}
            self._replies.append(codec.Reply(**{**fields, **parts}))

    # What happens.

    def receive(self, connection: Any, message: codec.Message, now: float) -> Outgoing:
        """Handles a message of a client.

        Args:
            connection: The connection that brought it, a different object for each.
            message: The message; the name in a `Hello` is the one to be believed.
            now: The time, in seconds.

        Raises:
            MessageError: If no client should send it: the connection must be closed.
        """
        if isinstance(message, codec.Hello):
            return self._hello(connection, message, now)
        if connection not in self._names:
            # A `Hello` was lost, or another connection has replaced this one.
            return []
        if isinstance(message, codec.Push):
            return self._push(self._names[connection], message, now)
        if isinstance(message, codec.Leave):
            name = self._names[connection]
            logger.info("%s leaves after round %d", name, self.anchor.round)
            return self.disconnected(connection, now, with_word=True)
        raise MessageError(
            f"A client sends no {type(message).__name__}. "
            f"Received: it from {self._names[connection]!r}"
        )

    def disconnected(
        self, connection: Any, now: float, with_word: bool = False
    ) -> Outgoing:
        """Forgets a connection that has ended; the round waits for it no more."""
        self._hellos.pop(connection, None)
        name = self._names.pop(connection, None)
        if name is None:
            return []
        if not with_word:
            logger.info("%s is gone in round %d", name, self.anchor.round + 1)
        self._behind.discard(name)
        return self.tick(now)

    def tick(self, now: float) -> Outgoing:
        """Closes the open round if it is complete or its deadline has passed."""
        if self.is_finished:
            return []
        awaited = {*self._names.values()} - self._behind - self._queue.keys()
        is_late = self.due is not None and now >= self.due
        if len(self._queue) < self.rules.quorum or (awaited and not is_late):
            if is_late and not self._waits_for_quorum:
                self._waits_for_quorum = True
                logger.warning(
                    "Round %d has reached its deadline with %d payloads; it waits for "
                    "its quorum of %d",
                    *(self.anchor.round + 1, len(self._queue), self.rules.quorum),
                )
            return []
        outgoing = self._leave_out()
        if len(self._queue) < self.rules.quorum:
            return outgoing
        return outgoing + self._close(tuple(sorted(awaited)), now)

    # A client comes.

    def _hello(self, connection, hello, now):
        if hello.token < self._hellos.get(connection, hello.token):
            return []  # The client has said another one since.
        reason = self._reason_against(hello)
        if reason:
            logger.warning("%s is refused: %s", hello.name, reason)
            return [(connection, codec.Refused(reason, final=1))]
        outgoing: Outgoing = []
        for other, name in self.connected.items():
            if name == hello.name and other is not connection:
                del self._names[other]
                self._hellos.pop(other, None)
                text = f"another connection of {name!r} has taken its place"
                outgoing.append((other, codec.Refused(text, final=0)))
        member = self._member_of(connection, hello)
        if connection not in self._names:
            logger.info("%s joins in round %d", hello.name, self.anchor.round + 1)
        if self._opened is None:
            self._opened = now
        self._names[connection] = hello.name
        self._hellos[connection] = hello.token
        missed = self._missed(hello)
        welcome = codec.Welcome(
            training=self.training,
            method=self._description.method,
            outer_rate=self.outer.learning_rate,
            outer_momentum=self.outer.momentum,
            nesterov=int(self.outer.nesterov),
            seed=self._seed,
            number=member.number,
            life=member.life,
            round=self.anchor.round,
            rounds=self.rules.rounds,
            settled=member.settled,
            received=self._received(hello.name),
            token=hello.token,
            by_examples=int(self._bound.by_examples),
        )
        outgoing.append((connection, welcome))
        if missed is None:
            outgoing.append((connection, self._snapshot(hello.token)))
        else:
            for reply in missed:
                reply = reply._replace(settled=member.settled)
                outgoing.append((connection, reply))
        if self.is_finished:
            outgoing.append((connection, codec.Finished(self.anchor.round)))
        return outgoing

    def _reason_against(self, hello):
        if not 0 < len(hello.name) <= 200:
            return "a client's name has 1 to 200 characters"
        difference = first_difference(self._description, hello)
        if difference:
            return difference
        if hello.training not in ("", self.training):
            return (
                "its folder belongs to another training; give it a new folder. The "
                f"hub's training is {self.training}, the folder's {hello.training}"
            )
        member = self._members.get(hello.name)
        if member and hello.training and hello.life < member.life:
            return (
                f"{hello.name!r} has joined from another folder since. Each client "
                "needs a name of its own"
            )
        if not member and len(self._members) >= self.rules.most_clients:
            return f"{self.rules.most_clients} clients have joined, the greatest number"
        return ""

    def _member_of(self, connection, hello):
        """Returns the client's entry, with a new life if its folder is new."""
        member = self._members.get(hello.name)
        if member is None:
            member = self._members[hello.name] = Member(len(self._members))
        if hello.training:
            # Greater than known only if the hub was set back.
            member.life = max(member.life, hello.life)
        elif self._hellos.get(connection) != hello.token:
            member.life, member.settled = member.life + 1, 0
            # What an earlier life has sent and the hub has not counted is lost with it.
            self._queue.pop(hello.name, None)
            self.unsaved = True
        return member

    def _missed(self, hello):
        """Returns the replies that a client has missed; None if it needs the anchor."""
        digests = {reply.round: reply.digest for reply in self._replies}
        digests[self.anchor.round] = self.anchor.digest
        if hello.training and digests.get(hello.round) == hello.digest:
            return [reply for reply in self._replies if reply.round > hello.round]
        first = self._replies[0].round - 1 if self._replies else None
        if hello.training and hello.round == first:
            return [*self._replies]
        return None

    def _snapshot(self, token):
        weights, velocity, statistics = (part.tobytes() for part in self.anchor[1:])
        return codec.Snapshot(
            self.anchor.round, weights, velocity, statistics, self.anchor.digest, token
        )

    # A payload comes.

    def _received(self, name):
        waiting = self._queue.get(name)
        return waiting.sequence if waiting else self._members[name].settled

    def _push(self, name, push, now):
        member = self._members[name]
        waiting = self._queue.get(name)
        is_known = push.sequence <= self._received(name)
        if push.life != member.life or is_known or self.is_finished:
            return []  # It has come before.
        if waiting:
            raise MessageError(
                "A client sends a payload when the one before is settled. "
                f"Received: payloads {waiting.sequence} and {push.sequence} of {name!r}"
            )
        statistics = np.frombuffer(push.statistics, "<f4")
        count = self.anchor.statistics.size
        is_weight = 0 < push.examples < math.inf
        if statistics.size != count or not np.isfinite(statistics).all():
            raise MessageError(
                f"Expected {count} finite statistics. Received: {statistics.size} "
                f"from {name!r}"
            )
        if not is_weight:
            raise MessageError(
                "The number of examples must be positive and finite. Received: "
                f"examples={push.examples} from {name!r}"
            )
        self._behind.discard(name)
        waiting = Waiting(name, *push, norm=0.0)._replace(statistics=statistics)
        try:
            vector = self._bound.decode(push.payload)
        except MessageError as error:
            return self._drop(waiting, str(error)) + self.tick(now)
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        self._queue[name] = waiting._replace(norm=norm)
        return self.tick(now)

    # A round closes.

    def _leave_out(self):
        """Drops payloads that are much longer than the others."""
        norms = [*self._norms, *(w.norm for w in self._queue.values())]
        limit = self.rules.norm_limit * numbers.median(norms)
        if len(norms) < 3 or not limit:
            return []
        outgoing: Outgoing = []
        for name, waiting in [*self._queue.items()]:
            if waiting.norm <= limit:
                continue
            reason = (
                f"the norm of its payload, {waiting.norm:.3g}, is more than "
                f"{self.rules.norm_limit:g} times the median, "
                f"{limit / self.rules.norm_limit:.3g}"
            )
            outgoing += self._drop(self._queue.pop(name), reason)
        return outgoing

    def _drop(self, waiting, reason):
        """Settles a payload without counting it, and tells its client."""
        name = waiting.name
        logger.warning(
            "%s is left out of round %d: %s", name, self.anchor.round + 1, reason
        )
        self._left_out.append(name)
        self._settle(waiting)
        message = codec.LeftOut(waiting.sequence, reason)
        return [(c, message) for c, n in self._names.items() if n == name]

    def _settle(self, waiting):
        self._members[waiting.name].settled = waiting.sequence
        self.unsaved = True

    def _close(self, carried, now):
        counted = sorted(
            self._queue.values(), key=lambda w: self._members[w.name].number
        )
        weights = [w.examples if self._bound.by_examples else 1.0 for w in counted]
        combined = self._bound.combine(
            [w.payload for w in counted],
            weights,
            self._server_state,
            self.anchor.round,
        )
        update = self._bound.decode_reply(combined.reply, len(counted))
        statistics = _mean([w.statistics for w in counted], weights)
        self.anchor = self.anchor.moved(update, statistics, self.outer)
        self._server_state = combined.state
        for waiting in counted:
            self._settle(waiting)
            self._norms.append(waiting.norm)
        reply = codec.Reply(
            self.anchor.round,
            len(counted),
            combined.reply,
            statistics.tobytes(),
            self.anchor.digest,
            settled=0,
        )
        self._keep(reply)
        self._note(counted, carried, now, len(combined.reply))
        self._queue.clear()
        self._behind |= {*carried}
        self._opened, self._waits_for_quorum = now, False
        return self._tell(reply)

    def _keep(self, reply):
        """Keeps a reply, as long as all of them are shorter than the anchor."""
        self._replies.append(reply)
        most = sum(part.nbytes for part in self.anchor[1:])
        while len(self._replies) > 1 and (
            len(self._replies) > self.rules.replies_kept
            or sum(len(r.payload) + len(r.statistics) for r in self._replies) > most
        ):
            self._replies.popleft()

    def _tell(self, reply):
        outgoing: Outgoing = []
        for connection, name in self._names.items():
            settled = self._members[name].settled
            outgoing.append((connection, reply._replace(settled=settled)))
            if self.is_finished:
                outgoing.append((connection, codec.Finished(self.anchor.round)))
        return outgoing

    def _note(self, counted, carried, now, reply_bytes):
        since = self._closed if self._closed is not None else self._opened
        closed = Round(
            round=self.anchor.round,
            counted=tuple(w.name for w in counted),
            carried=carried,
            left_out=tuple(self._left_out),
            seconds=now - (now if since is None else since),
            payload_bytes=max(len(w.payload) for w in counted),
            reply_bytes=reply_bytes,
        )
        self.history.append(closed)
        self._closed, self._left_out = now, []
        late = f"; carried to the next: {', '.join(carried)}" if carried else ""
        logger.info(
            "Round %d/%d: %d clients, %.1f kB up and %.1f kB down a client, %.1f s%s",
            *(closed.round, self.rules.rounds, len(counted)),
            *(closed.payload_bytes / 1e3, reply_bytes / 1e3, closed.seconds, late),
        )


def _mean(rows: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    total = sum(w * row.astype(np.float64) for w, row in zip(weights, rows, strict=True))
    return np.asarray(total / sum(weights), np.float32)


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _check_same_training(values, description, outer, seed):
    mine = {"description": description._asdict(), "outer": outer, "seed": seed}
    for name, value in mine.items():
        if values[name] != value:
            raise ValueError(
                f"The hub's folder belongs to a training with another {name}. Give "
                "this one a new folder, or the arguments of before. Received: "
                f"{value}, before: {values[name]}"
            )
