"""The route of workers that do not wait for each other: pushes into a `PushLog`.

Without a first round, a shared scale is the maximum of the worker's scale and those
that the others last pushed. It is never smaller than the worker's, so ternary codes
stay unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives.base import SingleWorker
from tfgradcomp.core import Context
from tfgradcomp.parameter_server.channel import WorkerEndpoint
from tfgradcomp.parameter_server.division import division_for
from tfgradcomp.parameter_server.header import HEADER_WORDS, read_header, write_header
from tfgradcomp.parameter_server.queues import ServerEndpoint, total
from tfgradcomp.parameter_server.transport import ServerRoute
from tfgradcomp.transports.base import ExchangeResult, PendingExchange, Words
from tfgradcomp.transports.messages import (
    joined_numbers,
    split_numbers,
    variable_length_words,
)

# The key in `Context.prepared` of this worker's maxima, from `reduce_max` to `push`.
_LOCAL_MAXIMA = "local_maxima"


class LogCollectives(WorkerEndpoint, SingleWorker):
    """The collectives of a worker in a `PushLog`, which exchanges nothing itself."""

    @override
    def words_received(self, call):
        # A worker receives the pushes of all other workers.
        return (self.channel.num_workers - 1) * call.words


class Pushed(NamedTuple):
    """The content of a pending exchange: a push into the log.

    Attributes:
        pusher: Rank of the worker that pushes, int32 scalar.
        operations: The operations that send it; empty for a push of another worker.
        known_replies: The servers' replies if this worker can compute them itself.
        variable_length_words: int32, the push's words in fields of variable length.
    """

    pusher: tf.Tensor | int
    operations: Sequence[tf.Operation] = ()
    known_replies: Sequence[tf.Tensor] = ()
    variable_length_words: tf.Tensor | int = 0


class PushLogRoute(ServerRoute):
    """Pushes messages into a log, and pulls the servers' replies to all pushes.

    Message and reply carry the maxima that the pusher has for the first round. The
    route's state holds the last maxima of the other workers, `[N, num_max_reduced]`,
    with zeros in this worker's row.
    """

    collectives: LogCollectives

    def __init__(self, collectives, method, layout, call_site):
        super().__init__(collectives, method, layout, call_site)
        self._log = collectives.channel
        # Deferred replies need rounds, so a single server holds such a state.
        is_deferred = method.server.deferred_reply(layout, 1)
        servers = 1 if is_deferred else len(self._log.devices)
        self._division = division_for(method, layout, 1, servers)
        self._maxima = self.num_max_reduced
        # Without a state, a reply depends on the message alone.
        self._is_reply_known = not tf.nest.flatten(self._division.init_state(0))

    @override
    def init_state(self):
        if not self.max_reduced_fields:
            return ()
        return {"last": tf.zeros([self._log.num_workers, self._maxima])}

    @override
    def reduce_max(self, prepared, state):
        if not self.max_reduced_fields:
            return prepared
        local = joined_numbers(prepared, self.max_reduced_fields)
        last = tf.convert_to_tensor(state["last"])
        maxima = tf.maximum(local, tf.reduce_max(last, axis=0))
        shared = split_numbers(maxima, self.max_reduced_fields)
        return {**prepared, **shared, _LOCAL_MAXIMA: local}

    @override
    def push(self, payload, state, context, flag):
        head = write_header(flag, context)
        rows = self._division.messages(payload)
        words = [
            tf.concat([head, rows[server]], 0)
            for server in range(self._division.num_used)
        ]
        if self._maxima:
            local = tf.bitcast(context.prepared[_LOCAL_MAXIMA], tf.int32)
            words[0] = tf.concat([words[0], local], 0)
        endpoint = self._endpoint(context)
        rank = self.collectives.rank
        operations = self._log.push(self.call_site, endpoint, rank, words)
        known = [
            endpoint.answer(server, row[tf.newaxis])
            for server, row in enumerate(words)
            if self._is_reply_known
        ]
        varying = variable_length_words(payload, self.fields)
        return PendingExchange(context, Pushed(rank, operations, known, varying))

    def pending_push_of(
        self,
        pusher: tf.Tensor,
        context: Context,
        known_replies: Sequence[tf.Tensor] = (),
    ) -> PendingExchange:
        """Returns the exchange with which `pull` decodes the next push of `pusher`.

        `known_replies` are the replies to this worker's push, if known.
        """
        return PendingExchange(context, Pushed(pusher, (), known_replies))

    @override
    def pull(self, pending, state):
        log, rank = self._log, self.collectives.rank
        pusher, known = pending.content.pusher, pending.content.known_replies

        def from_log():
            peer = self.collectives.peer
            return log.pull(self.call_site, self._reply_words, peer, pusher)

        if known:
            replies = tf.cond(tf.equal(pusher, rank), lambda: [*known], from_log)
        else:
            replies = from_log()
        flag = replies[0][0]
        if self._maxima:
            maxima = tf.bitcast(replies[0][-self._maxima :], tf.float32)
            replies[0] = replies[0][: -self._maxima]
            last = tf.convert_to_tensor(state["last"])
            rows = tf.range(last.shape[0])[:, tf.newaxis]
            is_new = (rows == pusher) & (rows != rank)
            state = {"last": tf.where(is_new, maxima, last)}
        words = [reply[1:] for reply in replies]
        update, _ = self._division.decoded(words, pending.context)
        flags = flag * tf.one_hot(pusher, log.num_workers, dtype=tf.int32)
        return ExchangeResult(update, state, flags)

    @property
    def _reply_words(self):
        words = self._division.num_used * [total(1, self._division.reply_words)]
        words[0] = total(words[0], self._maxima)
        return tuple(words)

    def _endpoint(self, context):
        division = self._division
        words = division.num_used * [total(HEADER_WORDS, division.payload_words)]
        words[0] = total(words[0], self._maxima)

        def answer(server, rows):
            sizes = [HEADER_WORDS, -1, self._maxima if server == 0 else 0]
            headers, payload, last = tf.split(rows, sizes, axis=1)
            flags, at_server = read_header(headers, context)
            if self._is_reply_known:
                reply, _ = division.combine(server, payload, (), at_server)
            else:
                state = self._log.states.get(
                    self.call_site, server, division, context, self._waiting
                )
                reply = state.follow(at_server, payload, tf.equal(flags[0], 0))
            return tf.concat([flags, reply, last[0]], 0)

        return ServerEndpoint(
            tuple(words), self._reply_words, answer, is_reply_known=self._is_reply_known
        )

    @property
    @override
    def words(self):
        # A worker sends one push, and receives the replies to every worker's push.
        used, payloads = self._division.num_used, self._division.words
        pulled = self._log.num_workers - self._is_reply_known
        return Words(
            sent=used * (2 + HEADER_WORDS) + payloads.sent + self._maxima,
            received=pulled * (used + payloads.received + self._maxima),
        )
