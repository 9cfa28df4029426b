"""The gRPC layer refuses insecure, too many, too long and misnamed messages."""

import queue
import threading

import pytest

from tests.federated.harness import description_of
from tests.federated.programs import make_model
from tfgradcomp import methods
from tfgradcomp.federated import Client, Hub, codec, wire
from tfgradcomp.federated.link import Link
from tfgradcomp.federated.outbox import MOST, Outbox
from tfgradcomp.federated.rate_limit import RateLimit
from tfgradcomp.federated.service import HELLOS, _Connection
from tfgradcomp.federated.training_model import TrainingModel
from tfgradcomp.version import __version__

METHOD = methods.dist_ef_block_sgd()
SECONDS = 20.0


@pytest.fixture
def hub():
    hub = Hub(make_model, METHOD, insecure=True)
    hub._logic.rules = hub._logic.rules._replace(rounds=5, deadline=60.0)
    with hub._running():
        yield hub


@pytest.fixture
def link(hub):
    link = Link(hub.address, None, 10**6)
    yield link
    link.close()


def hello(**changes):
    described = description_of(METHOD, TrainingModel(make_model()).describe())
    described = described._replace(version=__version__)._asdict()
    new = {"training": "", "life": 0, "round": -1, "digest": 0, "token": 1}
    return codec.Hello(**{**described, **new, "name": "lima", **changes})


def answers(link, *messages):
    """All that comes until the stream ends, and a word about its end."""
    for message in messages:
        data = message if isinstance(message, bytes) else codec.encode(message)
        link.send(data)
    found = []
    while isinstance(item := link.inbox.get(timeout=SECONDS), bytes):
        found.append(codec.decode(item))
    return found, item


def test_a_client_is_welcomed_with_the_first_weights(hub, link):
    link.send(codec.encode(hello()))
    welcome, snapshot = (
        codec.decode(link.inbox.get(timeout=SECONDS)) for _ in range(2)
    )
    assert (welcome.number, welcome.life, welcome.rounds) == (0, 1, 5)
    assert snapshot.weights == hub._logic.anchor.weights.tobytes()
    with pytest.raises(queue.Empty):
        link.inbox.get(timeout=0.2)
    assert hub.traffic["lima"].received == len(codec.encode(hello()))
    assert hub.traffic["lima"].sent == link.received > len(snapshot.weights)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"GET / HTTP/1.1", "no tfgradcomp program"),
        (hello(version="0.0.1"), "Install the same version"),
        (hello(model="trained kernel [3]"), "its model differs"),
        (codec.Finished(3), ""),
    ],
)
def test_what_is_refused_is_told_and_cut_off(hub, link, message, reason):
    if isinstance(message, codec.Finished):
        link.send(codec.encode(hello()))
    found, end = answers(link, message)
    assert isinstance(found[-1], codec.Refused) and reason in found[-1].reason
    assert end is None and not hub._logic.connected


def test_a_message_that_is_too_long_ends_the_stream(hub, link):
    _, end = answers(link, bytes(10**6))
    assert "larger than max" in end.details()


def test_a_client_cannot_connect_all_the_time(hub, link):
    many = [hello(token=i + 1, training="") for i in range(HELLOS[1] + 1)]
    found, _ = answers(link, *many)
    assert "connects too often" in found[-1].reason


def reply(number, length):
    return codec.Reply(number, 1, bytes(length), b"", 0, 0)


def test_the_anchor_takes_the_place_of_replies_that_are_longer():
    outbox, welcome = Outbox(), codec.LeftOut(1, "")
    assert not outbox.makes_way(reply(1, 999), 100)
    for message in (reply(1, 40), welcome, reply(2, 40)):
        outbox.put(message)
    assert not outbox.makes_way(reply(3, 20), 100)
    assert outbox.makes_way(reply(3, 21), 100)
    outbox.put(codec.Snapshot(3, bytes(100), b"", b"", 0, 0, 0))
    assert outbox.makes_way(reply(4, 1), 100)
    outbox.close()
    assert outbox.get() == welcome and outbox.get() is None


def test_a_client_that_does_not_read_is_cut_off():
    outbox = Outbox()
    for number in range(MOST + 1):
        outbox.put(reply(number, 1))
    assert outbox.get() is None


def test_a_slow_client_gets_the_anchor_in_place_of_replies(hub):
    service, connection = hub._service, _Connection("lima")
    anchor = hub._logic.anchor
    # Nothing is sent while the hub closes rounds.
    with service.changed:
        service._do(lambda now: hub._logic.receive(connection, hello(), now))
        for number in (1, 2):
            outgoing = [(connection, reply(number, anchor.nbytes))]
            service._do(lambda now, outgoing=outgoing: outgoing)
    connection.outbox.close()
    waiting = [*iter(connection.outbox.get, None)]
    assert [type(message) for message in waiting] == [codec.Welcome, codec.Snapshot]
    assert waiting[1].weights == anchor.weights.tobytes()


def test_a_hub_stays_for_clients_with_slow_links(hub, link, monkeypatch):
    monkeypatch.setattr("tfgradcomp.federated.hub._FAREWELL", 0.0)
    link.send(codec.encode(hello()))
    link.inbox.get(timeout=SECONDS)
    farewell = threading.Thread(target=hub._say_farewell)
    farewell.start()
    farewell.join(0.3)
    assert farewell.is_alive()
    link.send(codec.encode(codec.Leave(1)))
    farewell.join(SECONDS)
    assert not farewell.is_alive()


def test_names_that_are_not_accepted_are_refused(hub, link):
    hub._service._accepted = lambda: ["oslo"]
    found, _ = answers(link, hello())
    assert "does not accept a client 'lima'" in found[-1].reason


@pytest.mark.parametrize("kind", ["hub", "client"])
@pytest.mark.parametrize(
    ("address", "insecure", "text"),
    [
        ("127.0.0.1:0", False, "Give either credentials"),
        ("0.0.0.0:0", True, "for programs on one machine"),
        ("hub.example.org:70", True, "for programs on one machine"),
    ],
)
def test_nobody_is_insecure_by_accident(kind, address, insecure, text):
    with pytest.raises(ValueError, match=text):
        if kind == "hub":
            Hub(make_model, METHOD, address=address, insecure=insecure)
        else:
            Client(address, make_model, insecure=insecure)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "[::1]"])
def test_this_machine_is_known(host):
    wire.check_security(f"{host}:70", None, insecure=True)


def test_a_taken_port_is_named(hub):
    with pytest.raises(OSError, match="Give another port"):
        Hub(make_model, METHOD, address=hub.address, insecure=True)


def test_rates_are_limited():
    limit = RateLimit(rate=2.0, burst=3)
    assert [limit.allows(0.0) for _ in range(4)] == [True, True, True, False]
    assert [limit.allows(1.0) for _ in range(3)] == [True, True, False]
    assert [limit.allows(100.0) for _ in range(4)] == [True, True, True, False]


def test_a_client_without_a_hub_gives_up():
    client = Client("127.0.0.1:9", make_model, insecure=True, patience=0.3)
    with pytest.raises(ConnectionError, match="No hub has answered"):
        client._wait()


def test_a_hub_whose_port_is_taken_leaves_its_folder(tmp_path):
    method = methods.dist_ef_block_sgd()
    taken = Hub(make_model, method, insecure=True)
    state = {"insecure": True, "state": tmp_path}
    with pytest.raises(OSError, match="cannot listen") as caught:
        Hub(make_model, method, address=taken.address, **state)
    # While the error lives, which holds the first hub.
    Hub(make_model, method, **state)
    assert caught.value.__traceback__ is not None
