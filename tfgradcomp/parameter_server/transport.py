"""The server is on parameter servers: words go up to them, and one reply comes down.

A worker's step hands a message to a queue on each server and takes the reply out of
another queue there. The servers' half is a function of its own on each server: it takes
one message a worker, in the order of ranks, runs the server's rule and hands the reply
to all. Tracing a worker's step writes down, by the way, what servers must answer.

Queues end a round as a whole: once those for messages are closed no server replies any
more, and what it has replied is there for all workers. So either all workers of a
round commit it or none does. Servers learn which from the step that the next
messages are of, and keep the state before the last round until then. What a server's
state needs of the other servers' replies comes with the next messages, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives.base import Collectives
from tfgradcomp.compressors.base import Compressor, Context, Field, Layout, State
from tfgradcomp.servers.base import Server
from tfgradcomp.transports import messages
from tfgradcomp.transports.base import Outcome, Transport, Words
from tfgradcomp.transports.sharded import Shards

# A message begins with a status, the step, the seed and two learning rates.
HEAD = 7


class Site(NamedTuple):
    """What the servers, or the first of them, answer at a call site, once a step.

    Attributes:
        words: int32 words of a worker's message to each server.
        answer: Function of a server's index and the messages, int32 `[N, words]`,
            that returns the reply, int32 `[replied]`.
        replied: Words of each server's reply.
        is_known: Whether a worker knows the answer to its message by itself.
    """

    words: tuple[int, ...]
    answer: Callable[[int, tf.Tensor], tf.Tensor]
    replied: tuple[int, ...]
    is_known: bool = False


class Rendezvous:
    """The queues by which N workers and the servers meet, until one of them is lost.

    Attributes:
        name: Distinguishes the queues from those of other meetings.
        devices: Names of the servers' devices.
        num_workers: N.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        num_workers: int,
        states: dict[str, list[np.ndarray]],
    ):
        """Creates a rendezvous.

        Args:
            name: Its name.
            devices: Names of the servers' devices.
            num_workers: N.
            states: What `whole_states` of an earlier rendezvous returned, or nothing.
        """
        self.name = name
        self.devices = tuple(devices)
        self.num_workers = num_workers
        self._inherited = states
        self._states, self._parts = {}, {}
        self._sites = {}
        self._queues = {}
        self._closed = set()

    def ask(self, name: str, site: Site, rank: int, messages) -> list[tf.Tensor]:
        """Sends a worker's messages, and returns the servers' replies.

        Args:
            name: Name of the call site, the same on all workers.
            site: What is to be answered; the first worker's counts.
            rank: The worker's.
            messages: int32 vectors, one for each server that answers.
        """
        site = self._sites.setdefault(name, site)
        replies = []
        for server, message in enumerate(messages):
            up = self._queue("up", name, server, rank)
            down = self._queue("down", name, server, rank)
            with tf.device(self.devices[server]):
                tf.raw_ops.QueueEnqueueV2(handle=up, components=[message])
                (reply,) = tf.raw_ops.QueueDequeueV2(
                    handle=down, component_types=[tf.int32]
                )
            replies.append(tf.ensure_shape(reply, [site.replied[server]]))
        return replies

    def serve(self, server: int) -> Callable:
        """Returns the half of a server: a function of a number of rounds.

        Every worker's step must have been traced before.
        """

        def round_of(index):
            for name, site in self._sites.items():
                if server >= len(site.words):
                    continue
                rows = []
                for rank in range(self.num_workers):
                    up = self._queue("up", name, server, rank)
                    (row,) = tf.raw_ops.QueueDequeueV2(
                        handle=up, component_types=[tf.int32]
                    )
                    rows.append(tf.ensure_shape(row, [site.words[server]]))
                reply = site.answer(server, tf.stack(rows))
                for rank in range(self.num_workers):
                    down = self._queue("down", name, server, rank)
                    tf.raw_ops.QueueEnqueueV2(handle=down, components=[reply])
            return index + 1

        @tf.function(autograph=False)
        def serve(rounds):
            with tf.device(self.devices[server]):
                return tf.while_loop(
                    lambda index: index < rounds,
                    lambda index: (round_of(index),),
                    [tf.constant(0)],
                    parallel_iterations=1,
                )[0]

        return serve.get_concrete_function(tf.TensorSpec([], tf.int32))

    def close(self, kind: str) -> None:
        """Closes the queues for messages, `"up"`, or for replies, `"down"`.

        Who waits for something to come out of one that is empty fails.
        """
        if kind in self._closed:
            return
        self._closed.add(kind)
        for (of, _, server, _), queue in self._queues.items():
            # A server that is gone has closed them in its way.
            with tf.device(self.devices[server]), unless_gone():
                if of == kind:
                    tf.raw_ops.QueueCloseV2(handle=queue)

    def free(self) -> None:
        """Destroys the queues, with all that is in them."""
        for (_, _, server, _), queue in self._queues.items():
            with tf.device(self.devices[server]), unless_gone():
                tf.raw_ops.DestroyResourceOp(resource=queue)
        self._queues = {}

    def state(self, site: str, server: int, make: Callable, initial, part: slice):
        """Returns the state of a server at a call site.

        Args:
            site: Name of the call site.
            server: Index of the server.
            make: Function that returns it, of its first value.
            initial: Function that returns the first value where none is inherited.
            part: The elements of the vector that the server serves.
        """
        if (site, server) not in self._states:
            with tf.init_scope(), tf.device(self.devices[server]):
                value = initial()
                if site in self._inherited:
                    leaves = [whole[part] for whole in self._inherited[site]]
                    value = tf.nest.pack_sequence_as(value, leaves)
                self._states[site, server] = make(value)
                self._parts[site, server] = part
        return self._states[site, server]

    def whole_states(
        self, step: int, told: dict[str, np.ndarray]
    ) -> dict[str, list[np.ndarray]]:
        """Returns the states at each call site, of all servers together.

        Args:
            step: The number of steps that the workers have committed.
            told: What the transport keeps as `told` on a worker, by call sites.
        """
        return {site: self.whole_state(site, step, told) for site, _ in self._states}

    def whole_state(
        self, site: str, step: int, told: dict[str, np.ndarray]
    ) -> list[np.ndarray]:
        """Returns the vectors of the state at one call site; see `whole_states`."""
        parts = []
        for server, device in enumerate(self.devices):
            if (site, server) in self._states:
                with tf.device(device):
                    state = self._states[site, server]
                    parts.append(state.leaves(step, told.get(site)))
        return [np.concatenate(leaf) for leaf in zip(*parts, strict=True)]

    def restore(self, site: str, index: int, whole: np.ndarray) -> None:
        """Takes over one of the vectors that `whole_states` returned, between steps."""
        for (of, server), state in self._states.items():
            if of == site:
                with tf.device(self.devices[server]):
                    state.restore(index, whole[self._parts[of, server]])

    def _queue(self, *key):
        if key not in self._queues:
            with tf.init_scope(), tf.device(self.devices[key[2]]):
                self._queues[key] = tf.raw_ops.FIFOQueueV2(
                    component_types=[tf.int32],
                    shared_name="/".join(map(str, (self.name, *key))),
                )
        return self._queues[key]


