"""The hub's side: rounds with the nodes of a ServerApp's grid."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path

import keras
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from tfgradcomp.core.arguments import check_integer
from tfgradcomp.core.logging import logger
from tfgradcomp.federated import codec
from tfgradcomp.federated.anchor import OuterStep, hexadecimal
from tfgradcomp.federated.hub_logic import Outgoing
from tfgradcomp.federated.logics import hub_logic
from tfgradcomp.federated.rounds import Round, Rules, check_rounds
from tfgradcomp.federated.training_model import TrainingModel
from tfgradcomp.flower.record import RECORD, record_of
from tfgradcomp.methods import Method

_POLL = 0.5
"""Seconds between two looks for answers."""
_PAUSE = 10.0
"""Seconds before a node that has failed gets its next message."""
_DEADLINES = 10
"""Deadlines after which a message without an answer is given up."""


def run(
    grid: Grid,
    make_model: Callable[[], keras.Model],
    method: Method,
    *,
    rounds: int,
    deadline: float,
    quorum: int = 1,
    outer: OuterStep | None = None,
    weights: str = "equal",
    state: str | Path | None = None,
    seed: int = 0,
    on_round: Callable[[keras.Model, Round], None] | None = None,
) -> keras.Model:
    r"""Trains a model in rounds with the nodes of a Flower grid.

    As a `federated.Hub` it combines the payloads of a round and moves the anchor:

    \( \bar x \leftarrow \mathrm{outer}(\bar x, \mathrm{server}(\Delta_1 \dots
    \Delta_N)) \)

    Nodes come and go. A round closes when all nodes that have answered before have sent
    a payload, or at its deadline. Later payloads count in the next round. A payload
    whose message was lost is sent again. The same rounds give the bits of a `Hub`.

    Args:
        grid: The grid of the ServerApp.
        make_model: Function that returns a new built Keras model.
        method: A method of one round, such as `methods.dist_ef_block_sgd()`.
        rounds: Number of rounds of the training, those before a restart included.
        deadline: Seconds after which a round closes without the nodes that have not
            answered. Flower alone takes several seconds for a message.
        quorum: Least number of payloads that close a round.
        outer: The step that moves the anchor; None is `OuterStep()`.
        weights: `"equal"`, or `"examples"`, as for `Hub`.
        state: The hub's folder, from which another run goes on. None: nothing is kept.
        seed: Seed of the methods' random numbers.
        on_round: Function that is called with the model and the round after each round.

    Returns:
        The model with the weights of the last round.

    Raises:
        ValueError: If an argument is out of range, if the method needs two rounds, or
            if the folder belongs to another training.

    Example:
        ```python
        @app.main()
        def main(grid, context):
            method = tfgradcomp.methods.dist_ef_block_sgd()
            model = tfgradcomp.flower.run(
                grid, make_model, method, rounds=40, deadline=60
            )
            model.save("trained.keras")
        ```

    References:
        As for `federated.Hub`.
    """
    check_rounds(rounds, deadline)
    check_integer("quorum", quorum, 1)
    training = TrainingModel(make_model())
    logic, store = hub_logic(
        training,
        method,
        Rules(rounds, deadline, quorum),
        outer,
        weights,
        seed,
        state,
    )
    nodes, seen = _Nodes(grid, logic, store), 0
    try:
        while not logic.is_finished:
            nodes.exchange(time.monotonic())
            for closed in logic.history[seen:]:
                logger.info("Round %d/%d: %s", closed.round, rounds, closed)
                training.take(logic.anchor)
                if on_round is not None:
                    on_round(training.model, closed)
            seen = len(logic.history)
            time.sleep(0 if logic.is_finished else _POLL)
    finally:
        if store:
            store.close()
    training.take(logic.anchor)
    logger.info(
        "The training has ended after round %d with the weights %s",
        *(logic.anchor.round, hexadecimal(logic.anchor.digest)),
    )
    return training.model


class _Nodes:
    """Passes messages between the hub's logic and the nodes, which are its connections.

    A node has at most one message of Flower at a time, and answers with a `Hello`.
    """

    def __init__(self, grid, logic, store):
        self._grid, self._logic, self._store = grid, logic, store
        self._under_way: dict[str, int] = {}
        self._outbox: dict[int, list[codec.Message]] = {}
        self._marks: dict[int, int] = {}
        self._paused_until: dict[int, float] = {}
        self._tokens = itertools.count(1)

    def exchange(self, now: float) -> None:
        """Handles the answers that have come, and sends what there is to say."""
        if self._under_way:
            for reply in self._grid.pull_messages([*self._under_way]):
                self._receive(reply, now)
        self._note(self._logic.tick(now))
        if self._store and self._logic.unsaved:
            # Before anybody hears of it.
            self._store.save(*self._logic.kept.to_files())
            self._logic.unsaved = False
        if not self._logic.is_finished:
            self._send(now)

    def _receive(self, reply, now):
        node = self._under_way.pop(reply.metadata.reply_to_message_id)
        # Its `Hello` tells what the node has heard; what it has missed is said again.
        self._outbox[node] = []
        try:
            if reply.has_error():
                raise codec.MessageError(reply.error.reason)
            self._marks[node] = int(reply.content[RECORD]["mark"])
            for data in reply.content[RECORD]["messages"]:
                message = codec.decode(data)
                if isinstance(message, codec.Hello):
                    message = message._replace(token=next(self._tokens))
                self._note(self._logic.receive(node, message, now))
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            logger.warning("Node %d has failed: %s", node, error)
            self._lose(node, now)
            self._paused_until[node] = now + _PAUSE

    def _note(self, outgoing: Outgoing) -> None:
        for node, message in outgoing:
            if isinstance(message, codec.Refused):
                self._paused_until[node] = math.inf
            else:
                self._outbox[node].append(message)

    def _lose(self, node, now):
        self._outbox[node], self._marks[node] = [], 0
        self._note(self._logic.disconnected(node, now))

    def _send(self, now):
        listed = {*self._grid.get_node_ids()}
        busy = {*self._under_way.values()}
        for node in self._logic.connected.keys() - listed - busy:
            self._lose(node, now)
        names, queued = self._logic.connected, self._logic.queued
        for node in sorted(listed - busy):
            # A node whose payload waits has nothing to do before the round ends.
            if names.get(node) in queued or now < self._paused_until.get(node, 0.0):
                continue
            record = record_of(self._outbox.get(node, []), self._marks.get(node, 0))
            record["training"] = self._logic.kept.training
            message = Message(
                RecordDict({RECORD: record}),
                node,
                MessageType.TRAIN,
                ttl=_DEADLINES * self._logic.rules.deadline,
                group_id=str(self._logic.anchor.round + 1),
            )
            for name in filter(None, self._grid.push_messages([message])):
                self._under_way[name] = node
