"""The transport through parameter servers, in rounds of all workers.

A worker's step puts a message into a queue on each server and takes the reply out of
another queue. A separate function runs on each server: it takes a message from each
worker, in the order of ranks, runs the server's rule and puts the reply into the queues
of all workers. Tracing a worker's step declares the messages and the rule.

After the queues for messages are closed, no server replies, and earlier replies are
there for all workers: a round ends for all workers or for none. If a server's state
depends on other servers' replies, the workers send these with the next messages.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives import Collectives
from tfgradcomp.core.waiting_elements import WaitingElements
from tfgradcomp.engine.step import Stepper
from tfgradcomp.parameter_server.channel import (
    Channel,
    RoundChannel,
    WorkerEndpoint,
)
from tfgradcomp.parameter_server.division import Relay, division_for
from tfgradcomp.parameter_server.header import HEADER_WORDS, read_header, write_header
from tfgradcomp.parameter_server.queues import ServerEndpoint, total
from tfgradcomp.transports import messages
from tfgradcomp.transports.base import (
    ExchangeResult,
    PendingExchange,
    Route,
    Transport,
    Words,
)
from tfgradcomp.transports.messages import has_variable_length


class ServerCollectives(WorkerEndpoint, Collectives):
    """A worker's view of a `RoundChannel`."""

    @override
    def join(self, channel, peer):
        super().join(channel, peer)
        self.num_workers = self.num_processes = channel.num_workers
        self.process_index = peer

    @override
    def words_received(self, call):
        return (self.num_workers if call.kind == "gather" else 1) * call.words

    @override
    def gather(self, vector, call_site):
        return self._combined("gather", lambda rows: rows, vector, call_site)

    @override
    def sum(self, vector, call_site):
        return self._combined(
            "sum", lambda rows: tf.add_n(tf.unstack(rows)), vector, call_site
        )

    @override
    def max(self, vector, call_site):
        return self._combined(
            "max", lambda rows: tf.reduce_max(rows, axis=0), vector, call_site
        )

    def _combined(self, kind, combine, vector, call_site):
        """Combines vectors of 32-bit numbers; each server combines a part."""
        size = vector.shape[0]
        width = -(-size // len(self.channel.devices))
        parts = [vector[begin : begin + width] for begin in range(0, size, width)]

        def answer(server, rows):
            combined = combine(tf.bitcast(rows, vector.dtype))
            return tf.reshape(tf.bitcast(combined, tf.int32), [-1])

        words = tuple(part.shape[0] for part in parts)
        times = self.num_workers if kind == "gather" else 1
        reply_words = tuple(times * count for count in words)
        endpoint = ServerEndpoint(words, reply_words, answer)
        name = f"{kind}/{call_site}"
        sent = [tf.bitcast(part, tf.int32) for part in parts]
        self.channel.send(name, endpoint, self.peer, sent)
        shape = [self.num_workers, -1] if kind == "gather" else [-1]
        replies = [
            tf.reshape(reply, shape) for reply in self.channel.receive(name, self.peer)
        ]
        return tf.bitcast(tf.concat(replies, -1), vector.dtype)


class ServerRoute(Route):
    """A route to servers that hold the server's state themselves."""

    exchanges_every_step = True
    _waiting: WaitingElements | None = None

    @override
    def without(self, waiting):
        # The servers hold the state of the elements that wait.
        other = copy.copy(self)
        other._waiting = waiting
        return other


class ParameterServerRoute(ServerRoute):
    """Messages to the servers of a `RoundChannel`, and their replies to all workers.

    The servers hold the server's state. A worker keeps the fields of `deferred_reply`,
    and sends them with its next message.
    """

    collectives: ServerCollectives

    def __init__(self, collectives, method, layout, call_site):
        super().__init__(collectives, method, layout, call_site)
        self._channel = collectives.channel
        self._division = division_for(
            method, layout, self.num_workers, len(self._channel.devices)
        )
        self._deferred_words = messages.message_words(self._division.deferred_reply)
        self._endpoint_name = f"exchange/{call_site}"

    @override
    def init_state(self):
        if not self._division.deferred_reply:
            return ()
        return {"deferred": tf.zeros([self._deferred_words])}

    @override
    def push(self, payload, state, context, flag):
        deferred = tf.zeros([0], tf.int32)
        if self._division.deferred_reply:
            deferred = tf.bitcast(state["deferred"], tf.int32)
        head = tf.concat([write_header(flag, context), deferred], 0)
        rows = self._division.messages(payload)
        used = range(self._division.num_used)
        self._channel.send(
            self._endpoint_name,
            self._endpoint(context),
            self.collectives.peer,
            [tf.concat([head, rows[server]], 0) for server in used],
        )
        return PendingExchange(
            context, messages.variable_length_words(payload, self.fields)
        )

    @override
    def pull(self, pending, state):
        replies = self._channel.receive(self._endpoint_name, self.collectives.peer)
        count = self.num_workers
        flags = replies[0][:count]
        rows = [reply[count:] for reply in replies]
        update, reply = self._division.decoded(rows, pending.context)
        deferred = self._division.deferred_reply
        if deferred:
            words = messages.pack(reply, deferred)
            state = {"deferred": tf.bitcast(words, tf.float32)}
        return ExchangeResult(update, state, flags, pending.content)

    def _endpoint(self, context):
        division, used = self._division, self._division.num_used
        head = HEADER_WORDS, self._deferred_words

        def answer(server, rows):
            headers, deferred, words = tf.split(rows, [*head, -1], axis=1)
            flags, at_server = read_header(headers, context)
            state = self._channel.states.get(
                self.call_site, server, division, context, self._waiting
            )
            reply = state.next(at_server, words, deferred[0])
            return tf.concat([flags, reply], 0)

        return ServerEndpoint(
            words=used * (total(*head, division.payload_words),),
            reply_words=used * (total(self.num_workers, division.reply_words),),
            answer=answer,
        )

    @property
    @override
    def words(self):
        used, payloads = self._division.num_used, self._division.words
        # The first round is a call of the collectives.
        first = super().words
        head = HEADER_WORDS + self._deferred_words
        return Words(
            sent=used * head + payloads.sent + first.sent,
            received=used * self.num_workers + payloads.received + first.received,
        )


class ParameterServer(Transport):
    """Divides the vector among the parameter servers, or gives it to the first server.

    Attributes:
        collectives_class: The class of the workers' ends of a channel.
        channel_class: The class of the channel between workers and servers.
        stepper_class: The class of the steppers of the workers' optimizers.
    """

    payload_kind = (
        "messages of fixed size, and of variable size if the server has no state; "
        "factors and columns of matrices need servers on all workers"
    )
    carries_tables = False
    route_class: ClassVar[type[Route]] = ParameterServerRoute
    collectives_class: ClassVar[type[Any]] = ServerCollectives
    channel_class: ClassVar[type[Channel]] = RoundChannel
    stepper_class: ClassVar[type[Stepper]] = Stepper

    @classmethod
    def at(cls, channel: Channel, rank: int) -> ParameterServer:
        """Returns the transport of a worker on a channel."""
        return cls(cls.collectives_class(channel, rank))

    @override
    def supports(self, method, layout):
        if method.compressor.needs_whole_tensors or method.server.read_by_workers:
            return False
        varies = has_variable_length(method.compressor.fields(layout))
        return not varies or Relay.supports(method, layout)