class ServerCollectives(Collectives):
    """One worker's view of a `Rendezvous`.

    Attributes:
        rendezvous: Where the workers meet.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int):
        self.join(rendezvous, rank)

    def join(self, rendezvous: Rendezvous, rank: int) -> None:
        """Goes over to another rendezvous; what was traced stays with the old one."""
        self.rendezvous = rendezvous
        self.num_workers = rendezvous.num_workers
        self.place = (rank, rendezvous.num_workers)

    @property
    @override
    def rank(self):
        return self.place[0]

    def moved(self, call):
        """See `Collectives.moved`: to the servers, once."""
        return call.words

    @override
    def gather(self, vector, site):
        return self._combined("gather", lambda rows: rows, vector, site)

    @override
    def sum(self, vector, site):
        return self._combined(
            "sum", lambda rows: tf.add_n(tf.unstack(rows)), vector, site
        )

    @override
    def max(self, vector, site):
        return self._combined(
            "max", lambda rows: tf.reduce_max(rows, axis=0), vector, site
        )

    def _combined(self, kind, combine, vector, site):
        """Each server combines a part of the vectors of 32-bit numbers."""
        size = vector.shape[0]
        width = -(-size // len(self.rendezvous.devices))
        parts = [vector[begin : begin + width] for begin in range(0, size, width)]
        messages = [tf.bitcast(part, tf.int32) for part in parts]

        def answer(server, rows):
            combined = combine(tf.bitcast(rows, vector.dtype))
            return tf.reshape(tf.bitcast(combined, tf.int32), [-1])

        words = tuple(part.shape[0] for part in parts)
        times = self.num_workers if kind == "gather" else 1
        declared = Site(words, answer, tuple(times * count for count in words))
        replies = self.rendezvous.ask(f"{kind}/{site}", declared, self.rank, messages)
        shape = [self.num_workers, -1] if kind == "gather" else [-1]
        replies = [tf.reshape(reply, shape) for reply in replies]
        return tf.bitcast(tf.concat(replies, -1), vector.dtype)


class ParameterServer(Transport):
    """Each parameter server serves its own part of the vector.

    What cannot be cut in parts is served by the first of them.
    """

    carries = "messages of one size"

    def can_carry(self, compressor, server, layout):
        """Messages must be equally long in each step."""
        return not messages.varies(compressor.fields(layout))

    def init_server(self, compressor, server, layout):
        """The state is on the servers, but for what they have to be told."""
        told = self._cut(compressor, server, layout).told
        return {"told": tf.zeros([messages.message_words(told)])} if told else ()

    @override
    def exchange(
        self, payload, compressor, server, server_state, layout, context, status, site
    ):
        rendezvous, num_workers = self.collectives.rendezvous, context.num_workers
        cut = self._cut(compressor, server, layout)
        told = tf.zeros([0], tf.int32)
        if cut.told:
            told = tf.bitcast(server_state["told"], tf.int32)
        sizes = HEAD, told.shape[0]
        head = tf.concat([head_of(status, context), told], 0)
        messages = [tf.concat([head, part], 0) for part in cut.messages(payload)]

        def answer(index, rows):
            heads, tellings, words = tf.split(rows, [*sizes, cut.sent[index]], 1)
            statuses, there = read_head(heads, context)
            state = rendezvous.state(
                *(site, index, functools.partial(cut.state, index, context)),
                *(functools.partial(cut.init, index), cut.part(index)),
            )
            reply = state.next(there, words, tellings[0])
            return tf.concat([statuses, reply], 0)

        declared = Site(
            tuple(message.shape[0] for message in messages),
            answer,
            tuple(num_workers + words for words in cut.replied),
        )
        replies = rendezvous.ask(
            f"exchange/{site}", declared, self.collectives.rank, messages
        )
        reply = cut.reply([reply[num_workers:] for reply in replies])
        if cut.told:
            told = messages.pack(reply, cut.told)
            server_state = {"told": tf.bitcast(told, tf.float32)}
        update = server.decompress(reply, layout, num_workers)
        return Outcome(update, server_state, replies[0][:num_workers])

    def _cut(self, compressor, server, layout):
        servers = len(self.collectives.rendezvous.devices)
        return cut_of(compressor, server, layout, self.collectives.num_workers, servers)

    def calls(self, compressor, server, layout):
        """See `Transport.calls`: there are none."""
        return []

    @override
    def words(self, compressor, server, layout):
        cut = self._cut(compressor, server, layout)
        head = HEAD + messages.message_words(cut.told)
        workers, servers = self.collectives.num_workers, len(cut.replied)
        return Words(
            sent=servers * head + sum(cut.sent),
            received=servers * workers + sum(cut.replied),
        )


class ServerState:
    """A server's state after the last round, and before it.

    Workers may fail to commit a round that the server has replied to. The step of
    the next messages tells: one that was committed is never seen again.

    Args:
        combine: Maps the workers' words, a state and the step's context to the words
            of the reply and the next state.
        initial: The first state.
    """

    def __init__(self, combine: Callable, initial: State):
        self._combine = combine
        self._before, self._after = _variables(initial), _variables(initial)
        self._step = tf.Variable(tf.constant(-1, tf.int64))

    def next(self, context: Context, words: tf.Tensor, told: tf.Tensor) -> tf.Tensor:
        """Returns the reply of a round."""
        held = tf.nest.map_structure(
            lambda before, after: tf.where(context.step > self._step, after, before),
            *(self._before, self._after),
        )
        reply, state = self._combine(words, held, context)
        _assign(self._before, held)
        _assign(self._after, state)
        self._step.assign(context.step)
        return reply

    def follow(
        self, context: Context, words: tf.Tensor, is_valid: tf.Tensor
    ) -> tf.Tensor:
        """Returns the reply of a round that is committed where it is valid."""
        held = tf.nest.map_structure(tf.convert_to_tensor, self._after)
        reply, state = self._combine(words, held, context)
        chosen = tf.nest.map_structure(
            lambda old, new: tf.where(is_valid, new, old), held, state
        )
        _assign(self._after, chosen)
        return reply

    def leaves(self, step: int, told: np.ndarray | None) -> list[np.ndarray]:
        """Returns the vectors of the state that the messages of `step` will meet."""
        is_after = step > self._step.numpy()
        leaves = tf.nest.flatten(self._after if is_after else self._before)
        return [leaf.numpy() for leaf in leaves]

    def restore(self, index: int, vector: np.ndarray) -> None:
        """Takes over a vector of the state, as that before any step."""
        for state in (self._before, self._after):
            tf.nest.flatten(state)[index].assign(vector)
        self._step.assign(-1)


class WaitingState:
    """A server's state before the last round, and what the next follows from.

    That is what the server got and replied in that round, and what the workers tell
    it with their next messages: what all servers replied.

    Args:
        combine: As in `ServerState`; its next state counts for nothing.
        settle: Maps the workers' words, the reply, what they told, the state before
            and the round's context to the state after it.
        initial: The first state.
        sizes: Shapes of the workers' words and of the reply.
        context: Says what is the same in all steps.
    """

    def __init__(self, combine, settle, initial, sizes, context):
        self._combine, self._settle, self._context = combine, settle, context
        self._before = _variables(initial)
        self._words, self._reply = (
            tf.Variable(tf.zeros(size, tf.int32)) for size in sizes
        )
        # With a learning rate of 0 no state changes.
        self._rates = tf.Variable([0.0, 0.0])
        self._step = tf.Variable(tf.constant(-1, tf.int64))

    def next(self, context: Context, words: tf.Tensor, told: tf.Tensor) -> tf.Tensor:
        """Returns the reply of a round."""
        held = self._held(context.step, told)
        reply, _ = self._combine(words, held, context)
        _assign(self._before, held)
        self._words.assign(words)
        self._reply.assign(reply)
        rates = context.learning_rate, context.previous_learning_rate
        self._rates.assign(tf.stack(rates))
        self._step.assign(context.step)
        return reply

    @override
    def leaves(self, step: int, told: np.ndarray) -> list[np.ndarray]:
        words = tf.bitcast(tf.constant(told), tf.int32)
        held = self._held(tf.constant(step, tf.int64), words)
        return [leaf.numpy() for leaf in tf.nest.flatten(held)]

    @override
    def restore(self, index: int, vector: np.ndarray) -> None:
        tf.nest.flatten(self._before)[index].assign(vector)
        self._rates.assign([0.0, 0.0])
        self._step.assign(-1)

    def _held(self, step, told):
        rate, previous = tf.unstack(tf.convert_to_tensor(self._rates))
        context = self._context.at_server()._replace(
            learning_rate=rate, previous_learning_rate=previous
        )
        before = tf.nest.map_structure(tf.convert_to_tensor, self._before)
        words, reply = (
            tf.convert_to_tensor(variable) for variable in (self._words, self._reply)
        )
        return tf.cond(
            step > self._step,
            lambda: self._settle(words, reply, told, before, context),
            lambda: before,
        )


def _variables(nest):
    return tf.nest.map_structure(tf.Variable, nest)


def _assign(variables, values):
    tf.nest.map_structure(
        lambda variable, value: variable.assign(value), variables, values
    )


@contextlib.contextmanager
def unless_gone():
    """Passes over what cannot be done where a server is gone."""
    with contextlib.suppress(tf.errors.UnavailableError, tf.errors.AbortedError):
        yield


def head_of(status: tf.Tensor, context: Context) -> tf.Tensor:
    """Returns the words that every message begins with, int32 `[HEAD]`."""
    return tf.concat(
        [
            status[tf.newaxis],
            tf.bitcast(context.step, tf.int32),
            tf.bitcast(context.seed, tf.int32),
            tf.bitcast(context.learning_rate, tf.int32)[tf.newaxis],
            tf.bitcast(context.previous_learning_rate, tf.int32)[tf.newaxis],
        ],
        0,
    )


def read_head(heads: tf.Tensor, context: Context):
    """Returns the workers' statuses, and the first one's context for the server.

    Args:
        heads: What `head_of` returned on each worker, int32 `[N, HEAD]`.
        context: Says what is the same in all steps.
    """
    first = heads[0]
    return heads[:, 0], context.at_server()._replace(
        step=tf.bitcast(first[1:3], tf.int64),
        seed=tf.bitcast(first[3:5], tf.int64),
        learning_rate=tf.bitcast(first[5], tf.float32),
        previous_learning_rate=tf.bitcast(first[6], tf.float32),
    )


class Whole:
    """All of the vector, on the first server.

    Attributes:
        sent: Words of a payload for each server.
        replied: Words of each server's reply.
        told: What of the reply servers must be told for their states, as fields.
    """

    told: ClassVar[dict[str, Field]] = {}

    def __init__(self, compressor, server, layout, num_workers):
        self._server, self._layout = server, layout
        self._fields = compressor.fields(layout)
        self._reply_fields = server.reply_fields(layout, num_workers)
        self.sent = (messages.message_words(self._fields),)
        self.replied = (messages.message_words(self._reply_fields),)

    def messages(self, payload):
        """Returns the words for each server."""
        return [messages.pack(payload, self._fields)]

    def part(self, index):
        """Returns the elements that a server serves."""
        return slice(0, self._layout.size)

    def init(self, index):
        """Returns the first value of a server's state."""
        return self._server.init(self._layout)

    def state(self, index, context, initial):
        """Returns a server's state."""
        return ServerState(functools.partial(self.combine, index), initial)

    def reply(self, replies):
        """Returns the fields of the whole reply, of the words of all servers."""
        return messages.unpack(replies[0], self._reply_fields)

    def combine(self, index, rows, state, context):
        """Returns a server's reply to the workers' words, and its next state."""
        payloads = messages.unpack(rows, self._fields)
        blocks = Layout(self._layout.row_splits)
        reply, state = self._server.combine(payloads, state, blocks, context)
        return messages.pack(reply, self._reply_fields), state


