"""Parameter servers without a barrier: a log of pushes that every worker follows.

A worker pushes when it has a gradient. The servers answer each push by itself, as if
there were one worker, and put the answer where every worker finds it, for each pusher
in the order of its pushes. The first server also writes down the order of all pushes.
Every worker applies all answers in that order, its own among them: weights are a
function of how much of the log was applied, and nothing is lost or applied twice.

The scale that ternary codes need is the maximum over what a worker has and what the
others last pushed: no smaller than its own, so the codes stay unbiased.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives.base import Collectives
from tfgradcomp.parameter_server.transport import (
    HEAD,
    ParameterServer,
    Rendezvous,
    Site,
    cut_of,
    head_of,
    read_head,
    unless_gone,
    waits,
)
from tfgradcomp.transports.base import Words

_ORDER = "order"


class Log(Rendezvous):
    """The queues by which N workers push and pull.

    An entry of the order is a worker's rank, or N, which ends it.
    """

    def push(self, name: str, site: Site, rank: int, messages) -> list[tf.Operation]:
        """Sends a worker's messages to the servers."""
        self._sites.setdefault(name, site)
        return [
            self._send("up", name, server, "all", tf.concat([[rank], message], 0))
            for server, message in enumerate(messages)
        ]

    def announce(self, rank: int, after: list[tf.Operation]) -> None:
        """Enters a push in the order, once all of it has arrived."""
        self._sites.setdefault(_ORDER, None)
        # Made on the worker: servers do not see each other.
        with tf.control_dependencies(after):
            message = tf.identity(tf.constant([rank]))
        self._send("up", _ORDER, 0, "all", message)

    def next(self, rank: int) -> tf.Tensor:
        """Returns whose push is the next that a worker has to apply."""
        return tf.ensure_shape(self._take("down", _ORDER, 0, rank), [1])[0]

    def pull(self, name: str, site: Site, rank: int, pusher: tf.Tensor, own=()):
        """Returns the servers' answers to the next push of `pusher`.

        Args:
            name: Name of the call site.
            site: Its site.
            rank: The worker that pulls.
            pusher: Rank of the one that pushed, int32 scalar.
            own: The answers to this worker's push, where it knows them itself.
        """

        def answer_to(of, server):
            if of == rank and own:
                return own[server]
            return self._take("down", name, server, f"{rank} from {of}")

        answers = []
        for server, words in enumerate(site.replied):
            branches = [
                functools.partial(answer_to, of, server)
                for of in range(self.num_workers)
            ]
            answer = tf.switch_case(pusher, branches)
            answers.append(tf.ensure_shape(answer, [words]))
        return answers

    def serve(self, server: int) -> dict[str, Callable]:
        """Returns the half of a server: a function for each call site, until `stop`."""
        return {
            name: self._serve(server, name, site)
            for name, site in self._sites.items()
            if server < (len(site.words) if site else 1)
        }

    def stop(self) -> None:
        """Makes the servers end when they have answered all that was pushed."""
        for name, site in self._sites.items():
            for server in range(len(site.words) if site else 1):
                with unless_gone():
                    self._send("up", name, server, "all", tf.zeros([0], tf.int32))

    def end(self) -> None:
        """Ends the order for all workers, after the servers have ended."""
        for rank in range(self.num_workers):
            with unless_gone():
                end = tf.constant([self.num_workers])
                self._send("down", _ORDER, 0, rank, end)

    def _serve(self, server, name, site):
        ranks = range(self.num_workers)

        def answer_to(message):
            if site is None:
                for rank in ranks:
                    self._send("down", _ORDER, 0, rank, message)
                return
            words = tf.ensure_shape(message[1:], [site.words[server]])
            answer = site.answer(server, words[tf.newaxis])

            def hand_out(pusher):
                for rank in ranks:
                    if rank == pusher and site.is_known:
                        continue
                    key = f"{rank} from {pusher}"
                    self._send("down", name, server, key, answer)
                return tf.constant(True)

            tf.switch_case(
                message[0], [lambda pusher=pusher: hand_out(pusher) for pusher in ranks]
            )

        def one(_):
            message = self._take("up", name, server, "all")

            def answered():
                answer_to(message)
                return tf.constant(True)

            is_push = tf.size(message) > 0
            return (tf.cond(is_push, answered, lambda: tf.constant(False)),)

        @tf.function(autograph=False)
        def serve():
            with tf.device(self.devices[server]):
                return tf.while_loop(
                    lambda goes_on: goes_on,
                    one,
                    [tf.constant(True)],
                    parallel_iterations=1,
                )[0]

        return serve.get_concrete_function()

    def _send(self, kind, name, server, key, message):
        queue = self._queue(kind, name, server, key)
        with tf.device(self.devices[server]):
            return tf.raw_ops.QueueEnqueueV2(handle=queue, components=[message])

    def _take(self, kind, name, server, key):
        queue = self._queue(kind, name, server, key)
        with tf.device(self.devices[server]):
            (message,) = tf.raw_ops.QueueDequeueV2(
                handle=queue, component_types=[tf.int32]
            )
        return message


