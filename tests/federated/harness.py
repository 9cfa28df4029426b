"""A hub and its clients in one process: time, network and disks are simulated."""

from __future__ import annotations

import heapq
import itertools
import pickle

import numpy as np

from tfgradcomp.federated import codec
from tfgradcomp.federated.anchor import Anchor, OuterStep
from tfgradcomp.federated.bound_method import BoundMethod
from tfgradcomp.federated.client_logic import ClientLogic
from tfgradcomp.federated.description import (
    Description,
    describe_method,
    read_method,
)
from tfgradcomp.federated.hub_logic import HubLogic
from tfgradcomp.federated.rounds import Rules

SHAPES = [(6, 5), (5,)]
SIZE, STATISTICS = 35, 2


def description_of(method, model="trained kernel [6, 5]"):
    return Description("0.3", model, describe_method(method))


def bind(joined):
    method = read_method(joined.method)
    return BoundMethod(method, SHAPES, joined.by_examples, joined.seed)


class Client:
    """A client that takes a random walk as its local steps.

    Attributes:
        disk: The bytes of its folder, or None.
        moved: The sum of all differences that it has compressed and saved.
        forgotten: The residuals that it lost with its folders.
        under_way: The payloads that it has sent and did not know to be settled, when
            its folder was lost or the training ended.
    """

    def __init__(self, world, name):
        self.world, self.name, self.disk = world, name, None
        self.moved = np.zeros(SIZE)
        self.forgotten = np.zeros(SIZE)
        self.under_way = set()
        self.sent = {}
        self.connection, self.logic = None, None
        self.ready_at = 0.0
        self.start()

    def start(self):
        saved = None if self.disk is None else pickle.loads(self.disk)
        self.logic = ClientLogic(
            self.name, self.world.description, bind, patience=9.0, saved=saved
        )

    def connect(self):
        self.connection = (self.name, next(self.world.counter))
        self.send(self.logic.hello(self.world.now))

    def send(self, messages):
        for message in messages:
            self.world.post("hub", self.connection, codec.encode(message))

    def save(self):
        self.disk = pickle.dumps(self.logic.state())

    def received(self, data):
        try:
            self.send(self.logic.receive(codec.decode(data), self.world.now))
        except ConnectionError:
            self.connection = None

    def step(self):
        world = self.world
        if self.connection is None:
            if world.hub is not None and world.rng.random() < 0.5:
                self.connect()
            return
        if not self.logic.can_train:
            self.send(self.logic.tick(world.now))
            return
        if world.now < self.ready_at:
            return
        delta = world.rng.normal(size=SIZE).astype(np.float32)
        statistics = world.rng.normal(size=STATISTICS).astype(np.float32)
        messages = self.logic.push(
            delta, statistics, world.examples[self.name], world.now
        )
        self.save()
        self.moved += delta
        push = messages[0]
        self.sent[push.life, push.sequence] = world.bound.decode(push.payload)
        self.send(messages)
        self.ready_at = world.now + world.rng.integers(1, 4)

    def kill(self, lose_folder=False):
        if lose_folder and self.disk is not None:
            self.forget()
        self.world.cut(self.connection)
        self.connection = None
        self.start()

    def forget(self):
        values, arrays = pickle.loads(self.disk)
        self.forgotten += arrays.get("worker.residual", np.zeros(SIZE))
        if values["pending"] is not None:
            self.under_way.add((values["pending"]["life"], values["sequence"]))
        self.disk = None

    def imbalance(self):
        """Returns the part of its changes that is neither counted nor kept.

        It is the length of the sum of these changes, over that of all changes.

        The folder is read, and lost, at the end.
        """
        self.save()
        self.forget()
        counted = self.world.counted[self.name]
        kept = [self.sent[key] for key in self.under_way - counted.keys()]
        rest = self.moved - self.forgotten - sum([*counted.values(), *kept])
        return np.linalg.norm(rest) / np.linalg.norm(self.moved)


