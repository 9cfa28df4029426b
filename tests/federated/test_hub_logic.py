"""Membership, rounds and refusals, message by message."""

import numpy as np
import pytest

from tests.federated.harness import SHAPES, SIZE, STATISTICS, description_of
from tfgradcomp import methods
from tfgradcomp.compressors import Identity
from tfgradcomp.federated import codec
from tfgradcomp.federated.anchor import Anchor, OuterStep
from tfgradcomp.federated.bound_method import BoundMethod
from tfgradcomp.federated.codec import MessageError
from tfgradcomp.federated.hub_logic import HubLogic
from tfgradcomp.federated.rounds import Rules
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean

FLOAT32 = Method(Identity(), Mean())
ONE_BIT = methods.dist_ef_block_sgd()
FIRST = Anchor.first(
    np.linspace(-1, 1, SIZE, dtype=np.float32),
    np.zeros(STATISTICS, np.float32),
    OuterStep(),
)


class Hub:
    """A hub's logic, its disk, and the payloads of its clients."""

    def __init__(self, method=FLOAT32, by_examples=False, outer=None, **rules):
        self.arguments = method, by_examples, outer or OuterStep()
        self.rules = Rules(**{"rounds": 100, "deadline": 10.0, **rules})
        self.bound = BoundMethod(method, SHAPES, by_examples)
        self.lives, self.states, self.sequences = {}, {}, {}
        self.start()

    def start(self, saved=None):
        method, by_examples, outer = self.arguments
        bound = BoundMethod(method, SHAPES, by_examples)
        description = description_of(method)
        first = Anchor.first(FIRST.weights, FIRST.statistics, outer)
        arguments = bound, description, first, outer, self.rules
        self.logic = HubLogic(*arguments, saved=saved)

    def restart(self):
        self.start(self.logic.kept.to_files())

    def join(self, name, now=0.0, connection=None, **changes):
        new = {"training": "", "life": 0, "round": -1, "digest": 0, "token": 1}
        described = description_of(self.arguments[0])._asdict()
        hello = codec.Hello(**described, name=name, **new)
        return self.logic.receive(connection or name, hello._replace(**changes), now)

    def come(self, *names, now=0.0):
        for name in names:
            (_, welcome), *_ = self.join(name, now)
            self.lives[name], self.sequences[name] = welcome.life, 0
            self.states[name] = self.bound.client_state()

    def push(self, name, delta, now=1.0, examples=1.0, statistics=None, payload=None):
        self.sequences[name] += 1
        step = self.sequences[name]
        done = self.bound.compress(
            np.asarray(delta, np.float32), self.states[name], step, 0
        )
        self.states[name] = done.state
        if statistics is None:
            statistics = np.zeros(STATISTICS)
        push = codec.Push(
            self.lives[name],
            step,
            examples,
            done.payload if payload is None else payload,
            np.asarray(statistics, "<f4").tobytes(),
        )
        self.last = push
        return self.logic.receive(name, push, now)


def kinds(outgoing):
    return [(connection, type(message).__name__) for connection, message in outgoing]


def random_deltas(count, seed=0):
    return np.random.default_rng(seed).normal(size=[count, SIZE]).astype(np.float32)


def test_a_round_closes_when_all_have_come_and_is_their_mean():
    hub, (a, b) = Hub(), random_deltas(2)
    hub.come("lima", "oslo")
    assert hub.push("oslo", b) == []
    outgoing = hub.push("lima", a)
    assert kinds(outgoing) == [("lima", "Reply"), ("oslo", "Reply")]
    np.testing.assert_array_equal(hub.logic.anchor.weights, FIRST.weights - (a + b) / 2)
    assert [message.settled for _, message in outgoing] == [1, 1]
    assert hub.logic.history[0].counted == ("lima", "oslo")


