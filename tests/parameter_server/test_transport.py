"""Parameter servers in one process: replies, states and divisions of vectors."""

import threading
import uuid

import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import bits, make_context
from tests.methods import ROWS
from tests.pairwise import parametrize_pairwise
from tests.parameter_server.in_process import start_threads
from tests.selection import rows_in_turns, select
from tests.transports.test_transports import LAYOUTS
from tfgradcomp.collectives import CollectiveCall
from tfgradcomp.compressors import ScaledSign, Strom
from tfgradcomp.core import Layout
from tfgradcomp.core.waiting_elements import WaitingElements
from tfgradcomp.methods import Method
from tfgradcomp.parameter_server.channel import RoundChannel
from tfgradcomp.parameter_server.division import Relay, WholeVector, division_for
from tfgradcomp.parameter_server.transport import ParameterServer
from tfgradcomp.servers import Recompress, Requantize
from tfgradcomp.testing.exchanges import flag_of, moments_of, run
from tfgradcomp.transports import DirectExchange
from tfgradcomp.transports.sharding import Sharding

WORKERS, STEPS = 3, 3


class Cluster:
    """Workers and servers on this process' CPU."""

    def __init__(self, num_servers, method, layout, states=None, waiting=None):
        self.layout = layout
        self.channel = RoundChannel(
            uuid.uuid4().hex, ["CPU:0"] * num_servers, WORKERS, states or {}
        )
        self.routes = [
            ParameterServer.at(self.channel, rank).bind(method, layout, "site")
            for rank in range(WORKERS)
        ]
        if waiting:
            self.routes = [route.without(waiting) for route in self.routes]
        route = self.routes[0]
        # A worker's states: of its compressor, and of the route.
        own = route.method.compressor.init(layout)
        self.states = [(own, route.init_state())] * WORKERS
        self.words = [[] for _ in range(WORKERS)]
        self.steps = [self._step(rank) for rank in range(WORKERS)]
        self.serves = [self.channel.serve(k) for k in range(num_servers)]
        self.rngs = [np.random.default_rng(rank) for rank in range(WORKERS)]

    def _step(self, rank):
        route = self.routes[rank]

        def step(x, moments, number, previous_rate, flag, *state):
            state, kept = tf.nest.pack_sequence_as(self.states[rank], state)
            context = make_context(
                number, 4, rank, WORKERS, previous_rate=previous_rate, moments=moments
            )
            (payload, state, _), context = route.compress(x, state, kept, context)
            update, kept, flags, words = route.exchange(payload, kept, context, flag)
            if tf.executing_eagerly():
                self.words[rank].append(int(words))
            # Joins a vector that is split into parts.
            return tf.convert_to_tensor(update), flags, state, kept

        # Tracing declares the servers' endpoints. Steps run eagerly, like a direct
        # exchange, because a graph may fuse products and round differently.
        tf.function(step, autograph=False).get_concrete_function(
            tf.TensorSpec([self.layout.size]),
            tf.TensorSpec([self.layout.size]),
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([]),
            tf.TensorSpec([], tf.int32),
            *(
                tf.TensorSpec(leaf.shape, leaf.dtype)
                for leaf in tf.nest.flatten(self.states[rank])
            ),
        )
        return step

    def round(self, number):
        """Takes a step of all workers; returns their updates and flags."""

        def take(rank):
            x = tf.constant(self.rngs[rank].normal(size=self.layout.size), tf.float32)
            update, flags, *state = self.steps[rank](
                x,
                moments_of(x, rank, number),
                tf.constant(number, tf.int64),
                tf.constant(0.1 if number else 0.0),
                tf.constant(flag_of(rank, number)),
                *tf.nest.flatten(self.states[rank]),
            )
            self.states[rank] = tuple(state)
            return update.numpy(), flags.numpy()

        takes = [lambda rank=rank: take(rank) for rank in range(WORKERS)]
        serves = [lambda s=s: s(tf.constant(1)) for s in self.serves]
        return start_threads([*takes, *serves])()[:WORKERS]

    def whole_states(self, step):
        """The servers' states after `step` committed steps."""
        (_, kept), *_ = self.states
        arrays = tf.nest.map_structure(lambda tensor: tensor.numpy(), kept)
        return self.channel.states.whole(step, {"site": arrays}).get("site", [])


