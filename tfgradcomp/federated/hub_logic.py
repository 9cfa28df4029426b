"""The hub's bookkeeping: a state machine without network, clock or files.

A message goes in with the time, messages come out. Before these are sent, the caller
saves `kept` if `unsaved` is true. So whatever a client has heard, the hub knows
after a restart, and whatever it forgets, the clients send again.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from tfgradcomp.core.logging import logger
from tfgradcomp.federated import codec
from tfgradcomp.federated.anchor import Anchor, OuterStep
from tfgradcomp.federated.bound_method import BoundMethod
from tfgradcomp.federated.codec import MessageError
from tfgradcomp.federated.description import Description, first_difference
from tfgradcomp.federated.hub_state import HubState, Member
from tfgradcomp.federated.rounds import Round, Rules, Waiting, too_long, weighted_mean

# Weights are float32, and their sum has to be one.
_MOST_EXAMPLES = 1e12
Outgoing = list[tuple[Any, codec.Message]]
"""Connections, and the messages that they get, in order."""


class HubLogic:
    """Knows the anchor, the last replies, and what was counted of each client.

    Args:
        bound: The method, bound to the model.
        description: What clients must agree with.
        anchor: The first anchor.
        outer: The outer step.
        rules: The rules of the training.
        seed: Seed of random numbers.
        saved: The result of `HubState.to_files`, to go on from there.

    Attributes:
        bound: The method.
        rules: The rules.
        kept: What survives a restart.
        history: The rounds that are closed since the last restart.
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
        self.rules, self.bound = rules, bound
        self.kept = HubState(bound, description, anchor, outer, seed, saved)
        self.history: list[Round] = []
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
    def queued(self) -> set[str]:
        """Names of the clients whose payloads wait for the end of the round."""
        return {*self._queue}

    @property
    def due(self) -> float | None:
        """Time of the deadline of the open round; None while nobody is there."""
        return None if self._opened is None else self._opened + self.rules.deadline

    @property
    def anchor(self) -> Anchor:
        """The anchor after the last round."""
        return self.kept.anchor

    def snapshot(self, connection: Any) -> codec.Snapshot:
        """Returns the anchor as a message.

        It may take the place of replies that a client's link has not carried yet.

        Args:
            connection: A connection in `connected`.
        """
        anchor = self.anchor
        parts = {name: array.tobytes() for name, array in anchor.arrays.items()}
        return codec.Snapshot(
            round=anchor.round,
            digest=anchor.digest,
            token=self._hellos[connection],
            settled=self.kept.members[self._names[connection]].settled,
            **parts,
        )

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
            if name == hello.name and other != connection:
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
        missed = self.kept.missed(hello)
        welcome = codec.Welcome(
            training=self.kept.training,
            method=self.kept.description.method,
            outer_rate=self.kept.outer.learning_rate,
            outer_momentum=self.kept.outer.momentum,
            nesterov=int(self.kept.outer.nesterov),
            seed=self.kept.seed,
            number=member.number,
            life=member.life,
            round=self.anchor.round,
            rounds=self.rules.rounds,
            settled=member.settled,
            received=self._received(hello.name),
            token=hello.token,
            by_examples=int(self.bound.by_examples),
        )
        outgoing.append((connection, welcome))
        if missed is None:
            outgoing.append((connection, self.snapshot(connection)))
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
        difference = first_difference(self.kept.description, hello)
        if difference:
            return difference
        if hello.training not in ("", self.kept.training):
            return (
                "its folder belongs to another training; give it a new folder. The "
                f"hub's training is {self.kept.training}, the folder's {hello.training}"
            )
        member = self.kept.members.get(hello.name)
        if member and hello.training and hello.life < member.life:
            return (
                f"{hello.name!r} has joined from another folder since. Each client "
                "needs a name of its own"
            )
        if not member and len(self.kept.members) >= self.rules.most_clients:
            return f"{self.rules.most_clients} clients have joined, the greatest number"
        return ""

    def _member_of(self, connection, hello):
        """Returns the client's entry, with a new life if its folder is new."""
        member = self.kept.members.get(hello.name)
        if member is None:
            member = self.kept.members[hello.name] = Member(len(self.kept.members))
        if hello.training:
            # Greater than known only if the hub was set back.
            member.life = max(member.life, hello.life)
        elif self._hellos.get(connection) != hello.token:
            member.life, member.settled = member.life + 1, 0
            # What an earlier life has sent and the hub has not counted is lost with it.
            self._queue.pop(hello.name, None)
            self.unsaved = True
        return member

    # A payload comes.

    def _received(self, name):
        waiting = self._queue.get(name)
        return waiting.sequence if waiting else self.kept.members[name].settled

    def _push(self, name, push, now):
        member = self.kept.members[name]
        waiting = self._queue.get(name)
        is_known = push.sequence <= self._received(name)
        if push.life != member.life or is_known or self.is_finished:
            return []  # It has come before.
        if waiting:
            raise MessageError(
                "A client sends a payload when the one before is settled. "
                f"Received: payloads {waiting.sequence} and {push.sequence} of {name!r}"
            )
        count, size = self.anchor.statistics.size, len(push.statistics)
        statistics = np.frombuffer(push.statistics, "<f4", size // 4)
        if size != 4 * count or not np.isfinite(statistics).all():
            raise MessageError(
                f"Expected {count} finite statistics of 4 bytes. Received: {size} "
                f"bytes from {name!r}"
            )
        if not 0 < push.examples <= _MOST_EXAMPLES:
            raise MessageError(
                "The number of examples must be positive and at most "
                f"{_MOST_EXAMPLES:g}. Received: examples={push.examples} from {name!r}"
            )
        self._behind.discard(name)
        known = push._replace(statistics=statistics)
        waiting = Waiting(name=name, norm=0.0, **known._asdict())
        try:
            vector = self.bound.decode(push.payload)
        except MessageError as error:
            return self._drop(waiting, str(error)) + self.tick(now)
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        self._queue[name] = waiting._replace(norm=norm)
        return self.tick(now)

    # A round closes.

    def _leave_out(self):
        """Drops payloads that are much longer than the others."""
        outgoing: Outgoing = []
        limit = self.rules.norm_limit
        for waiting, reason in too_long(self._queue.values(), self.kept.norms, limit):
            outgoing += self._drop(self._queue.pop(waiting.name), reason)
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
        self.kept.members[waiting.name].settled = waiting.sequence
        self.unsaved = True

    def _close(self, carried, now):
        counted = sorted(
            self._queue.values(), key=lambda w: self.kept.members[w.name].number
        )
        weights = [w.examples if self.bound.by_examples else 1.0 for w in counted]
        combined = self.bound.combine(
            [w.payload for w in counted],
            weights,
            self.kept.server_state,
            self.anchor.round,
        )
        try:
            update = self.bound.decode_reply(combined.reply, len(counted))
        except MessageError:
            # Each payload is finite. The longest has made the sum overflow.
            longest, _ = max(
                zip(counted, weights, strict=True), key=lambda one: one[0].norm * one[1]
            )
            del self._queue[longest.name]
            reason = "with this payload the mean of all has NaN or Inf"
            return self._drop(longest, reason) + self.tick(now)
        statistics = weighted_mean([w.statistics for w in counted], weights)
        self.kept.anchor = self.anchor.moved(update, statistics, self.kept.outer)
        self.kept.server_state = combined.state
        for waiting in counted:
            self._settle(waiting)
            self.kept.norms.append(waiting.norm)
        reply = codec.Reply(
            self.anchor.round,
            len(counted),
            combined.reply,
            statistics.tobytes(),
            self.anchor.digest,
            settled=0,
        )
        self.kept.keep(reply, self.rules.replies_kept)
        self._note(counted, carried, now, len(combined.reply))
        self._queue.clear()
        self._behind |= {*carried}
        self._opened, self._waits_for_quorum = now, False
        return self._tell(reply)

    def _tell(self, reply):
        outgoing: Outgoing = []
        for connection, name in self._names.items():
            settled = self.kept.members[name].settled
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
            payload_norm=median(w.norm for w in counted),
        )
        self.history.append(closed)
        self._closed, self._left_out = now, []
