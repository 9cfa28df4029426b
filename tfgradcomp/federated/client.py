"""A client of a federated training: the class that users run."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import keras
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.callbacks.monitor import CompressionMonitor
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.core.logging import logger
from tfgradcomp.federated import codec, wire
from tfgradcomp.federated.anchor import hexadecimal
from tfgradcomp.federated.link import Link
from tfgradcomp.federated.logics import client_logic
from tfgradcomp.federated.monitoring import ClientWatch, in_rounds, opened
from tfgradcomp.federated.store import Store
from tfgradcomp.federated.training_model import (
    TrainingModel,
    optimizer_arrays,
    restore_optimizer,
)
from tfgradcomp.methods import Method

_PAUSES = 0.2, 30.0
"""Seconds before a client connects again: at first, and at most."""


class Client:
    r"""Trains on its own data, and exchanges what it has learnt with a hub.

    A client takes H = `every` steps with its inner optimizer, sends \( \Delta = \bar x
    - x \), the compressed difference from the anchor, and goes on from the anchor that
    the hub's reply moves. It opens the connection itself, so it may stand behind a
    router. If the connection breaks, it trains to the end of its round and connects
    again. If it is killed, it goes on from its folder, and sends again what was under
    way; without the folder only its residual is lost.

    Args:
        address: The hub's address, `"host:port"`.
        make_model: Function that returns a new built and compiled Keras model, the same
            as on the hub. Loss and metrics are those of `compile`.
        inner_optimizer: The optimizer of the local steps: a Keras optimizer or its
            name. None: that of `compile`.
        every: H, the local steps of a round.
        state: The client's folder. None: nothing is kept, and a client that is started
            again gets the anchor.
        name: The client's name, its own; with TLS that of its certificate replaces it.
            None: the machine's name and that of the folder.
        method: The hub's method, if it has parts that are not of this package. None:
            the hub says which. No code travels.
        credentials: The result of `certificates.channel_credentials`, or that of
            `grpc.ssl_channel_credentials`.
        insecure: Whether the hub is on this machine and has no certificates.
        patience: Seconds after which `fit` raises an error if no hub answers.

    Attributes:
        model: The model; after `fit` it has the weights of the last round.
        sent: Bytes of all messages sent.
        received: Bytes of all messages received.

    Raises:
        ValueError: If an argument is out of range, if the model is not compiled, or if
            the folder belongs to another training.
        BlockingIOError: If another client uses the folder.

    Example:
        ```python
        client = tfgradcomp.federated.Client(
            "127.0.0.1:7070", make_model, "adam", every=16, state="me", insecure=True
        )
        client.fit(dataset)
        ```

    References:
        As for `Hub`.
    """

    def __init__(
        self,
        address: str,
        make_model: Callable[[], keras.Model],
        inner_optimizer: keras.optimizers.Optimizer | str | None = None,
        every: int = 16,
        state: str | Path | None = None,
        *,
        name: str | None = None,
        method: Method | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        insecure: bool = False,
        patience: float = 600.0,
    ):
        wire.check_security(address, credentials, insecure)
        check_integer("every", every, 1)
        self.every, self.model = every, make_model()
        self._address, self._credentials = address, credentials
        self._patience = patience
        self._optimizer = compiled_with(self.model, inner_optimizer)
        self._training = TrainingModel(self.model)
        self._store = None if state is None else Store(state)
        saved = self._store.load() if self._store else None
        if saved is not None:
            restore_optimizer(self._optimizer, saved[1])
        folder = "" if state is None else f"-{Path(state).resolve().name}"
        self._logic = client_logic(
            self._training, method, name or f"{socket.gethostname()}{folder}", saved
        )
        self._examples = 1.0
        self._link: Link | None = None
        self._failures = 0
        self._lost_since: float | None = None
        self._closed_bytes = [0, 0]
        self._watch = ClientWatch()

    @property
    def round(self) -> int:
        """Number of rounds in the client's anchor; 0 before it has one."""
        return max(self._logic.anchor.round, 0)

    @property
    def digest(self) -> int:
        """64 bits of a hash of the anchor, equal to that of the hub."""
        return self._logic.anchor.digest

    @property
    def sent(self) -> int:
        """Bytes of all messages sent."""
        return self._closed_bytes[0] + (self._link.sent if self._link else 0)

    @property
    def received(self) -> int:
        """Bytes of all messages received."""
        return self._closed_bytes[1] + (self._link.received if self._link else 0)

    def fit(
        self,
        dataset: tf.data.Dataset,
        examples: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        **kwargs: Any,
    ) -> keras.callbacks.History:
        """Takes part in rounds until the hub has had all of them.

        An epoch of Keras is a round of this client. When `on_epoch_end` and the
        validation of an epoch begin, the model has the weights of the hub.

        Args:
            dataset: Batches, as for `model.fit`; it is repeated.
            examples: Number of this client's examples, its weight if the hub asks for
                it. None: they are counted.
            callbacks: Keras callbacks. A `CompressionMonitor` shows the rounds.
            **kwargs: Further arguments of `model.fit`, such as `verbose` and
                `validation_data`.

        Returns:
            The history of `model.fit`.

        Raises:
            ValueError: If `dataset` is no `tf.data.Dataset`.
            ConnectionError: If no hub answers, or if it refuses this client.
            FloatingPointError: If the weights become NaN or Inf.
        """
        if not isinstance(dataset, tf.data.Dataset):
            raise ValueError(
                "dataset must be a tf.data.Dataset of batches, such as "
                "tf.data.Dataset.from_tensor_slices((x, y)).batch(32). Received: "
                f"dataset={dataset!r}"
            )
        monitors = [c for c in callbacks if isinstance(c, CompressionMonitor)]
        self._watch = ClientWatch(monitors, self.every)
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave)
            stack.enter_context(opened(monitors, self._logic.name))
            self._wait()
            self._show()
            if self._logic.by_examples:
                self._examples = float(examples or count_examples(dataset))
            self._watch.begin(self.sent, self.received)
            history = self.model.fit(
                dataset.repeat(),
                steps_per_epoch=self.every,
                initial_epoch=self.round,
                # A straggler has fewer rounds than the hub. `stop_training` ends it.
                epochs=max(self._logic.rounds, self.round + 1),
                callbacks=[_Rounds(self), *map(in_rounds, callbacks)],
                # The dataset shuffles.
                **{"shuffle": False, **kwargs},
            )
            self._show()
            logger.info(
                "The training has ended after round %d with the weights %s",
                *(self.round, hexadecimal(self.digest)),
            )
            return history

    # A round.

    def exchange(self) -> bool:
        """Sends what the last local steps have changed, and waits for the reply.

        Returns:
            True if the training goes on.
        """
        logic = self._logic
        if logic.is_finished:
            return False
        messages = self._compress()
        # A payload that may have been sent must not be forgotten.
        self._save()
        with self._watch.phase("exchange_ms"):
            self._send(messages)
            self._wait()
        with self._watch.phase("decode_ms"):
            self._show()
        self._watch.end(logic, self.sent, self.received)
        return not logic.is_finished

    def _compress(self) -> list[codec.Push]:
        """Compresses what the last local steps have changed."""
        logic, training = self._logic, self._training
        with self._watch.phase("encode_ms"):
            before = logic.compressor_state
            delta = logic.anchor.weights - training.weights
            messages = logic.push(
                delta, training.statistics, self._examples, time.monotonic()
            )
        self._watch.pushed(logic, messages[0], delta, before)
        return messages

    def _show(self):
        """Assigns the anchor to the model."""
        self._training.take(self._logic.anchor)

    def _wait(self):
        """Handles messages until the client may train or the training has ended."""
        logic = self._logic
        while not (logic.can_train or logic.is_finished):
            link = self._link or self._connect()
            try:
                self._handle(link.inbox.get(timeout=1.0))
            except queue.Empty:
                self._send(logic.tick(time.monotonic()))
        self._failures, self._lost_since = 0, None

    def _handle(self, item):
        if not isinstance(item, bytes):
            return self._lose(item)
        try:
            with self._watch.phase("decode_ms"):
                answers = self._logic.receive(codec.decode(item), time.monotonic())
            self._send(answers)
        except (codec.MessageError, ConnectionAbortedError) as error:
            self._lose(error)

    # The connection.

    def _connect(self) -> Link:
        """Opens a stream and introduces the client, after a pause if others broke."""
        if self._failures:
            pause = min(_PAUSES[0] * 2**self._failures, _PAUSES[1])
            # Clients that a hub has lost all at once do not return all at once.
            time.sleep(pause * random.uniform(0.5, 1.0))
        most = 2 * self._training.weights.nbytes + self._training.statistics.nbytes
        self._link = link = Link(self._address, self._credentials, most)
        self._send(self._logic.hello(time.monotonic()))
        return link

    def _lose(self, error):
        """Closes the stream; raises ConnectionError if none has worked for long."""
        logger.info("The connection to %s has ended: %s", self._address, _text(error))
        self._close()
        now = time.monotonic()
        self._failures += 1
        self._lost_since = self._lost_since or now
        if now - self._lost_since > self._patience:
            raise ConnectionError(
                f"No hub has answered at {self._address} for {self._patience:g} s. "
                f"Start it, or give its address. Received: {_text(error)}"
            )

    def _close(self):
        if self._link is not None:
            link, self._link = self._link, None
            link.close()
            self._closed_bytes[0] += link.sent
            self._closed_bytes[1] += link.received

    def _send(self, messages):
        for message in messages:
            if self._link is not None:
                self._link.send(codec.encode(message))

    def _leave(self):
        if self._logic.anchor.round >= 0:
            self._save()
        self._send(self._logic.leave())
        self._close()
        if self._store:
            self._store.close()

    # The method and the folder.

    def _save(self):
        if self._store:
            values, arrays = self._logic.state()
            self._store.save(values, {**arrays, **optimizer_arrays(self._optimizer)})