def test_weights_and_statistics_follow_the_numbers_of_examples():
    hub, (a, b) = Hub(by_examples=True), random_deltas(2)
    hub.come("lima", "oslo")
    hub.push("lima", a, examples=30.0, statistics=[1.0, 2.0])
    hub.push("oslo", b, examples=10.0, statistics=[5.0, 10.0])
    expected = FIRST.weights - (30 * a.astype(float) + 10 * b) / 40
    np.testing.assert_allclose(hub.logic.anchor.weights, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(hub.logic.anchor.statistics, [2.0, 4.0])


@pytest.mark.parametrize("nesterov", [False, True])
def test_outer_momentum_follows_its_formula(nesterov):
    outer = OuterStep(0.5, 0.9, nesterov)
    hub, deltas = Hub(outer=outer), random_deltas(3)
    hub.come("lima")
    x, v = FIRST.weights.astype(float), 0.0
    for delta in deltas:
        hub.push("lima", delta)
        v = 0.9 * v + delta
        x = x - 0.5 * (delta + 0.9 * v if nesterov else v)
    np.testing.assert_allclose(hub.logic.anchor.weights, x, rtol=1e-5, atol=1e-6)


def test_the_order_of_arrival_does_not_change_the_bits():
    deltas, digests = random_deltas(3), set()
    for order in ([0, 1, 2], [2, 0, 1]):
        hub = Hub(ONE_BIT)
        hub.come("lima", "oslo", "pune")
        for _ in range(3):
            for i in order:
                hub.push(["lima", "oslo", "pune"][i], deltas[i])
        digests.add(hub.logic.anchor.digest)
    assert len(digests) == 1


def test_a_straggler_is_named_and_carried_to_the_next_round():
    hub, deltas = Hub(), random_deltas(4)
    hub.come("lima", "oslo", "pune")
    hub.push("lima", deltas[0], now=1.0)
    hub.push("oslo", deltas[1], now=2.0)
    assert hub.logic.tick(9.9) == []
    assert kinds(hub.logic.tick(10.0)) == [(n, "Reply") for n in hub.lives]
    assert hub.logic.history[0].carried == ("pune",)
    # Nobody waits for it in the next round; what comes late counts there.
    hub.push("pune", deltas[2], now=11.0)
    hub.push("lima", deltas[3], now=12.0)
    hub.push("oslo", deltas[0], now=13.0)
    assert hub.logic.history[1].counted == ("lima", "oslo", "pune")


def test_one_silent_client_costs_one_deadline():
    hub, delta = Hub(), random_deltas(1)[0]
    hub.come("lima", "pune")
    hub.push("lima", delta, now=1.0)
    hub.logic.tick(10.0)
    for now in (11.0, 12.0, 13.0):
        hub.push("lima", delta, now=now)
    assert hub.logic.anchor.round == 4


def test_a_round_waits_for_its_quorum_beyond_the_deadline():
    hub, (a, b) = Hub(quorum=2), random_deltas(2)
    hub.come("lima")
    hub.push("lima", a)
    assert hub.logic.tick(100.0) == []
    hub.come("oslo", now=101.0)
    hub.push("oslo", b, now=102.0)
    assert hub.logic.anchor.round == 1


@pytest.mark.parametrize("with_word", [False, True])
def test_a_round_does_not_wait_for_those_who_have_left(with_word):
    hub, (a, _) = Hub(), random_deltas(2)
    hub.come("lima", "oslo")
    hub.push("lima", a)
    if with_word:
        outgoing = hub.logic.receive("oslo", codec.Leave(1), 2.0)
    else:
        outgoing = hub.logic.disconnected("oslo", 2.0)
    assert kinds(outgoing) == [("lima", "Reply")]


def test_doubled_payloads_count_once():
    hub, (a, b) = Hub(), random_deltas(2)
    hub.come("lima", "oslo")
    hub.push("lima", a)
    assert hub.logic.receive("lima", hub.last, 2.0) == []
    hub.push("oslo", b)
    assert hub.logic.receive("oslo", hub.last, 3.0) == []
    assert hub.logic.anchor.round == 1
    np.testing.assert_array_equal(hub.logic.anchor.weights, FIRST.weights - (a + b) / 2)


@pytest.mark.parametrize(
    ("missed", "expected"), [(0, []), (3, ["Reply"] * 3), (6, ["Snapshot"])]
)
def test_a_client_that_returns_gets_what_it_has_missed(missed, expected):
    # Four replies of one bit are kept.
    hub = Hub(ONE_BIT, replies_kept=4)
    hub.come("lima", "oslo")
    hub.push("oslo", random_deltas(1)[0])
    hub.push("lima", random_deltas(1)[0])
    anchor = hub.logic.anchor
    hub.logic.disconnected("oslo", 2.0)
    for delta in random_deltas(missed):
        hub.push("lima", delta)
    outgoing = hub.join(
        "oslo",
        training=hub.logic.kept.training,
        life=1,
        round=anchor.round,
        digest=anchor.digest,
    )
    assert [kind for _, kind in kinds(outgoing)] == ["Welcome", *expected]
    assert outgoing[0][1].settled == 1
    for _, message in outgoing[1:]:
        if isinstance(message, codec.Snapshot):
            assert message.weights == hub.logic.anchor.weights.tobytes()
            continue
        update = hub.bound.decode_reply(message.payload, message.num_workers)
        statistics = np.frombuffer(message.statistics, "<f4")
        anchor = anchor.moved(update, statistics, OuterStep())
        assert anchor.digest == message.digest


def test_replies_that_are_longer_than_the_anchor_are_not_kept():
    hub = Hub(FLOAT32)
    hub.come("lima")
    for delta in random_deltas(5):
        hub.push("lima", delta)
    assert len(hub.logic.kept.replies) == 1


def test_a_client_with_other_weights_gets_the_anchor():
    hub = Hub(ONE_BIT)
    hub.come("lima")
    hub.push("lima", random_deltas(1)[0])
    known = {"training": hub.logic.kept.training, "life": 1, "round": 1}
    assert kinds(hub.join("lima", digest=5, **known))[1:] == [("lima", "Snapshot")]


def test_a_lost_folder_begins_another_life():
    hub, (a, b) = Hub(), random_deltas(2)
    hub.come("lima", "oslo")
    hub.push("lima", a)
    late = hub.last
    hub.logic.disconnected("lima", 1.5)
    (_, welcome), (_, anchor) = hub.join("lima", 2.0, connection="again")
    assert (welcome.life, welcome.number, welcome.settled) == (2, 0, 0)
    assert isinstance(anchor, codec.Snapshot)
    # What its earlier life has sent must not settle a payload of this one.
    hub.logic.receive("again", late, 3.0)
    hub.push("oslo", b)
    hub.logic.tick(20.0)
    np.testing.assert_array_equal(hub.logic.anchor.weights, FIRST.weights - b)
    outgoing = hub.join("lima", training=hub.logic.kept.training, life=1)
    assert "has joined from another folder" in outgoing[0][1].reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "0.1"}, "tfgradcomp 0.1, the hub has 0.3"),
        ({"model": "trained kernel [6, 6]"}, "Line 0 is 'trained kernel"),
        ({"model": ""}, "Line 0 is 'nothing'|Line 0 is ''"),
        ({"method": "another"}, "its method is another"),
        ({"training": "of old", "life": 1}, "belongs to another training"),
    ],
)
def test_other_programs_are_refused_before_any_weight_is_sent(changes, reason):
    hub = Hub()
    ((_, refused),) = hub.join("lima", **changes)
    assert isinstance(refused, codec.Refused) and refused.final
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refused.reason)
    assert not hub.logic.connected and not hub.logic.kept.members


