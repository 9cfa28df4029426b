"""The clients' side: a ClientApp that restores a client for each message."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from tfgradcomp.core.arguments import check_integer
from tfgradcomp.federated import codec
from tfgradcomp.federated.client import compiled_with, count_examples
from tfgradcomp.federated.logics import client_logic
from tfgradcomp.federated.store import Store
from tfgradcomp.federated.training_model import (
    TrainingModel,
    optimizer_arrays,
    restore_optimizer,
)
from tfgradcomp.fit.seeds import seed_states
from tfgradcomp.flower.record import RECORD, record_of
from tfgradcomp.methods import Method


def client_app(
    make_model: Callable[[], keras.Model],
    inner_optimizer: keras.optimizers.Optimizer | str | None,
    dataset_of: Callable[[Context], tf.data.Dataset],
    every: int = 16,
    *,
    state: str | Path | Callable[[Context], str | Path],
    method: Method | None = None,
) -> ClientApp:
    r"""Returns a ClientApp that takes local steps on its own data.

    As a `federated.Client` it sends \( \Delta = \bar x - x \), compressed: the
    difference from the anchor after H = `every` steps. Its residual, the payload under
    way, the anchor, the optimizer's moments and the states of random numbers are in its
    folder, because `context.state` is lost when a node is killed.

    Args:
        make_model: Function that returns a new built and compiled Keras model, the same
            as in `run`.
        inner_optimizer: The optimizer of the local steps: a Keras optimizer or its
            name. None: that of `compile`.
        dataset_of: Function that returns the batches of a node. They are repeated, and
            those of earlier rounds are skipped. So `shuffle` needs a seed.
        every: H, the local steps of a round.
        state: The folder of a node, or a function of the context that returns it. Each
            node needs a folder of its own. Each training gets a folder in it.
        method: The method of `run`, if it has parts that are not of this package.

    Raises:
        ValueError: If `every` is not positive.

    Example:
        ```python
        app = tfgradcomp.flower.client_app(
            make_model, "adam", dataset_of, state=lambda c: c.node_config["state"]
        )
        ```

    References:
        As for `federated.Hub`.
    """
    check_integer("every", every, 1)
    app = ClientApp()
    inner = inner_optimizer and keras.optimizers.get(inner_optimizer)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        asked: Any = message.content[RECORD]
        folder = Path(state(context) if callable(state) else state)
        store = Store(folder / str(asked["training"]))
        try:
            node = _Node(store, str(context.node_id), make_model(), inner, method)
            answer = node.answer(asked, lambda: dataset_of(context), every)
        finally:
            store.close()
        return Message(RecordDict({RECORD: answer}), reply_to=message)

    return app


class _Node:
    """A client, restored from its folder for one message."""

    def __init__(self, store, name, model, inner, method):
        self._store, self._model = store, model
        saved = store.load()
        values: dict = saved[0] if saved else {}
        self._mark, self._rounds = _mark_of(values), values.get("sequence", 0)
        # A process may answer several messages, each with a new model.
        inner = inner and type(inner).from_config(inner.get_config())
        self._optimizer = compiled_with(model, inner)
        self._training = TrainingModel(model)
        self._seeds = [*seed_states(model).values()]
        if saved:
            restore_optimizer(self._optimizer, saved[1])
            for index, seed in enumerate(self._seeds):
                seed.assign(saved[1][f"seed.{index}"])
        # A node that is started again may have another number in Flower.
        own_name = values.get("name", name)
        self._logic = client_logic(self._training, method, own_name, saved)

    def answer(self, asked, dataset_of, every) -> ConfigRecord:
        """Listens to the hub, trains unless a payload is under way, and answers."""
        logic = self._logic
        is_meant = asked["mark"] == self._mark
        pushes = self._listen(asked["messages"]) if is_meant else []
        if logic.can_train:
            pushes = self._train(dataset_of(), every)
        if logic.anchor.round >= 0:
            self._save()
        messages = [*logic.hello(time.monotonic()), *pushes]
        return record_of(messages, self._mark)

    def _listen(self, messages):
        hello: Any = self._logic.hello(time.monotonic())[0]
        answers = []
        for data in messages:
            message: Any = codec.decode(data)
            if isinstance(message, (codec.Welcome, codec.Snapshot)):
                # They answer the `Hello` of the process before this one.
                message = message._replace(token=hello.token)
            answers += self._logic.receive(message, time.monotonic())
        return [answer for answer in answers if isinstance(answer, codec.Push)]

    def _train(self, dataset, every):
        logic, training = self._logic, self._training
        training.take(logic.anchor)
        examples = float(count_examples(dataset)) if logic.by_examples else 1.0
        batches = dataset.repeat().skip(self._rounds * every)
        self._model.fit(batches, steps_per_epoch=every, shuffle=False, verbose=0)
        delta = logic.anchor.weights - training.weights
        return logic.push(delta, training.statistics, examples, time.monotonic())

    def _save(self):
        values, arrays = self._logic.state()
        seeds = {f"seed.{i}": seed.numpy() for i, seed in enumerate(self._seeds)}
        inner = optimizer_arrays(self._optimizer)
        self._store.save(values, {**arrays, **inner, **seeds})
        self._mark = _mark_of(values)


def _mark_of(values: dict) -> int:
    """Returns a number that names what is in a folder; 0 if nothing is."""
    return zlib.crc32(json.dumps(values).encode()) if values else 0