class _Rounds(keras.callbacks.Callback):
    """Ends a round of local steps."""

    def __init__(self, client: Client):
        super().__init__()
        self._client = client

    @override
    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 >= self._client.every and not self._client.exchange():
            self.model.stop_training = True


def compiled_with(model, inner_optimizer):
    """Gives a compiled model its inner optimizer, built, and returns it."""
    if getattr(model, "optimizer", None) is None:
        raise ValueError(
            "make_model must return a compiled model: the client needs its loss. Call "
            f"model.compile(loss=...) there. Received: {model!r}"
        )
    if inner_optimizer is not None:
        optimizer = keras.optimizers.get(inner_optimizer)
        if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.optimizer = optimizer
    # Before it is built it has no moments to restore.
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model.optimizer


def count_examples(dataset: tf.data.Dataset) -> int:
    """Returns the number of examples in a dataset of batches."""
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "The hub weights clients by their examples, and this dataset has no end. "
            "Give fit(..., examples=...). Received: examples=None"
        )
    sizes = dataset.map(lambda *batch: tf.shape(tf.nest.flatten(batch)[0])[0])
    return int(sizes.reduce(0, lambda total, size: total + size))


def _text(error: object) -> str:
    if isinstance(error, grpc.RpcError):
        return str(error.details()) if hasattr(error, "details") else str(error)
    return "the hub has ended it" if error is None else str(error)
