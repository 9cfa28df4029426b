"""A client's bookkeeping: a state machine without network, clock or files.

Between two rounds of local steps a client has at most one payload under way. It keeps
the payload until the hub says that it is settled, and sends it again whenever it is not
sure: the hub counts each sequence number once. The caller saves `state` after `push`,
before anything is sent; an older state is no harm, since the hub knows what is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfgradcomp.core import State
from tfgradcomp.core.logging import logger
from tfgradcomp.federated import codec
from tfgradcomp.federated.anchor import NO_ANCHOR, Anchor, OuterStep
from tfgradcomp.federated.bound_method import CLIENT, BoundMethod, arrays_of
from tfgradcomp.federated.codec import MessageError
from tfgradcomp.federated.description import Description


class RefusedError(ConnectionError):
    """The hub has refused this client, and would do so again."""


class Joined(NamedTuple):
    """Facts about the training, as the hub has told them to a client.

    Attributes:
        training: Identifier of the training.
        method: Description of the method.
        seed: Seed of random numbers.
        number: Number of the client.
        life: Number of the client's folder.
        by_examples: Whether means are weighted by numbers of examples.
    """

    training: str
    method: str
    seed: int
    number: int
    life: int
    by_examples: bool


_NOT_JOINED = Joined("", "", 0, 0, 0, False)


class ClientLogic:
    """Knows the anchor, the residual, and the payload that is under way.

    Args:
        name: Name of the client.
        description: Its version, model and method.
        bind: Function that returns the bound method for a `Joined`.
        patience: Seconds after which the client asks again for what it waits for.
        saved: The result of `state`, to go on from there.

    Attributes:
        bound: The method, bound to the model; None before the hub has named it.
        reply_bytes: Bytes of the newest reply; 0 before there is one.
    """

    def __init__(
        self,
        name: str,
        description: Description,
        bind: Callable[[Joined], BoundMethod],
        patience: float = 60.0,
        saved: tuple[Mapping, Mapping[str, np.ndarray]] | None = None,
    ):
        self.name, self._description, self._bind = name, description, bind
        self._patience = patience
        self.anchor, self.joined = NO_ANCHOR, _NOT_JOINED
        self.outer = OuterStep()
        self.bound: Any = None
        self._state: Any = None
        self._sequence = 0
        self._pending: codec.Push | None = None
        if saved is not None:
            self._restore(*saved)
        # Lost at a restart.
        self.rounds, self.reply_bytes = 0, 0
        self.is_finished = False
        self._token = 0
        self._hub_round: int | None = None
        self._awaits_snapshot = False
        self._asked = 0.0

    # What the caller asks.

    @property
    def can_train(self) -> bool:
        """True if the client has the hub's anchor and no payload under way."""
        if self._hub_round is None or self._pending or self.is_finished:
            return False
        return self.anchor.round >= self._hub_round

    @property
    def by_examples(self) -> bool:
        """True if the hub weights payloads by numbers of examples."""
        return self.joined.by_examples

    @property
    def compressor_state(self) -> State:
        """The state of the compressor, such as its residual."""
        return self._state

    def state(self) -> tuple[dict, dict[str, np.ndarray]]:
        """Returns what a restart needs: small values, and arrays by their names."""
        arrays = arrays_of(self._state, CLIENT) | self.anchor.arrays
        values = {
            "name": self.name,
            "joined": self.joined._asdict(),
            "description": self._description._asdict(),
            "outer": [*vars(self.outer).values()],
            "round": self.anchor.round,
            "sequence": self._sequence,
            "pending": None,
        }
        if self._pending is not None:
            push = self._pending
            values["pending"] = {"life": push.life, "examples": push.examples}
            arrays["pending.payload"] = np.frombuffer(push.payload, np.uint8)
            arrays["pending.statistics"] = np.frombuffer(push.statistics, np.uint8)
        return values, arrays

    def _restore(self, values, arrays):
        before = Description(**values["description"])
        if before._replace(method="") != self._description._replace(method=""):
            raise ValueError(
                "The client's folder belongs to a training of another model, or of "
                "another version of tfgradcomp. Give this one a new folder. Received: "
                f"version={self._description.version}, before {before.version}"
            )
        self.joined = Joined(**values["joined"])
        self.outer = OuterStep(*values["outer"])
        self.bound = self._bind(self.joined)
        self._state = self.bound.client_state(arrays)
        self.anchor = Anchor.of(values["round"], arrays)
        self._sequence = values["sequence"]
        if values["pending"] is not None:
            parts = {
                n: arrays[f"pending.{n}"].tobytes() for n in ("payload", "statistics")
            }
            self._pending = codec.Push(
                sequence=self._sequence, **values["pending"], **parts
            )

    # What happens.

    def hello(self, now: float) -> list[codec.Message]:
        """Returns what a client says on a new connection, or if it has missed a word.

        Args:
            now: The time, in seconds.
        """
        self._token += 1
        self._asked, self._awaits_snapshot, self._hub_round = now, True, None
        return [
            codec.Hello(
                version=self._description.version,
                name=self.name,
                model=self._description.model,
                method=self._description.method,
                training=self.joined.training,
                life=self.joined.life,
                round=self.anchor.round,
                digest=self.anchor.digest,
                token=self._token,
            )
        ]

    def push(
        self, delta: np.ndarray, statistics: np.ndarray, examples: float, now: float
    ) -> list[codec.Push]:
        """Compresses the result of local steps; the caller saves, then sends it.

        Args:
            delta: float32, the anchor less the client's weights.
            statistics: float32, the statistics of normalization layers.
            examples: The weight of the client.
            now: The time, in seconds.

        Raises:
            FloatingPointError: If `delta` is not finite.
        """
        if not self.can_train:
            raise RuntimeError("A payload is under way, or the anchor is not there.")
        step, number = self._sequence + 1, self.joined.number
        done = self.bound.compress(delta, self._state, step, number)
        self._state, self._sequence, self._asked = done.state, step, now
        self._pending = codec.Push(
            self.joined.life, step, examples, done.payload, statistics.tobytes()
        )
        return [self._pending]

    def leave(self) -> list[codec.Message]:
        """Returns what a client says before it ends."""
        return [codec.Leave(self.joined.life)] if self.joined.training else []

    def tick(self, now: float) -> list[codec.Message]:
        """Asks again if an answer is overdue.

        Args:
            now: The time, in seconds.
        """
        is_waiting = not self.can_train and not self.is_finished
        is_late = now - self._asked > self._patience
        return self.hello(now) if is_waiting and is_late else []

    def receive(self, message: codec.Message, now: float) -> list[codec.Message]:
        """Handles a message of the hub and returns the answers.

        Args:
            message: The message.
            now: The time, in seconds.

        Raises:
            MessageError: If the message makes no sense.
            RefusedError: If the hub refuses this client for good.
            ConnectionAbortedError: If the hub ends the connection.
        """
        if isinstance(message, codec.Welcome):
            return self._welcome(message)
        if isinstance(message, codec.Refused):
            kind = RefusedError if message.final else ConnectionAbortedError
            raise kind(f"The hub has refused {self.name!r}: {message.reason}")
        if isinstance(message, codec.Snapshot):
            return self._take_snapshot(message)
        if isinstance(message, codec.Reply):
            return self._reply(message, now)
        if isinstance(message, codec.LeftOut):
            if self._settle(message.settled):
                logger.warning("The hub has left out a payload: %s", message.reason)
            return []
        if isinstance(message, codec.Finished):
            self.is_finished |= self.anchor.round == message.round
            return []
        raise MessageError(f"A hub sends no {type(message).__name__}.")

    def _welcome(self, message):
        if message.token != self._token:
            return []  # It answers an older question.
        joined = Joined(
            message.training,
            message.method,
            message.seed,
            message.number,
            message.life,
            bool(message.by_examples),
        )
        if joined != self.joined:
            self._join(joined, message)
        self.rounds, self._hub_round = message.rounds, message.round
        self._settle(message.settled)
        is_missing = self._pending and message.received < self._pending.sequence
        return [self._pending] if is_missing else []

    def _join(self, joined, message):
        try:
            bound = self._bind(joined)
            self.outer = OuterStep(
                message.outer_rate, message.outer_momentum, bool(message.nesterov)
            )
        except (TypeError, ValueError) as error:
            raise RefusedError(f"This client cannot join: {error}") from error
        if not self.joined.training:
            self._state = bound.client_state()
        self.bound, self.joined = bound, joined

    def _settle(self, settled):
        """Drops the payload that is under way if it is settled; returns whether."""
        if self._pending is None or settled < self._pending.sequence:
            return False
        self._pending = None
        return True

    def _take_snapshot(self, message):
        # The hub also sends it in place of replies that wait for a slow link.
        is_new = self._awaits_snapshot or message.round > self.anchor.round
        if self.bound is None or message.token != self._token or not is_new:
            return []
        parts = (message.weights, message.velocity, message.statistics)
        anchor = Anchor(message.round, *(np.frombuffer(p, "<f4") for p in parts))
        size = self.bound.layout.size
        if anchor.digest != message.digest or anchor.weights.size != size:
            raise MessageError(
                f"The hub's anchor is damaged: expected {size} weights with digest "
                f"{message.digest}. Received: {anchor.weights.size} with digest "
                f"{anchor.digest}"
            )
        self.anchor, self._awaits_snapshot = anchor, False
        self._settle(message.settled)
        return []

    def _reply(self, message, now):
        if message.round > self.anchor.round + 1:
            # One got lost. While an answer is under way, it will bring it.
            return [] if self._hub_round is None else self.hello(now)
        if message.round == self.anchor.round + 1:
            self.reply_bytes = len(message.payload)
            update = self.bound.decode_reply(message.payload, message.num_workers)
            statistics = np.frombuffer(message.statistics, "<f4")
            anchor = self.anchor.moved(update, statistics, self.outer)
            if anchor.digest != message.digest:
                logger.warning(
                    "The weights after round %d differ from the hub's: this client "
                    "fetches them",
                    message.round,
                )
                self.anchor = self.anchor._replace(round=-1)
                return self.hello(now)
            self.anchor, self._awaits_snapshot = anchor, False
        self._settle(message.settled)
        return []