def test_a_name_has_a_limited_length():
    for name in ("", "x" * 201):
        ((_, refused),) = Hub().join(name, connection="new")
        assert "1 to 200 characters" in refused.reason


def test_no_more_than_the_greatest_number_of_clients_join():
    hub = Hub(most_clients=2)
    hub.come("lima", "oslo")
    ((_, refused),) = hub.join("pune")
    assert "the greatest number" in refused.reason


def test_another_connection_takes_the_place_of_the_first():
    hub = Hub()
    hub.come("lima")
    known = {"training": hub.logic.kept.training, "life": 1}
    outgoing = hub.join("lima", connection="new", **known)
    assert kinds(outgoing)[0] == ("lima", "Refused") and not outgoing[0][1].final
    assert hub.logic.connected == {"new": "lima"}
    assert hub.push("lima", random_deltas(1)[0]) == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_payload_that_is_not_finite_is_left_out_and_named(value):
    hub, (a, b) = Hub(), random_deltas(2)
    hub.come("lima", "oslo")
    payload = np.full(SIZE, value, "<f4").tobytes()
    ((to, message),) = hub.push("lima", a, payload=payload)
    assert (to, message.settled) == ("lima", 1) and "NaN" in message.reason
    hub.push("lima", a)
    hub.push("oslo", b)
    assert hub.logic.history[0].left_out == ("lima",)
    np.testing.assert_array_equal(hub.logic.anchor.weights, FIRST.weights - (a + b) / 2)


