"""The states of methods on parameter servers, and their form as whole vectors.

A round ends for all workers or for none, so either all workers commit it or no worker
does. A server learns the outcome from the step of the next messages, because no worker
sends messages of a committed step again. Until then, it keeps the state before the last
round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.core import Context, State
from tfgradcomp.core.waiting_elements import WaitingElements
from tfgradcomp.transports import messages
from tfgradcomp.transports.sharding import Division, Sharding


class ServerState:
    """The state of the server with an index, before and after the last round.

    Attributes:
        waiting: The elements of the whole vector that take no part in the steps; None
            where all do.
    """

    waiting: WaitingElements | None = None
    _stores_after = True

    def __init__(self, division: Division, index: int, initial: State):
        self._division, self._index = division, index
        self._before = _variables(initial)
        self._after = _variables(initial if self._stores_after else ())
        self._step = tf.Variable(tf.constant(-1, tf.int64))

    def next(self, context: Context, rows: tf.Tensor, deferred: tf.Tensor) -> tf.Tensor:
        """Returns the reply to the workers' words, int32 `[N, payload_words]`.

        `deferred` has the words of the `deferred_reply` in the last whole reply.
        """
        current = self._current(context.step, deferred)
        reply, state = self._combined(rows, current, context)
        _assign(self._before, current)
        self._keep(context, rows, reply, state)
        self._step.assign(context.step)
        return reply

    def _combined(self, rows, current, context):
        """Returns the reply and the next state; the state of what waits stays."""
        division, index = self._division, self._index
        before = self._joined(current, division.init_state(index))
        reply, state = division.combine(index, rows, before, context)
        return reply, self._joined(state, current)

    def _joined(self, state, waiting):
        """Returns a state in which the elements that wait have another state."""
        if self.waiting is None:
            return state
        elements, owned = self.waiting, self._division.owned_range(self._index)
        return tf.nest.map_structure(
            lambda value, other: elements.joined(value, other, owned), state, waiting
        )

    def _current(self, step, deferred):
        """Returns the state for the messages of `step`."""
        return tf.nest.map_structure(
            lambda before, after: tf.where(step > self._step, after, before),
            self._before,
            self._after,
        )

    def _keep(self, context, rows, reply, state):
        """Stores a round's result, from which `_current` follows if it is committed."""
        _assign(self._after, state)

    def follow(
        self, context: Context, rows: tf.Tensor, is_valid: tf.Tensor
    ) -> tf.Tensor:
        """Returns the reply to a pusher's words, int32 `[1, payload_words]`.

        The push is committed if `is_valid`, which tells whether all workers apply it.
        """
        current = tf.nest.map_structure(tf.convert_to_tensor, self._after)
        reply, state = self._combined(rows, current, context)
        chosen = tf.nest.map_structure(
            lambda old, new: tf.where(is_valid, new, old), current, state
        )
        _assign(self._after, chosen)
        return reply

    def leaves(self, step: int, kept: State) -> list[np.ndarray]:
        """Returns the vectors of the state after a number of committed steps.

        `kept` is a worker's part of the servers' state, as arrays.
        """
        deferred = tf.bitcast(kept["deferred"], tf.int32) if "deferred" in kept else ()
        current = self._current(tf.constant(step, tf.int64), deferred)
        return [leaf.numpy() for leaf in tf.nest.flatten(current)]

    def restore(self, leaf: int, vector: np.ndarray) -> None:
        """Replaces a vector of the state, as if before any step."""
        for state in (self._before, self._after):
            tf.nest.flatten(state)[leaf].assign(vector)
        self._step.assign(-1)


