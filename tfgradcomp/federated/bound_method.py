"""A method bound to a model's shapes: vectors in, bytes out, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.callbacks import measures
from tfgradcomp.compressors.base import checked_compress
from tfgradcomp.core import Context, Field, Fields, Layout, State, contracts
from tfgradcomp.federated.codec import MessageError
from tfgradcomp.methods import Method
from tfgradcomp.servers.base import checked_combine
from tfgradcomp.transports import messages

CLIENT, SERVER = "worker", "server"
"""Owners of states, in the names of a file."""


class Compressed(NamedTuple):
    """A payload and the compressor's new state."""

    payload: bytes
    state: State


class Combined(NamedTuple):
    """A reply and the server's new state."""

    reply: bytes
    state: State


def check_method(method: Method, by_examples: bool = False) -> None:
    """Raises ValueError if rounds of local training cannot use a method.

    Args:
        method: The method.
        by_examples: Whether means are weighted by numbers of examples.
    """
    compressor, server = method.compressor, method.server
    layout = Layout.from_shapes([(8, 8)], method.block_size)
    fields = compressor.fields(layout).values()
    reasons = {
        "its workers need a first round (a shared scale, factors of matrices), and "
        "clients that come and go have one round": compressor.first_round(layout),
        "its workers' state depends on the reply, which a client may miss": (
            compressor.hears_reply
        ),
        "its workers read the server's state": server.read_by_workers,
        "its workers must draw the same random elements in the same step": any(
            field.shared for field in fields
        ),
        "it needs the second moments of gradients": method.needs_second_moments,
        "it has a weight decay: give it to the clients' inner optimizer": (
            method.weight_decay is not None
        ),
        "it adds noise to the reply": method.noise_std,
        "its server cannot weight payloads: take weights='equal'": (
            by_examples and not server.takes_weights
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"Federated training cannot use this method: {reason}. Take another, "
                f"such as methods.dist_ef_block_sgd(). Received: method={method.name}"
            )


class BoundMethod:
    """A method for the vector of all trained variables of a model.

    All vectors are float32 arrays `[size]`; payloads and replies are bytes, the words
    of `tfgradcomp.transports.messages`.

    Args:
        method: The method.
        shapes: The shapes of the trained variables.
        by_examples: Whether means are weighted.
        seed: Seed of random numbers.

    Raises:
        ValueError: If the method cannot be used (`check_method`).
    """

    def __init__(
        self,
        method: Method,
        shapes: Sequence[Sequence[int]],
        by_examples: bool = False,
        seed: int = 0,
    ):
        check_method(method, by_examples)
        fused, self._method = method.fused(), method
        self.layout = Layout.from_shapes(shapes, method.block_size)
        self.by_examples, self._seed = by_examples, seed
        self._by_tensor = method.needs_whole_tensors
        self._compressor = fused.compressor
        # The one-pass kernels take no weights.
        self._server = method.server if by_examples else fused.server
        self._fields = self._compressor.fields(self.layout)

    @property
    def most_bytes(self) -> int:
        """The length of the longest payload, in bytes."""
        return 4 * messages.message_words(self._fields)

    def client_state(self, saved: Mapping[str, np.ndarray] | None = None) -> State:
        """Returns a client's state: the first, or that among the arrays of a file."""
        return self._state(self._compressor, CLIENT, saved)

    def server_state(self, saved: Mapping[str, np.ndarray] | None = None) -> State:
        """Returns the server's state: the first, or that among the arrays of a file."""
        return self._state(self._server, SERVER, saved)

    def _state(self, part, owner, saved):
        first = contracts.initial_state(part, self.layout, self._by_tensor)
        if saved is None:
            return first
        leaves = contracts.named_leaves(first).items()
        values = [tf.cast(saved[f"{owner}.{k}"], leaf.dtype) for k, leaf in leaves]
        return tf.nest.pack_sequence_as(first, values)

    def compress(
        self, delta: np.ndarray, state: State, step: int, number: int
    ) -> Compressed:
        """Compresses a client's difference from the anchor.

        Args:
            delta: The anchor less the client's weights.
            state: The client's state.
            step: Number of the payload.
            number: Number of the client.

        Raises:
            FloatingPointError: If `delta` or the payload is not finite.
        """
        context = self._client_context(step, number)
        x = tf.constant(delta, tf.float32)
        done = checked_compress(self._compressor, x, state, self.layout, context)
        if not bool(tf.reduce_all(tf.math.is_finite(x)) & done.is_all_finite(x)):
            raise FloatingPointError(
                "The weights after the local steps are NaN or Inf, so nothing was "
                "sent. Lower the inner learning rate, or clip (clipnorm=...). "
                f"Received: step={step}"
            )
        words = messages.pack(done.payload, self._fields)
        return Compressed(_to_bytes(words), done.state)

    def figures(
        self,
        delta: np.ndarray,
        payload: bytes,
        before: State,
        after: State,
        step: int,
        number: int,
    ) -> dict[str, float]:
        """Returns what `CompressionMonitor` shows of a payload.

        Args:
            delta: The difference that was compressed.
            payload: Its payload.
            before: The client's state before it compressed.
            after: The state that this has returned.
            step: Number of the payload.
            number: Number of the client.
        """
        compressor = self._method.compressor
        fields = self._unpack(payload, self._fields)
        vectors = measures.Vectors.of(
            compressor,
            tf.constant(delta, tf.float32),
            before,
            fields,
            self.layout,
            self._client_context(step, number),
            elements_sent=compressor.elements_sent(fields, self.layout),
        )
        residuals = measures.residuals(compressor, after, self.layout)
        found = measures.figures(measures.sums(vectors, residuals))
        names = measures.names(compressor, bool(residuals), has_server_residual=False)
        figures = {name: float(found[name]) for name in names}
        return {**figures, "bits_per_element": self.bits_per_element(len(payload))}

    def server_figures(self, state: State) -> dict[str, float]:
        """Returns what `CompressionMonitor` shows of the server's state."""
        residuals = measures.residual_leaves(state)
        if not residuals:
            return {}
        length = math.sqrt(sum(float(measures.square(leaf)) for leaf in residuals))
        return {"server_residual_norm": length}

    def bits_per_element(self, count: int) -> float:
        """Returns the bits an element of a payload or reply of some bytes."""
        return 8 * count / self.layout.size

    def decode(self, payload: bytes) -> np.ndarray:
        """Returns the vector that a client's payload stands for.

        Raises:
            MessageError: If the bytes are no payload of this method, or one of numbers
                that are not finite.
        """
        fields = self._unpack(payload, self._fields)
        return self._checked(self._compressor.decompress, fields, self.layout)

    def combine(
        self,
        payloads: Sequence[bytes],
        weights: Sequence[float],
        state: State,
        step: int,
    ) -> Combined:
        """Returns the reply to payloads, and the server's new state.

        Args:
            payloads: Payloads that `decode` has accepted, in the order of clients.
            weights: Their weights; used if means are weighted.
            state: The server's state.
            step: Number of the round.
        """
        count = len(payloads)
        context = Context.at_rate_one(step, 0, count, self._seed).at_server()
        if self.by_examples:
            context = context._replace(weights=tf.constant(weights, tf.float32))
        rows = [self._unpack(payload, self._fields) for payload in payloads]
        stacked = {name: _stack([row[name] for row in rows]) for name in self._fields}
        declared = self._server.reply_fields(self.layout, count)
        reply, state = checked_combine(
            self._server, stacked, state, self.layout, context, declared
        )
        return Combined(_to_bytes(messages.pack(reply, declared)), state)

    def decode_reply(self, reply: bytes, num_workers: int) -> np.ndarray:
        """Returns the update that a reply stands for.

        Raises:
            MessageError: As `decode` does.
        """
        declared = self._server.reply_fields(self.layout, num_workers)
        fields = self._unpack(reply, declared)
        return self._checked(self._server.decompress, fields, self.layout, num_workers)

    def _client_context(self, step, number):
        return Context.at_rate_one(step, rank=number, seed=self._seed)

    def _unpack(self, data: bytes, fields: dict[str, Field]) -> Fields:
        most, least = messages.message_words(fields), messages.fixed_words(fields)
        if len(data) % 4 or not 4 * least <= len(data) <= 4 * most:
            raise MessageError(
                f"A payload of this method and model has {4 * least} to {4 * most} "
                f"bytes, in words of 4. Received: {len(data)} bytes"
            )
        words = np.frombuffer(data, "<i4").astype(np.int32)
        return messages.unpack(tf.constant(words), fields)

    def _checked(self, decompress, *arguments):
        try:
            vector = tf.convert_to_tensor(decompress(*arguments)).numpy()
        except tf.errors.InvalidArgumentError as error:
            raise MessageError(
                f"The words are no payload of this method. Received: {error.message}"
            ) from error
        if not np.isfinite(vector).all():
            raise MessageError("The payload has numbers that are NaN or Inf.")
        return vector


def arrays_of(state: State, owner: str) -> dict[str, np.ndarray]:
    """Returns the leaves of a state for a file, as float32.

    Args:
        state: The state.
        owner: Whose it is, `CLIENT` or `SERVER`: the names begin with it.
    """
    leaves = contracts.named_leaves(state).items()
    return {f"{owner}.{k}": tf.cast(leaf, tf.float32).numpy() for k, leaf in leaves}


def _stack(rows: Sequence[tf.Tensor]) -> tf.Tensor:
    longest = max(row.shape[0] for row in rows)
    if any(row.shape[0] < longest for row in rows):
        rows = [messages.padded(row, longest) for row in rows]
    return tf.stack(rows)


def _to_bytes(words: tf.Tensor) -> bytes:
    return words.numpy().astype("<i4").tobytes()