class World:
    """Everything: who counts what is recorded beside the hub, not by it."""

    def __init__(
        self,
        method,
        names,
        seed=0,
        rounds=300,
        chaos=0.0,
        by_examples=False,
        outer=None,
        quorum=1,
        deadline=6.0,
        **rules,
    ):
        self.rng = np.random.default_rng(seed)
        self.method, self.chaos, self.now = method, chaos, 0.0
        self.description = description_of(method)
        self.bound = BoundMethod(method, SHAPES, by_examples)
        self.rules = Rules(rounds, deadline, quorum, **rules)
        self.outer = outer or OuterStep()
        self.by_examples = by_examples
        self.first = Anchor.first(
            self.rng.normal(size=SIZE).astype(np.float32),
            np.zeros(STATISTICS, np.float32),
            self.outer,
        )
        self.counter, self.events, self.closed = itertools.count(), [], set()
        self.hub_disk, self.hub = None, None
        self.counted = {name: {} for name in names}
        self.updates = np.zeros(SIZE)
        self.means = np.zeros(SIZE)
        self.replies = {}
        self.examples = {name: 10.0 * (i + 1) for i, name in enumerate(names)}
        self.start_hub()
        self.clients = {name: Client(self, name) for name in names}

    # The hub.

    def start_hub(self):
        saved = None if self.hub_disk is None else pickle.loads(self.hub_disk)
        bound = BoundMethod(self.method, SHAPES, self.by_examples)
        self.hub = HubLogic(
            bound,
            self.description,
            self.first,
            self.outer,
            self.rules,
            saved=saved,
        )
        self.save_hub()

    def save_hub(self):
        if self.hub.unsaved:
            self.hub_disk = pickle.dumps(self.hub.kept.to_files())
            self.hub.unsaved = False

    def kill_hub(self):
        for name in list(self.hub.connected):
            self.cut(name)
        for client in self.clients.values():
            self.cut(client.connection)
            client.connection = None
        self.hub = None

    def hub_does(self, act):
        """Runs a step of the hub, which may be killed before or after it saves."""
        before = dict(self.hub._queue)
        round_before = self.hub.anchor.round
        outgoing = act()
        if self.chaos and self.rng.random() < self.chaos / 10:
            self.kill_hub()
            return
        self.save_hub()
        if self.hub.anchor.round > round_before:
            self.note(before)
        if self.chaos and self.rng.random() < self.chaos / 10:
            self.kill_hub()
            return
        for connection, message in outgoing:
            is_slow = self.chaos and self.rng.random() < self.chaos
            if isinstance(message, codec.Reply) and is_slow:
                message = self.hub.snapshot(connection)
            self.post(connection[0], connection, codec.encode(message))

    def note(self, before):
        """Records what a saved round has counted, from the hub's own record of it."""
        closed = self.hub.history[-1]
        vectors, weights = [], []
        for name in closed.counted:
            waiting = before.get(name) or self.arrived
            key = waiting.life, waiting.sequence
            assert key not in self.counted[name], "counted twice"
            self.counted[name][key] = self.clients[name].sent[key]
            vectors.append(self.counted[name][key])
            weights.append(self.examples[name] if self.by_examples else 1.0)
        self.means += np.average(vectors, axis=0, weights=weights)
        reply = self.hub.kept.replies[-1]
        assert reply.round == self.hub.anchor.round
        self.updates += self.bound.decode_reply(reply.payload, reply.num_workers)

    # The network.

    def post(self, to, connection, data):
        if connection is None:
            return
        copies = 1
        if self.chaos:
            draw = self.rng.random()
            copies = 0 if draw < self.chaos else 2 if draw < 2 * self.chaos else 1
        for _ in range(copies):
            late = self.chaos and self.rng.random() < self.chaos
            delay = self.rng.uniform(5, 12) if late else self.rng.uniform(0.01, 0.9)
            if not self.chaos:
                delay = 0.5
            item = (self.now + delay, next(self.counter), to, connection, data)
            heapq.heappush(self.events, item)

    def cut(self, connection):
        """Ends a connection; the hub notices later."""
        if connection is not None and connection not in self.closed:
            self.closed.add(connection)
            item = (self.now + self.rng.uniform(0, 3), next(self.counter), "end")
            heapq.heappush(self.events, (*item, connection, b""))

    def deliver(self):
        while self.events and self.events[0][0] <= self.now:
            _, _, to, connection, data = heapq.heappop(self.events)
            if self.hub is None:
                continue
            if to == "end":
                self.hub_does(lambda c=connection: self.hub.disconnected(c, self.now))
            elif connection in self.closed:
                continue
            elif to == "hub":
                message = codec.decode(data)
                if isinstance(message, codec.Push):
                    self.arrived = message
                self.hub_does(
                    lambda c=connection, m=message: self.hub.receive(c, m, self.now)
                )
            elif self.clients[to].connection == connection:
                self.clients[to].received(data)

    # The course of things.

    def tick(self):
        self.now += 1.0
        self.deliver()
        if self.hub is None:
            self.start_hub()
        elif not self.events or self.events[0][0] > self.now:
            self.hub_does(lambda: self.hub.tick(self.now))
        for client in self.clients.values():
            if self.chaos and self.rng.random() < self.chaos / 5:
                client.kill(lose_folder=self.rng.random() < 0.2)
            if self.chaos and self.rng.random() < self.chaos / 5:
                self.cut(client.connection)
                client.connection = None
            client.step()

    def run(self, most=100_000):
        for _ in range(most):
            self.tick()
            if self.hub and self.hub.is_finished:
                break
        self.chaos = 0.0
        for _ in range(60):
            self.tick()