# The tests of transports compare the server's results on shards for each row.
@pytest.mark.sample(2, "-TernGrad")
@rows_in_turns(
    "num_servers",
    [1, 2, 3],
    lambda row: not row.method.needs_whole_tensors,
    lambda row: row.wire_kinds,
    # Only one row of variable length is quick.
    lambda row: row.variable_length and row.name != "VarianceBased",
)
def test_servers_give_the_bits_of_a_direct_exchange(num_servers, row):
    follows_a_direct_exchange(num_servers, row.method)


def test_servers_round_residuals_as_a_direct_exchange_does():
    # A server rounds one round later, when it has the whole reply.
    wrapper = tfgradcomp.DistEFBlockSGD("sgd", residual_dtype="bfloat16")
    follows_a_direct_exchange(2, wrapper.method)


def follows_a_direct_exchange(num_servers, method):
    layout = LAYOUTS["long"]
    direct = run(WORKERS, DirectExchange, method, layout)[0].steps
    cluster = Cluster(num_servers, method, layout)
    for number, (expected, held) in enumerate(direct):
        flags = [flag_of(rank, number) for rank in range(WORKERS)]
        for update, seen in cluster.round(number):
            assert bits(update) == bits(expected), number
            np.testing.assert_array_equal(seen, flags)
        wholes = cluster.whole_states(number + 1)
        assert [bits(whole) for whole in wholes] == [bits(vector) for vector in held]


# A field of variable length after fixed fields; a first round; a deferred reply.
@pytest.mark.parametrize(
    "name",
    [
        "VarianceBased",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("TernGrad", "DistEFSGD")),
    ],
)
def test_messages_have_the_declared_and_variable_words(name):
    cluster = Cluster(2, ROWS[name].method, LAYOUTS["buckets"])
    queues, up, down = cluster.channel.queues, [], []
    enqueue, dequeue = queues.enqueue, queues.dequeue

    def enqueued(key, message):
        if key.peer == 1 and key.direction == "up":
            up.append(message.shape[0])
        return enqueue(key, message)

    def dequeued(key, words=None):
        message = dequeue(key, words)
        if key.peer == 1 and key.direction == "down":
            down.append(message.shape[0])
        return message

    queues.enqueue, queues.dequeue = enqueued, dequeued
    for number in range(2):
        cluster.round(number)
    sent, received = (2 * words for words in cluster.routes[1].words)
    varied = np.sum(cluster.words, axis=1)
    assert (varied > 0).all() == ROWS[name].variable_length
    own, mean = (
        CollectiveCall("gather", varied[1]),
        CollectiveCall("gather", np.mean(varied)),
    )
    collectives = cluster.routes[1].collectives
    assert sum(up) == sent + collectives.words_sent(own)
    assert sum(down) == received + collectives.words_received(mean)