class DeferredState(ServerState):
    """A server's state before the last round, and the data for the state after it.

    These data are the words received and replied in that round, and the fields of
    `deferred_reply`, which the workers send with their next messages.
    """

    _stores_after = False

    def __init__(
        self,
        division: Sharding,
        index: int,
        initial: State,
        num_workers: int,
        context: Context,
    ):
        super().__init__(division, index, initial)
        self._context = context
        shape = [num_workers, division.payload_words]
        self._rows = tf.Variable(tf.zeros(shape, tf.int32))
        self._reply = tf.Variable(tf.zeros([division.reply_words], tf.int32))
        # With a learning rate of 0 no state changes.
        self._rates = tf.Variable([0.0, 0.0])
        self._seed = tf.Variable(tf.constant(0, tf.int64))

    @override
    def _keep(self, context, rows, reply, state):
        self._rows.assign(rows)
        self._reply.assign(reply)
        rates = context.learning_rate, context.previous_learning_rate
        self._rates.assign(tf.stack(rates))
        self._seed.assign(context.seed)

    @override
    def _current(self, step, deferred):
        rate, previous = tf.unstack(tf.convert_to_tensor(self._rates))
        # Random numbers must be those of the round that the state follows from.
        context = self._context.at_server()._replace(
            step=tf.convert_to_tensor(self._step),
            seed=tf.convert_to_tensor(self._seed),
            learning_rate=rate,
            previous_learning_rate=previous,
        )
        before = tf.nest.map_structure(tf.convert_to_tensor, self._before)
        rows = tf.convert_to_tensor(self._rows)
        words = tf.convert_to_tensor(self._reply)
        sharding = cast(Sharding, self._division)
        whole = messages.unpack(deferred, sharding.deferred_reply)

        def after():
            first = self._joined(before, sharding.init_state(self._index))
            found = sharding.finish(self._index, rows, words, whole, first, context)
            return self._joined(found, before)

        return tf.cond(step > self._step, after, lambda: before)

    @override
    def restore(self, leaf, vector):
        tf.nest.flatten(self._before)[leaf].assign(vector)
        self._rates.assign([0.0, 0.0])
        self._step.assign(-1)


class ServerStates:
    """The states of all servers, by call site.

    `inherited` is `whole` of earlier servers, or an empty dictionary.
    """

    def __init__(
        self,
        devices: Sequence[str],
        num_workers: int,
        inherited: dict[str, list[np.ndarray]],
    ):
        self._devices, self._num_workers = tuple(devices), num_workers
        self._inherited = inherited
        self._states: dict[tuple[str, int], ServerState] = {}
        self._owned: dict[tuple[str, int], slice] = {}

    def get(
        self,
        call_site: str,
        index: int,
        division: Division,
        context: Context,
        waiting: WaitingElements | None = None,
    ) -> ServerState:
        """Returns a server's state at a call site, created at its first use.

        `context` may be of any step: its constant attributes are used. `waiting` are
        the elements that take no part in the steps that are being traced.
        """
        key = call_site, index
        if key not in self._states:
            owned = division.owned_range(index)
            self._owned[key] = slice(owned.start, owned.stop)
            with tf.init_scope(), tf.device(self._devices[index]):
                initial = division.init_state(index)
                if call_site in self._inherited:
                    whole = self._inherited[call_site]
                    leaves = [vector[self._owned[key]] for vector in whole]
                    initial = tf.nest.pack_sequence_as(initial, leaves)
                if isinstance(division, Sharding) and division.deferred_reply:
                    self._states[key] = DeferredState(
                        division, index, initial, self._num_workers, context
                    )
                else:
                    self._states[key] = ServerState(division, index, initial)
        self._states[key].waiting = waiting
        return self._states[key]

    def whole(self, step: int, kept: dict[str, State]) -> dict[str, list[np.ndarray]]:
        """Returns the vectors of the state of all servers, by call site.

        The arguments are those of `ServerState.leaves`, with `kept` by call site.
        """
        call_sites = dict.fromkeys(call_site for call_site, _ in self._states)
        return {name: self.whole_at(name, step, kept) for name in call_sites}

    def whole_at(
        self, call_site: str, step: int, kept: dict[str, State]
    ) -> list[np.ndarray]:
        """Returns the vectors of the state at a call site, like `whole`."""
        parts = []
        for index, device in enumerate(self._devices):
            if (call_site, index) in self._states:
                with tf.device(device):
                    state = self._states[call_site, index]
                    parts.append(state.leaves(step, kept.get(call_site, ())))
        return [np.concatenate(leaf) for leaf in zip(*parts, strict=True)]

    def restore(self, call_site: str, leaf: int, whole: np.ndarray) -> None:
        """Replaces the vector with index `leaf` of `whole_at`, between steps."""
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
