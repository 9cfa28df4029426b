"""The state of methods on parameter servers, and its form as whole vectors.

Queues end a round as a whole, so either all workers of a round commit it or none does.
A server learns which from the step that the next messages are of, and keeps the state
before the last round until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import tensorflow as tf

from tfgradcomp.core import Context, State
from tfgradcomp.transports import messages
from tfgradcomp.transports.sharding import Division, Sharding


class ServerState:
    """A server's state after the last round, and before it.

    Workers may fail to commit a round that the server has replied to. The step of
    the next messages tells: one that was committed is never seen again.

    Args:
        sharding: The method's vector, as it is cut for the servers.
        index: Index of the server.
        initial: The first state.
    """

    def __init__(self, sharding: Division, index: int, initial: State):
        self._sharding, self._index = sharding, index
        self._before, self._after = _variables(initial), _variables(initial)
        self._step = tf.Variable(tf.constant(-1, tf.int64))

    def next(self, context: Context, rows: tf.Tensor, deferred: tf.Tensor) -> tf.Tensor:
        """Returns the reply of a round.

        Args:
            context: The step.
            rows: The workers' words, int32 `[N, payload_words]`.
            deferred: What the workers tell of the whole reply of the round before.
        """
        current = tf.nest.map_structure(
            lambda before, after: tf.where(context.step > self._step, after, before),
            self._before,
            self._after,
        )
        reply, state = self._sharding.combine(self._index, rows, current, context)
        _assign(self._before, current)
        _assign(self._after, state)
        self._step.assign(context.step)
        return reply

    def follow(
        self, context: Context, rows: tf.Tensor, is_valid: tf.Tensor
    ) -> tf.Tensor:
        """Returns the reply to a push, which is committed where it is valid.

        Args:
            context: The step.
            rows: The pusher's words, int32 `[1, payload_words]`.
            is_valid: Boolean scalar, whether all workers apply the push.
        """
        current = tf.nest.map_structure(tf.convert_to_tensor, self._after)
        reply, state = self._sharding.combine(self._index, rows, current, context)
        chosen = tf.nest.map_structure(
            lambda old, new: tf.where(is_valid, new, old), current, state
        )
        _assign(self._after, chosen)
        return reply

    def leaves(self, step: int, kept: State) -> list[np.ndarray]:
        """Returns the vectors of the state that the messages of `step` will meet.

        Args:
            step: The number of steps that the workers have committed.
            kept: What a worker's route keeps of the servers' state, as arrays.
        """
        is_after = step > self._step.numpy()
        leaves = tf.nest.flatten(self._after if is_after else self._before)
        return [leaf.numpy() for leaf in leaves]

    def restore(self, index: int, vector: np.ndarray) -> None:
        """Takes over a vector of the state, as that before any step."""
        for state in (self._before, self._after):
            tf.nest.flatten(state)[index].assign(vector)
        self._step.assign(-1)


class DeferredState:
    """A server's state before the last round, and all that the next one follows from.

    That is what the server got and replied in that round, and what the workers tell
    it with their next messages: the deferred fields of the whole reply. While it waits
    for them `Sharding.combine` leaves the state as it is.

    Args:
        sharding: The method's vector, as it is cut for the servers.
        index: Index of the server.
        initial: The first state.
        num_workers: Python integer N.
        context: Any step, for what is the same in all of them.
    """

    def __init__(
        self,
        sharding: Sharding,
        index: int,
        initial: State,
        num_workers: int,
        context: Context,
    ):
        self._sharding, self._index, self._context = sharding, index, context
        self._before = _variables(initial)
        shape = [num_workers, sharding.payload_words]
        self._rows = tf.Variable(tf.zeros(shape, tf.int32))
        self._reply = tf.Variable(tf.zeros([sharding.reply_words], tf.int32))
        # With a learning rate of 0 no state changes.
        self._rates = tf.Variable([0.0, 0.0])
        self._step = tf.Variable(tf.constant(-1, tf.int64))
        self._seed = tf.Variable(tf.constant(0, tf.int64))

    def next(self, context: Context, rows: tf.Tensor, deferred: tf.Tensor) -> tf.Tensor:
        """Returns the reply of a round; see `ServerState.next` for the arguments."""
        current = self._current(context.step, deferred)
        reply, _ = self._sharding.combine(self._index, rows, current, context)
        _assign(self._before, current)
        self._rows.assign(rows)
        self._reply.assign(reply)
        rates = context.learning_rate, context.previous_learning_rate
        self._rates.assign(tf.stack(rates))
        self._step.assign(context.step)
        self._seed.assign(context.seed)
        return reply

    def leaves(self, step: int, kept: State) -> list[np.ndarray]:
        """Returns the vectors of the state that the messages of `step` will meet.

        Args:
            step: The number of steps that the workers have committed.
            kept: What a worker's route keeps of the servers' state, as arrays.
        """
        words = tf.bitcast(tf.constant(kept["deferred"]), tf.int32)
        current = self._current(tf.constant(step, tf.int64), words)
        return [leaf.numpy() for leaf in tf.nest.flatten(current)]

    def restore(self, index: int, vector: np.ndarray) -> None:
        """Takes over a vector of the state, as that before any step."""
        tf.nest.flatten(self._before)[index].assign(vector)
        self._rates.assign([0.0, 0.0])
        self._step.assign(-1)

    def _current(self, step, deferred):
        rate, previous = tf.unstack(tf.convert_to_tensor(self._rates))
        # What is drawn is drawn as in the round that the state follows from.
        context = self._context.at_server()._replace(
            step=tf.convert_to_tensor(self._step),
            seed=tf.convert_to_tensor(self._seed),
            learning_rate=rate,
            previous_learning_rate=previous,
        )
        before = tf.nest.map_structure(tf.convert_to_tensor, self._before)
        rows = tf.convert_to_tensor(self._rows)
        words = tf.convert_to_tensor(self._reply)
        whole = messages.unpack(deferred, self._sharding.deferred_reply)

        def after():
            return self._sharding.finish(
                self._index, rows, words, whole, before, context
            )

        return tf.cond(step > self._step, after, lambda: before)


class ServerStates:
    """The states of all servers, by call sites.

    Args:
        devices: Names of the servers' devices.
        num_workers: Python integer N.
        inherited: What `whole` of earlier servers returned, or nothing.
    """

    def __init__(
        self,
        devices: Sequence[str],
        num_workers: int,
        inherited: dict[str, list[np.ndarray]],
    ):
        self._devices, self._num_workers = tuple(devices), num_workers
        self._inherited = inherited
        self._states: dict = {}
        self._owned: dict = {}

    def get(
        self,
        call_site: str,
        index: int,
        sharding: Division,
        context: Context,
    ) -> ServerState | DeferredState:
        """Returns the state of a server at a call site, created at its first use.

        Args:
            call_site: Name of the call site.
            index: Index of the server.
            sharding: The method's vector, as it is cut for the servers.
            context: Any step, for what is the same in all of them.
        """
        key = call_site, index
        if key not in self._states:
            owned = sharding.owned_range(index)
            self._owned[key] = slice(owned.start, owned.stop)
            with tf.init_scope(), tf.device(self._devices[index]):
                initial = sharding.init_state(index)
                if call_site in self._inherited:
                    whole = self._inherited[call_site]
                    leaves = [vector[self._owned[key]] for vector in whole]
                    initial = tf.nest.pack_sequence_as(initial, leaves)
                if sharding.deferred_reply:
                    cut = cast(Sharding, sharding)
                    self._states[key] = DeferredState(
                        cut, index, initial, self._num_workers, context
                    )
                else:
                    self._states[key] = ServerState(sharding, index, initial)
        return self._states[key]

    def whole(self, step: int, kept: dict[str, State]) -> dict[str, list[np.ndarray]]:
        """Returns the vectors of the state at each call site, of all servers together.

        Args:
            step: The number of steps that the workers have committed.
            kept: What a worker's routes keep of the servers' state, as arrays, by call
                sites.
        """
        call_sites = dict.fromkeys(call_site for call_site, _ in self._states)
        return {name: self.whole_at(name, step, kept) for name in call_sites}

    def whole_at(
        self, call_site: str, step: int, kept: dict[str, State]
    ) -> list[np.ndarray]:
        """Returns the vectors of the state at one call site; see `whole`."""
        parts = []
        for index, device in enumerate(self._devices):
            if (call_site, index) in self._states:
                with tf.device(device):
                    state = self._states[call_site, index]
                    parts.append(state.leaves(step, kept.get(call_site, ())))
        return [np.concatenate(leaf) for leaf in zip(*parts, strict=True)]

    def restore(self, call_site: str, leaf: int, whole: np.ndarray) -> None:
        """Takes over a vector of the state at a call site, between steps.

        Args:
            call_site: Name of the call site.
            leaf: Index of the vector among those that `whole` returns.
            whole: The vector.
        """
        for (name, index), state in self._states.items():
            if name == call_site:
                with tf.device(self._devices[index]):
                    state.restore(leaf, whole[self._owned[name, index]])


def _variables(nest):
    return tf.nest.map_structure(tf.Variable, nest)


def _assign(variables, values):
    tf.nest.map_structure(
        lambda variable, value: variable.assign(value), variables, values
    )