def test_a_server_state_needs_messages_of_fixed_size():
    method = Method(Strom(0.5), Recompress(ScaledSign()))
    with pytest.raises(ValueError, match="ParameterServer cannot carry.*variable size"):
        Cluster(1, method, LAYOUTS["ragged"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_an_uncommitted_round_changes_no_state(num_servers):
    method, layout = ROWS["DistEFSGD"].method, LAYOUTS["long"]
    cluster = Cluster(num_servers, method, layout)
    cluster.round(0)
    rngs = [rng.bit_generator.state for rng in cluster.rngs]
    kept = list(cluster.states)
    lost = cluster.round(1)
    # The workers repeat the round, also on other servers that received the state.
    cluster.states = list(kept)
    heir = Cluster(3, method, layout, {"site": cluster.whole_states(1)})
    heir.states = [
        (state, own) for (state, _), (_, own) in zip(kept, heir.states, strict=True)
    ]
    direct = run(WORKERS, DirectExchange, method, layout, steps=3)[0].steps
    for again in (cluster, heir):
        for rng, state in zip(again.rngs, rngs, strict=True):
            rng.bit_generator.state = state
        for (update, _), (expected, _) in zip(again.round(1), lost, strict=True):
            assert bits(update) == bits(expected) == bits(direct[1][0])
        for update, _ in again.round(2):
            assert bits(update) == bits(direct[2][0])
        (whole,) = again.whole_states(3)
        assert bits(whole) == bits(direct[2][1][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_servers", "name"), [(1, "DistEFBlockSGDM"), (3, "DistEFSGD")]
)
def test_a_server_leaves_what_has_no_gradient(num_servers, name):
    sizes = 300, 500, 1300
    method, layout = ROWS[name].method, Layout.from_sizes(sizes, None)
    waiting = WaitingElements(
        [(0, 300, False), (300, 800, True), (800, 2100, False)], ""
    )
    first = Cluster(num_servers, method, layout)
    first.round(0)
    before = first.whole_states(1)
    heirs = [
        Cluster(num_servers, method, layout, {"site": before}, selection)
        for selection in (waiting, None)
    ]
    for heir in heirs:
        heir.states = [
            (state, own)
            for (state, _), (_, own) in zip(first.states, heir.states, strict=True)
        ]
    updates = [[heir.round(number)[0][0] for number in (1, 2)] for heir in heirs]
    (old,), (new,), (other,) = before, *(heir.whole_states(3) for heir in heirs)
    assert np.abs(old[300:800]).max() > 0
    np.testing.assert_array_equal(new[300:800], old[300:800])
    for part in (slice(0, 300), slice(800, 2100)):
        np.testing.assert_array_equal(new[part], other[part])
        assert np.all(new[part] != old[part])
        for one, another in zip(*updates, strict=True):
            np.testing.assert_array_equal(one[part], another[part])


def test_closed_queues_end_the_round_for_all_tasks():
    cluster = Cluster(2, ROWS["TernGrad"].method, LAYOUTS["ragged"])
    ended = []

    def attempt(function, *arguments):
        try:
            function(*arguments)
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError) as error:
            ended.append(str(error))

    arguments = [
        *2 * [tf.zeros([cluster.layout.size])],
        tf.constant(0, tf.int64),
        tf.constant(0.0),
        tf.constant(0),
    ]
    # The third worker never comes.
    calls = [(cluster.steps[rank], *arguments) for rank in (0, 1)]
    calls += [(serve, tf.constant(1)) for serve in cluster.serves]
    threads = [
        threading.Thread(target=attempt, args=call, daemon=True) for call in calls
    ]
    for thread in threads:
        thread.start()
    cluster.channel.queues.close("up")
    for thread in threads[2:]:
        thread.join(60)
    cluster.channel.queues.close("down")
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(ended) == 4
    assert all("is closed" in text for text in ended)
    cluster.channel.queues.free()


@pytest.mark.parametrize(
    ("name", "workers", "kind"),
    [
        ("Strom", 64, Relay),
        # A tenth of the elements in two words each, or all elements in one word each.
        ("CompressedOptimizer, top-k", 4, Relay),
        ("CompressedOptimizer, top-k", 5, WholeVector),
        # One bit per element in a payload, a float32 in the reply.
        ("ScaledSign", 31, Relay),
        ("ScaledSign", 32, Sharding),
        # A reply in the base of the sum; a server with a state.
        ("TernGrad", 2, Sharding),
        ("DistEFSGD", 2, Sharding),
    ],
)
def test_payloads_are_relayed_if_the_reply_would_be_longer(name, workers, kind):
    layout = Layout.from_sizes([100_000])
    assert type(division_for(ROWS[name].method, layout, workers, 2)) is kind


# Requantized vectors are cut between blocks, and this layout has large blocks.
@parametrize_pairwise(
    row=select(
        lambda row: "sharded" in row.transports and type(row.server) is not Requantize,
        by=lambda row: type(row.server),
    ),
    num_servers=[2, 3, 4],
    workers=[2, 3, 4],
)
def test_servers_serve_equal_parts(row, num_servers, workers):
    method = row.method.fused()
    layout = Layout.from_sizes([20_000_000, 5, 5_000_000])
    sharding = Sharding(method, layout, workers, num_servers)
    parts = [sharding.owned_range(index) for index in range(num_servers)]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, layout.size)
    sizes = [len(part) for part in parts]
    assert max(sizes) <= 1.05 * layout.size / num_servers
    assert min(sizes) >= 0.95 * layout.size / num_servers
