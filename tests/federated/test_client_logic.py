"""A client hears things in any order, and asks again where it is not sure."""

import numpy as np
import pytest

from tests.federated.harness import SHAPES, SIZE, STATISTICS, bind, description_of
from tfgradcomp import methods
from tfgradcomp.federated import codec
from tfgradcomp.federated.anchor import Anchor, OuterStep
from tfgradcomp.federated.bound_method import BoundMethod
from tfgradcomp.federated.client_logic import ClientLogic, RefusedError

METHOD = methods.dist_ef_block_sgd()
FIRST = Anchor.first(
    np.ones(SIZE, np.float32), np.zeros(STATISTICS, np.float32), OuterStep()
)


def make_client(saved=None, model="model"):
    described = description_of(METHOD, model)._replace(method="")
    return ClientLogic("lima", described, bind, patience=10.0, saved=saved)


def welcome(**changes):
    known = codec.Welcome(
        training="t",
        method=description_of(METHOD).method,
        outer_rate=1.0,
        outer_momentum=0.0,
        nesterov=0,
        seed=0,
        number=0,
        life=1,
        round=0,
        rounds=9,
        settled=0,
        received=0,
        token=1,
        by_examples=0,
    )
    return known._replace(**changes)


def snapshot(anchor=FIRST, token=1, settled=0):
    parts = [part.tobytes() for part in anchor[1:]]
    return codec.Snapshot(anchor.round, *parts, anchor.digest, token, settled)


def joined():
    client = make_client()
    client.hello(0.0)
    client.receive(welcome(), 0.0)
    client.receive(snapshot(), 0.0)
    assert client.can_train
    return client


def pushed():
    client = joined()
    delta = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    (push,) = client.push(delta, np.zeros(STATISTICS, np.float32), 1.0, 0.0)
    return client, push


def reply_to(anchor, push, settled):
    bound = BoundMethod(METHOD, SHAPES)
    done = bound.combine([push.payload], [1.0], bound.server_state(), anchor.round)
    moved = anchor.moved(
        bound.decode_reply(done.reply, 1), anchor.statistics, OuterStep()
    )
    statistics = anchor.statistics.tobytes()
    message = codec.Reply(moved.round, 1, done.reply, statistics, moved.digest, settled)
    return moved, message


def test_a_payload_is_under_way_until_it_is_settled():
    client, push = pushed()
    assert (push.life, push.sequence) == (1, 1) and not client.can_train
    first, reply = reply_to(FIRST, push, settled=0)
    client.receive(reply, 1.0)
    assert not client.can_train
    _, reply = reply_to(first, push, settled=1)
    client.receive(reply, 2.0)
    assert client.can_train and client.anchor.round == 2


def test_doubled_and_late_replies_change_nothing():
    client, push = pushed()
    anchor, reply = reply_to(FIRST, push, settled=1)
    for _ in range(3):
        assert client.receive(reply, 1.0) == []
    client.receive(snapshot(), 2.0)
    assert client.anchor.digest == anchor.digest


def test_a_missed_reply_makes_it_ask():
    client, push = pushed()
    anchor, _ = reply_to(FIRST, push, settled=1)
    _, later = reply_to(anchor, push, settled=1)
    (hello,) = client.receive(later, 1.0)
    assert (hello.training, hello.round, hello.token) == ("t", 0, 2)
    # The answer to the first question comes late.
    assert client.receive(welcome(round=7), 1.0) == []
    assert client.receive(welcome(token=2), 1.0) == [push]


def test_it_sends_again_only_what_the_hub_lacks():
    client, push = pushed()
    client.hello(1.0)
    assert client.receive(welcome(token=2, received=1), 2.0) == []
    client.hello(3.0)
    assert client.receive(welcome(token=3), 4.0) == [push]
    client.hello(5.0)
    assert client.receive(welcome(token=4, settled=1, received=1), 6.0) == []
    assert client.can_train


def test_it_asks_again_when_an_answer_is_overdue():
    client, _ = pushed()
    assert client.tick(9.0) == []
    assert isinstance(client.tick(10.5)[0], codec.Hello)
    assert client.tick(11.0) == []


def test_its_folder_holds_the_payload_under_way():
    client, push = pushed()
    again = make_client(client.state())
    (hello,) = again.hello(0.0)
    assert (hello.life, hello.round, hello.digest) == (1, 0, FIRST.digest)
    assert again.receive(welcome(), 0.0) == [push]
    again.receive(reply_to(FIRST, push, settled=1)[1], 0.0)
    client.receive(reply_to(FIRST, push, settled=1)[1], 0.0)
    delta, none = np.ones(SIZE, np.float32), np.zeros(STATISTICS, np.float32)
    assert again.push(delta, none, 1.0, 0.0) == client.push(delta, none, 1.0, 0.0)


def test_a_folder_of_another_model_is_refused():
    with pytest.raises(ValueError, match="another model"):
        make_client(pushed()[0].state(), model="other")


def test_other_bits_than_the_hub_has_are_fetched():
    client, push = pushed()
    anchor, reply = reply_to(FIRST, push, settled=1)
    (hello,) = client.receive(reply._replace(digest=1), 1.0)
    assert hello.round == -1
    client.receive(welcome(token=2, round=1, settled=1), 1.0)
    client.receive(snapshot(anchor, token=2), 1.0)
    assert client.can_train and client.anchor.digest == anchor.digest


def test_an_anchor_without_a_welcome_is_not_taken():
    client = make_client()
    client.hello(0.0)
    client.receive(snapshot(), 0.0)
    client.receive(welcome(), 0.0)
    assert not client.can_train and client.anchor.round == -1


def test_an_anchor_in_place_of_replies_is_taken_and_settles():
    client, push = pushed()
    later = reply_to(FIRST, push, settled=1)[0]._replace(round=5)
    client.receive(snapshot(later, token=0, settled=1), 1.0)
    assert client.anchor.round == 0
    client.receive(snapshot(later, settled=0), 1.0)
    assert client.anchor.round == 5 and not client.can_train
    newer = later._replace(round=7)
    assert client.receive(snapshot(newer, settled=1), 1.0) == []
    assert client.anchor.round == 7 and client.can_train


def test_a_damaged_anchor_is_an_error():
    client = make_client()
    client.hello(0.0)
    client.receive(welcome(), 0.0)
    with pytest.raises(codec.MessageError, match="damaged"):
        client.receive(snapshot()._replace(weights=bytes(4 * SIZE)), 0.0)


@pytest.mark.parametrize(
    ("final", "error"), [(1, RefusedError), (0, ConnectionAbortedError)]
)
def test_refusals_are_errors_with_their_reason(final, error):
    with pytest.raises(error, match="wrong model"):
        make_client().receive(codec.Refused("wrong model", final), 0.0)


def test_what_the_hub_leaves_out_is_under_way_no_more(caplog):
    client, _ = pushed()
    client.receive(codec.LeftOut(1, "it is too long"), 1.0)
    assert client.can_train and "it is too long" in caplog.text


def test_a_method_of_other_classes_is_refused():
    client = make_client()
    client.hello(0.0)
    text = '{"class": "os.system", "arguments": {}}'
    with pytest.raises(RefusedError, match="Give `Client` the method"):
        client.receive(welcome(method=text), 0.0)