class InParts:
    """SplitVector of the vector that servers can serve by themselves; see `Whole`."""

    def __init__(self, compressor, server, layout, num_workers, servers):
        self._compressor, self._server, self._layout = compressor, server, layout
        self._num_workers = num_workers
        self._shards = Shards(compressor, server, layout, num_workers, servers)
        self._used = sum(shard.size > 0 for shard in self._shards)
        self.sent = self._used * (messages.message_words(self._shards.payload_fields),)
        self.replied = self._used * (messages.message_words(self._shards.reply_fields),)
        self.told = {}
        if waits(server):
            fields = server.reply_fields(layout, num_workers)
            self.told = {n: f for n, f in fields.items() if f.per != "element"}

    @override
    def messages(self, payload):
        rows = self._shards.cut(payload)
        words = messages.pack(rows, self._shards.payload_fields)
        return tf.unstack(words[: self._used])

    @override
    def part(self, index):
        return slice(self._shards[index].begin, self._shards[index].end)

    @override
    def init(self, index):
        return self._server.init(self._shards[index].layout)

    @override
    def state(self, index, context, initial):
        combine = functools.partial(self.combine, index)
        if not self.told:
            return ServerState(combine, initial)
        settle = functools.partial(self._settle, index)
        sizes = [self._num_workers, self.sent[index]], [self.replied[index]]
        return WaitingState(combine, settle, initial, sizes, context)

    @override
    def reply(self, replies):
        unused = len(self._shards) - self._used
        rows = tf.pad(tf.stack(replies), [[0, unused], [0, 0]])
        return self._server.reply_of(self._shards.join(rows), self._layout)

    @override
    def combine(self, index, rows, state, context):
        shard, payloads, context = self._own(index, rows, context)
        part, state = self._server.combine_shard(payloads, state, shard, context)
        return self._shards.message(part), state

    def _settle(self, index, rows, reply, told, state, context):
        shard, payloads, context = self._own(index, rows, context)
        fields = self._server.shard_fields(shard, self._num_workers)
        part = self._shards.part_of(reply, fields)
        whole = messages.unpack(told, self.told)
        return self._server.settle(payloads, part, whole, state, shard, context)

    def _own(self, index, rows, context):
        shard = self._shards[index]
        payloads = self._shards.held(rows, self._compressor.fields(shard.layout))
        return shard, payloads, context._replace(offset=context.offset + shard.begin)


def waits(server: Server) -> bool:
    """Returns whether a shard's state depends on what all shards reply."""
    return type(server).settle is not Server.settle


@functools.lru_cache(maxsize=64)
def cut_of(
    compressor: Compressor,
    server: Server,
    layout: Layout,
    num_workers: int,
    servers: int,
) -> Whole | InParts:
    """Returns how payloads and replies are cut for a number of servers."""
    fields = compressor.fields(layout).values()
    can_be_cut = server.unit(layout) is not None and all(f.per for f in fields)
    if servers == 1 or not can_be_cut:
        return Whole(compressor, server, layout, num_workers)
    return InParts(compressor, server, layout, num_workers, servers)
