"""Rounds over Flower's messages, which a grid in this process hands over."""

import collections
import itertools
import shutil
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.federated import programs
from tfgradcomp import methods
from tfgradcomp.compressors import Identity
from tfgradcomp.federated import Client, Hub, OuterStep
from tfgradcomp.federated.store import Store
from tfgradcomp.federated.training_model import TrainingModel
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean

pytest.importorskip("flwr", reason="needs Flower: make flower runs it")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from tfgradcomp import flower  # noqa: E402

EVERY, ROUNDS = 2, 3
FLOAT32 = Method(Identity(), Mean())
FIRST = 2**62


def make_model():
    keras.utils.set_random_seed(0)
    layers = [keras.Input([8]), *programs.make_model().layers[:-1]]
    model = keras.Sequential(
        [*layers, keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def dataset(number):
    rng = np.random.default_rng(number)
    x = rng.normal(size=[64 + 16 * number, 8]).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1)))
    return data.shuffle(200, seed=number).batch(16)


class Grid:
    """Nodes of one process, each with a folder; a test may lose what travels.

    Attributes:
        apps: The ClientApps by the numbers of their nodes.
        fate: Function of a node and the number of its message, which returns
            "deliver", "lost", "unanswered" or a number of looks until it comes.
        configured: Numbers of data and folders, where they are not those of the nodes.
        told: The nodes, in the order of their messages.
    """

    def __init__(self, apps, fate=lambda node, count: "deliver"):
        self.apps, self.fate, self.told = apps, fate, []
        self.configured = {}
        self._ids, self._answers = itertools.count(1), {}

    def get_node_ids(self):
        # Flower's numbers have 64 bits, and are other objects each time.
        return [FIRST + node for node in self.apps]

    def push_messages(self, messages):
        return [self._push(message) for message in messages]

    def _push(self, message):
        node = message.metadata.dst_node_id - FIRST
        sent = f"message {next(self._ids)}"
        message.metadata.__dict__["_message_id"] = sent
        self.told.append(node)
        fate = self.fate(node, self.told.count(node))
        if fate == "lost":
            answer = Message(Error(3, "lost"), reply_to=message)
        else:
            number = self.configured.get(node, node)
            context = Context(1, FIRST + node, {"number": number}, RecordDict(), {})
            try:
                answer = self.apps[node](message, context)
            except Exception as error:
                answer = Message(Error(2, repr(error)), reply_to=message)
        if fate == "unanswered":
            answer = Message(Error(5, "unanswered"), reply_to=message)
        self._answers[sent] = [fate if isinstance(fate, int) else 0, answer]
        return sent

    def pull_messages(self, message_ids):
        found = []
        for sent in message_ids:
            self._answers[sent][0] -= 1
            if self._answers[sent][0] < 0:
                found.append(self._answers.pop(sent)[1])
        return found


class Clock:
    """A module `time` whose seconds are the looks at it."""

    def __init__(self):
        self._now = itertools.count()

    def monotonic(self):
        return float(next(self._now))

    def sleep(self, seconds):
        pass


@pytest.fixture(autouse=True)
def flowers_process(monkeypatch):
    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)
    monkeypatch.setattr("tfgradcomp.flower.server.time", Clock())


def app(folder, make_model=make_model, dataset=dataset, every=EVERY, method=None):
    return flower.client_app(
        make_model,
        keras.optimizers.Adam(),
        lambda context: dataset(context.node_config["number"]),
        every,
        state=lambda context: folder / str(context.node_config["number"]),
        method=method,
    )


def name(node):
    return str(FIRST + node)


def weights_of(model):
    training = TrainingModel(model)
    return training.weights.tobytes() + training.statistics.tobytes()


def weights_of_hub(method, count, **arguments):
    """Returns the weights of a hub and clients over localhost."""
    hub = Hub(make_model, method, insecure=True, quorum=count, **arguments)
    serving = threading.Thread(target=hub.serve, args=(ROUNDS, 60), daemon=True)
    serving.start()
    clients = []
    for number in range(1, count + 1):
        client = Client(
            hub.address,
            make_model,
            keras.optimizers.Adam(),
            EVERY,
            name=str(number),
            insecure=True,
        )
        thread = threading.Thread(
            target=client.fit, args=[dataset(number)], kwargs={"verbose": 0}
        )
        thread.start()
        # Numbers are given in this order.
        while str(number) not in hub._logic.connected.values():
            time.sleep(0.01)
        clients.append(thread)
    for thread in [*clients, serving]:
        thread.join(60)
    assert hub.round == ROUNDS
    return weights_of(hub.model)


@pytest.mark.parametrize(
    "method, arguments",
    [
        (methods.dist_ef_block_sgd(), {"outer": OuterStep(0.7, 0.9, nesterov=True)}),
        (FLOAT32, {"weights": "examples"}),
    ],
    ids=["one-bit", "float32"],
)
def test_the_same_rounds_give_the_weights_of_hub_and_clients(
    tmp_path, method, arguments
):
    grid = Grid({number: app(tmp_path) for number in (1, 2)})
    seen = []
    model = flower.run(
        grid,
        make_model,
        method,
        rounds=ROUNDS,
        deadline=1000,
        quorum=2,
        on_round=lambda model, closed: seen.append(closed.counted),
        **arguments,
    )
    assert seen == [(name(1), name(2))] * ROUNDS
    # One message to say hello, and one a round.
    assert grid.told == [1, 2] * (ROUNDS + 1)
    assert weights_of(model) == weights_of_hub(method, 2, **arguments)


