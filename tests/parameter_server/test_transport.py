"""Parameter servers in one process: what arrives, what they hold, what moves."""

import threading
import uuid

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits, make_context
from tests.transports.test_transports import LAYOUTS, METHODS, run, status_of
from tfgradcomp import servers
from tfgradcomp.compressors import Layout
from tfgradcomp.parameter_server.transport import cut_of
from tfgradcomp.transports import DirectExchange, Loopback, ParameterServer, Rendezvous
from tfgradcomp.transports import ServerCollectives as Place

WORKERS, STEPS = 3, 3


def in_threads(functions):
    """Runs functions at once; returns what they return."""
    results = [None] * len(functions)

    def call(index):
        results[index] = functions[index]()

    threads = [
        threading.Thread(target=call, args=(i,), daemon=True)
        for i in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "hung"
    return results


class Cluster:
    """Workers and servers on this process' CPU."""

    def __init__(self, num_servers, method, layout, states=None):
        self.compressor, self.server = method[0], servers.fused(method[1])
        self.layout = layout
        self.rendezvous = Rendezvous(
            uuid.uuid4().hex, ["CPU:0"] * num_servers, WORKERS, states or {}
        )
        # Of a worker: its compressor's, and what the transport keeps there.
        carrier = ParameterServer(Place(self.rendezvous, 0))
        kept = carrier.init_server(self.compressor, self.server, layout)
        self.states = [(self.compressor.init(layout), kept)] * WORKERS
        self.steps = [self._step(rank) for rank in range(WORKERS)]
        self.serves = [self.rendezvous.serve(k) for k in range(num_servers)]
        self.rngs = [np.random.default_rng(rank) for rank in range(WORKERS)]

    def _step(self, rank):
        place = Place(self.rendezvous, rank)
        carrier = ParameterServer(place)

        def step(x, number, previous_rate, status, *state):
            state, kept = tf.nest.pack_sequence_as(self.states[rank], state)
            context = make_context(
                *(number, 4, rank, WORKERS),
                previous_rate=previous_rate,
                maximum=lambda vector: place.max(vector, "agreed"),
            )
            payload, state = self.compressor.compress(x, state, self.layout, context)
            update, kept, statuses, _ = carrier.exchange(
                payload,
                *(self.compressor, self.server, kept, self.layout, context),
                *(status, "site"),
            )
            # The flat vector, where it is the parts of one.
            return tf.convert_to_tensor(update), statuses, state, kept

        # Tracing declares what is to be served; a step itself runs eagerly, as a direct
        # exchange does: a graph may join products, and round them otherwise.
        tf.function(step, autograph=False).get_concrete_function(
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
        """A step of all; what each worker decoded, and the statuses."""

        def take(rank):
            x = self.rngs[rank].normal(size=self.layout.size)
            update, statuses, *state = self.steps[rank](
                tf.constant(x, tf.float32),
                tf.constant(number, tf.int64),
                tf.constant(0.1 if number else 0.0),
                tf.constant(status_of(rank, number)),
                *tf.nest.flatten(self.states[rank]),
            )
            self.states[rank] = tuple(state)
            return update.numpy(), statuses.numpy()

        takes = [lambda rank=rank: take(rank) for rank in range(WORKERS)]
        serves = [lambda s=s: s(tf.constant(1)) for s in self.serves]
        return in_threads([*takes, *serves])[:WORKERS]

    def whole_states(self, step):
        """What the servers hold after `step` steps that the workers committed."""
        (_, kept), *_ = self.states
        told = {"site": kept["told"].numpy()} if kept else {}
        return self.rendezvous.whole_states(step, told).get("site", [])


# Messages whose size varies go another way.
SERVED = {
    name: method
    for name, method in METHODS.items()
    if ParameterServer(Loopback(1).collectives(0)).can_carry(*method, LAYOUTS["one"])
}


@pytest.mark.parametrize("method", SERVED.values(), ids=SERVED)
def test_servers_give_the_bits_of_a_direct_exchange(method):
    layout = LAYOUTS["long"]
    direct = run(WORKERS, DirectExchange, method, layout)[0][0]
    cluster = Cluster(2, method, layout)
    for number, (expected, held) in enumerate(direct):
        statuses = [status_of(rank, number) for rank in range(WORKERS)]
        for update, seen in cluster.round(number):
            assert bits(update) == bits(expected), number
            np.testing.assert_array_equal(seen, statuses)
        wholes = cluster.whole_states(number + 1)
        assert [bits(whole) for whole in wholes] == [bits(vector) for vector in held]


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_round_that_nobody_commits_leaves_no_trace(num_servers):
    method, layout = METHODS["dist-EF"], LAYOUTS["long"]
    cluster = Cluster(num_servers, method, layout)
    cluster.round(0)
    rngs = [rng.bit_generator.state for rng in cluster.rngs]
    kept = list(cluster.states)
    lost = cluster.round(1)
    # The workers take it anew, and so do they on other servers that got the state.
    cluster.states = list(kept)
    heir = Cluster(3, method, layout, {"site": cluster.whole_states(1)})
    heir.states = [
        (state, own) for (state, _), (_, own) in zip(kept, heir.states, strict=True)
    ]
    direct = run(WORKERS, DirectExchange, method, layout)[0][0]
    for again in (cluster, heir):
        for rng, state in zip(again.rngs, rngs, strict=True):
            rng.bit_generator.state = state
        for (update, _), (expected, _) in zip(again.round(1), lost, strict=True):
            assert bits(update) == bits(expected) == bits(direct[1][0])
        for update, _ in again.round(2):
            assert bits(update) == bits(direct[2][0])
        (whole,) = again.whole_states(3)
        assert bits(whole) == bits(direct[2][1][0])


def test_closed_queues_end_all_and_no_worker_alone_gets_a_reply():
    cluster = Cluster(2, METHODS["TernGrad"], LAYOUTS["ragged"])
    ended = []

    def attempt(function, *arguments):
        try:
            function(*arguments)
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError) as error:
            ended.append(str(error))

    arguments = [
        tf.zeros([cluster.layout.size]),
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
    cluster.rendezvous.close("up")
    for thread in threads[2:]:
        thread.join(60)
    cluster.rendezvous.close("down")
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(ended) == 4
    assert all("is closed" in text for text in ended)
    cluster.rendezvous.free()


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("num_servers", [2, 3, 4])
@pytest.mark.parametrize("name", ["TernGrad", "signSGD", "dist-EF", "float32"])
def test_servers_serve_equal_parts(name, num_servers, workers):
    method = METHODS[name][0], servers.fused(METHODS[name][1])
    layout = Layout.from_sizes([20_000_000, 5, 5_000_000])
    cut = cut_of(*method, layout, workers, num_servers)
    parts = [cut.part(index) for index in range(num_servers)]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, layout.size)
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) <= 1.05 * layout.size / num_servers
    assert min(sizes) >= 0.95 * layout.size / num_servers