def test_a_payload_that_is_much_longer_is_left_out_and_named():
    hub, (a, b, c) = Hub(), random_deltas(3)
    hub.come("lima", "oslo", "pune")
    hub.push("lima", 1000 * a)
    hub.push("oslo", b)
    outgoing = hub.push("pune", c)
    assert kinds(outgoing)[0] == ("lima", "LeftOut")
    assert "more than 10 times the median" in outgoing[0][1].reason
    np.testing.assert_array_equal(hub.logic.anchor.weights, FIRST.weights - (b + c) / 2)
    assert hub.logic.history[0].left_out == ("lima",)
    # The median of earlier rounds judges a client that is alone.
    hub.push("lima", 1000 * a, now=2.0)
    hub.logic.disconnected("oslo", 3.0)
    assert kinds(hub.logic.disconnected("pune", 3.0)) == [("lima", "LeftOut")]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"examples": 0.0}, "examples"),
        ({"examples": float("nan")}, "examples"),
        ({"examples": 1e39}, "at most 1e\\+12"),
        ({"statistics": [np.nan, 0.0]}, "2 finite statistics"),
        ({"statistics": [0.0] * 3}, "2 finite statistics"),
    ],
)
def test_payloads_with_senseless_numbers_end_the_connection(change, text):
    hub = Hub()
    hub.come("lima")
    with pytest.raises(MessageError, match=text):
        hub.push("lima", random_deltas(1)[0], **change)


def test_statistics_that_are_no_whole_numbers_end_the_connection():
    hub = Hub()
    hub.come("lima")
    hub.push("lima", random_deltas(1)[0])
    hub.come("oslo")
    cut = hub.last._replace(life=hub.lives["oslo"], statistics=b"abc")
    with pytest.raises(MessageError, match="2 finite statistics of 4 bytes.*3 bytes"):
        hub.logic.receive("oslo", cut, 1.0)


def test_a_payload_with_which_the_mean_overflows_is_left_out_and_named():
    hub, (a, _) = Hub(), random_deltas(2)
    hub.come("lima", "oslo")
    hub.push("lima", np.full(SIZE, 3.0e38))
    outgoing = hub.push("oslo", np.full(SIZE, 2.9e38))
    assert kinds(outgoing) == [("lima", "LeftOut")]
    assert "NaN or Inf" in outgoing[0][1].reason
    # The round waits for the client's next payload, to the deadline at most.
    assert not hub.logic.history
    hub.push("lima", a, now=2.0)
    assert hub.logic.history[0].left_out == ("lima",)
    assert np.isfinite(hub.logic.anchor.weights).all()


def test_a_hub_goes_on_from_its_state():
    hub, deltas = Hub(ONE_BIT), random_deltas(6)
    other = Hub(ONE_BIT)
    for each in (hub, other):
        each.come("lima", "oslo")
    for i in range(0, 6, 2):
        for each in (hub, other):
            each.push("lima", deltas[i])
            each.push("oslo", deltas[i + 1])
        hub.restart()
        known = {"training": hub.logic.kept.training, "life": 1}
        for name in ("lima", "oslo"):
            (_, welcome), *_ = hub.join(name, **known)
            assert welcome.settled == i // 2 + 1
    assert hub.logic.anchor.digest == other.logic.anchor.digest


def test_a_folder_of_another_training_is_refused():
    hub = Hub()
    saved = hub.logic.kept.to_files()
    hub.arguments = (FLOAT32, False, OuterStep(0.5))
    with pytest.raises(ValueError, match="another outer"):
        hub.start(saved)


def test_those_who_come_after_the_last_round_are_told():
    hub, (a, b) = Hub(rounds=1), random_deltas(2)
    hub.come("lima")
    assert kinds(hub.push("lima", a))[-1] == ("lima", "Finished")
    assert kinds(hub.join("oslo"))[-1] == ("oslo", "Finished")
    assert hub.push("lima", b) == [] and hub.logic.anchor.round == 1