def make_small_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, run_eagerly=True)
    return model


def small_app(folder, **arguments):
    return app(folder, make_small_model, every=1, **arguments)


def small_run(grid, rounds, counted=None, **arguments):
    """Trains, and adds the names of the counted payloads to `counted`."""

    def on_round(model, closed):
        if counted is not None:
            counted.update(closed.counted)

    method = methods.dist_ef_block_sgd()
    arguments = {"deadline": 40, **arguments}
    return flower.run(
        grid, make_small_model, method, rounds=rounds, on_round=on_round, **arguments
    )


def saved_in(folder):
    """Returns what a client has saved of its only training."""
    (training,) = folder.iterdir()
    store = Store(training)
    values, _ = store.load()
    store.close()
    return values


def test_lost_and_late_answers_count_once(tmp_path):
    rng = np.random.default_rng(0)
    fates = ["deliver", "lost", "unanswered", 5, 30, 100]
    drawn = collections.Counter()

    def fate(node, count):
        chosen = fates[rng.choice(6, p=[0.4, 0.1, 0.2, 0.1, 0.1, 0.1])]
        drawn[chosen] += 1
        return chosen

    grid = Grid({number: small_app(tmp_path) for number in (1, 2, 3)}, fate)
    counted = collections.Counter()
    small_run(grid, 14, counted, quorum=2)
    assert drawn.keys() == {*fates}
    for number in (1, 2, 3):
        values = saved_in(tmp_path / str(number))
        made, is_under_way = values["sequence"], values["pending"] is not None
        # Nobody has told of the last round.
        assert made - is_under_way <= counted[name(number)] <= made
        assert values["joined"]["life"] == 1 and values["name"] == name(number)


def test_a_lost_folder_is_another_life(tmp_path):
    def fate(node, count):
        if (node, count) == (2, 4):
            shutil.rmtree(tmp_path / "2")
        return "deliver"

    grid = Grid({number: small_app(tmp_path) for number in (1, 2)}, fate)
    counted = collections.Counter()
    small_run(grid, 8, counted, quorum=2)
    assert counted == {name(1): 8, name(2): 8}
    values = saved_in(tmp_path / "2")
    assert values["joined"]["life"] == 2
    # Two payloads are of the first life: the third message brought the second of them.
    assert values["sequence"] == 6


def test_a_node_goes_on_under_another_number(tmp_path):
    first, second = small_app(tmp_path), small_app(tmp_path)
    grid = Grid({1: first, 2: second})
    grid.configured = {7: 2}

    def on_round(model, closed):
        if closed.round == 2:
            del grid.apps[2]
            grid.apps[7] = second

    flower.run(
        grid,
        make_small_model,
        methods.dist_ef_block_sgd(),
        rounds=5,
        deadline=200,
        quorum=2,
        on_round=on_round,
    )
    values = saved_in(tmp_path / "2")
    assert values["name"] == name(2) and values["joined"]["number"] == 1
    assert values["sequence"] == 5 and 7 in grid.told


def test_another_run_goes_on_from_the_hubs_folder(tmp_path):
    arguments = {"quorum": 2, "state": tmp_path / "hub"}
    for rounds in (2, 5):
        grid = Grid({number: small_app(tmp_path) for number in (1, 2)})
        parts = small_run(grid, rounds, **arguments)
    whole = Grid({number: small_app(tmp_path / "other") for number in (1, 2)})
    assert weights_of(parts) == weights_of(small_run(whole, 5, quorum=2))
    with pytest.raises(ValueError, match="belongs to a training with another seed"):
        small_run(whole, 6, seed=1, **arguments)


def test_nodes_that_cannot_take_part_are_named(tmp_path, caplog):
    def fails(number):
        raise OSError("the disk is gone")

    apps = {
        1: small_app(tmp_path),
        2: small_app(tmp_path, dataset=fails),
        3: app(tmp_path),
        4: small_app(tmp_path, method=FLOAT32),
    }
    grid, counted = Grid(apps), collections.Counter()
    small_run(grid, 3, counted)
    assert counted == {name(1): 3}
    assert f"Node {name(2)} has failed: OSError('the disk is gone')" in caplog.text
    assert f"{name(3)} is refused: its model differs" in caplog.text
    assert f"{name(4)} is refused: its method is" in caplog.text
    assert grid.told.count(3) == grid.told.count(4) == 1


@pytest.mark.parametrize(
    "content", [{}, {"messages": [b"x"], "mark": 0}, {"messages": "x", "mark": 0}]
)
def test_any_answer_is_handled(tmp_path, caplog, content):
    def strange(message, context):
        record = RecordDict({"tfgradcomp": ConfigRecord(content)})
        return Message(record, reply_to=message)

    grid = Grid({1: small_app(tmp_path), 2: strange})
    small_run(grid, 1)
    assert f"Node {name(2)} has failed" in caplog.text


@pytest.mark.parametrize("wrong", ["rounds", "deadline", "quorum", "weights", "method"])
def test_wrong_arguments_raise(wrong):
    arguments = {"rounds": 1, "deadline": 1.0, "method": FLOAT32, wrong: 0}
    with pytest.raises((TypeError, ValueError), match=f"Received: .*{wrong}"):
        flower.run(Grid({}), make_small_model, **arguments)
    with pytest.raises(ValueError, match="every"):
        flower.client_app(make_small_model, "adam", dataset, 0, state="x")