class LogCollectives(Collectives):
    """A worker that meets nobody: to the servers it is the only one.

    Attributes:
        log: Where it pushes and pulls.
    """

    num_workers = 1

    def __init__(self, log: Log, rank: int):
        self.join(log, rank)

    def join(self, log: Log, rank: int) -> None:
        """Goes over to another log; what was traced stays with the old one."""
        self.log, self._rank = log, rank

    @property
    @override
    def rank(self):
        return self._rank


class PushPull(ParameterServer):
    """Sends payloads, and decodes the answers to any worker's.

    With a payload goes what its worker has of what all agree on (`context.max`), and
    with the answer. What the others had last is kept where a transport keeps a
    server's state: `[N, count]`, zeros in the own row.
    """

    @override
    def init_server(self, compressor, server, layout):
        count = _agreed(compressor, layout)
        rows = self.collectives.log.num_workers
        return {"last": tf.zeros([rows, count])} if count else ()

    def push(self, payload, agreed, compressor, server, layout, context, status, site):
        """Sends a payload to the servers.

        Args:
            payload: A tensor for each of the compressor's fields.
            agreed: What this worker has of what all agree on, float32 `[count]`.
            compressor: Says what the fields are.
            server: The rule that answers.
            layout: The blocks of the flat vector.
            context: The step.
            status: int32 scalar; not 0: nobody is to apply it.
            site: Name of the call site.

        Returns:
            The operations that send, and the servers' answers as far as the worker
            knows them itself: those of a server without a state.
        """
        log = self.collectives.log
        cut = self._cut(compressor, server, layout)
        head = head_of(status, context)
        messages = [tf.concat([head, part], 0) for part in cut.messages(payload)]
        count = agreed.shape[0]
        messages[0] = tf.concat([messages[0], tf.bitcast(agreed, tf.int32)], 0)

        is_known = not tf.nest.flatten(server.init(layout))

        def answer(index, rows):
            own = count if index == 0 else 0
            heads, words, last = tf.split(rows, [HEAD, cut.sent[index], own], axis=1)
            statuses, there = read_head(heads, context)
            if is_known:
                reply, _ = cut.combine(index, words, (), there)
            else:
                state = log.state(
                    *(site, index, functools.partial(cut.state, index, context)),
                    *(functools.partial(cut.init, index), cut.part(index)),
                )
                reply = state.follow(there, words, tf.equal(statuses[0], 0))
            return tf.concat([statuses, reply, last[0]], 0)

        site_of = self._site(cut, messages, count, answer)._replace(is_known=is_known)
        own = [answer(k, row[tf.newaxis]) for k, row in enumerate(messages) if is_known]
        return log.push(site, site_of, self._rank, messages), own

    def pull(self, compressor, server, layout, site, pusher, own=()):
        """Returns the answer to a worker's push.

        Args:
            compressor: As in `push`.
            server: As in `push`.
            layout: As in `push`.
            site: As in `push`.
            pusher: The worker's rank.
            own: The answers that `push` returned last.

        Returns:
            The update, the pusher's status and what it had of what all agree on.
        """
        log = self.collectives.log
        cut = self._cut(compressor, server, layout)
        count = _agreed(compressor, layout)
        site_of = self._site(cut, (), count, None)
        answers = log.pull(site, site_of, self._rank, pusher, own)
        status = answers[0][0]
        end = answers[0].shape[0] - count
        last = tf.bitcast(answers[0][end:], tf.float32)
        answers[0] = answers[0][:end]
        reply = cut.reply([answer[1:] for answer in answers])
        return server.decompress(reply, layout, 1), status, last

    def words(self, compressor, server, layout):
        """See `Transport.words`: of a push, and of an answer to each worker's."""
        log = self.collectives.log
        cut = self._cut(compressor, server, layout)
        count = _agreed(compressor, layout)
        pulled = log.num_workers - (not tf.nest.flatten(server.init(layout)))
        return Words(
            sent=len(cut.sent) * (1 + HEAD) + sum(cut.sent) + count,
            received=pulled * (len(cut.replied) + sum(cut.replied) + count),
        )

    def _cut(self, compressor, server, layout):
        # A state that waits for the next push of all is held by one server.
        servers = 1 if waits(server) else len(self.collectives.log.devices)
        return cut_of(compressor, server, layout, 1, servers)

    @property
    def _rank(self):
        return self.collectives.rank

    def _site(self, cut, messages, count, answer):
        replied = [1 + words for words in cut.replied]
        replied[0] += count
        words = tuple(message.shape[0] for message in messages)
        return Site(words, answer, tuple(replied))


def _agreed(compressor, layout):
    return sum(field.count for field in compressor.agreed(layout).values())
