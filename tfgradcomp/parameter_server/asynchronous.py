"""The step of a worker that waits for nobody."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.optimizers import CompressedOptimizer, nonfinite


@functools.cache
def asynchronous(kind: type[CompressedOptimizer]) -> type[CompressedOptimizer]:
    """Returns a class like `kind` that pushes its gradient and follows the log.

    Its transport must be a `tfgradcomp.transports.PushPull`. `drain` applies what is
    left of the log; the variable `staleness` counts how many pushes of others came
    between a gradient's weights and its own push, over all own pushes.
    """
    return type(kind.__name__, (_Asynchronous, kind), {})


class _Asynchronous:
    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        for channel in self._channels:
            channel.transport = self.transport
        self.staleness = PerReplicaVariable(tf.constant(0, tf.int64), "staleness")

    def _update(self, gradients, moments, kept, variables, scale):
        table = self._table(gradients, variables)
        log, rank = self.transport.collectives.log, self.transport.collectives.rank
        pushes = [self._push(channel, table, scale) for channel in self._channels]
        log.announce(rank, [sent for sendings, _ in pushes for sent in sendings])
        own = [answers for _, answers in pushes]

        def follow(_, count):
            pusher = log.next(rank)
            self._follow(pusher, gradients, variables, own)
            return pusher, count + 1

        _, count = tf.while_loop(
            lambda pusher, _: pusher != rank,
            follow,
            [tf.constant(-1), tf.constant(0, tf.int64)],
            parallel_iterations=1,
        )
        self.staleness.assign(self.staleness + count - 1)

    def drain(self):
        """Applies what is left of the log, to its end."""
        log, rank = self.transport.collectives.log, self.transport.collectives.rank
        variables = self._trainable_variables

        def follow(pusher):
            self._follow(pusher, variables, variables, [()] * len(self._channels))
            return (log.next(rank),)

        tf.while_loop(
            lambda pusher: pusher < log.num_workers,
            follow,
            [log.next(rank)],
            parallel_iterations=1,
        )

    def _push(self, channel, table, scale):
        own = [tf.zeros([0])]

        def largest(vector):
            own.append(vector)
            last = tf.convert_to_tensor(channel.state["server"]["last"])
            return tf.maximum(vector, tf.reduce_max(last, axis=0))

        context = self._context()._replace(offset=channel.bucket.offset, max=largest)
        before = tf.nest.map_structure(tf.convert_to_tensor, channel.state["worker"])
        payload, after, finite = channel.compressor.compress_checked(
            channel.flatten(table, scale), before, channel.layout, context
        )
        status = tf.cond(
            finite,
            lambda: tf.constant(0),
            lambda: nonfinite.locate(
                {i: table[i] for i in channel.positions}, len(table), scale
            ),
        )
        tf.nest.map_structure(
            lambda variable, old, new: variable.assign(tf.where(finite, new, old)),
            *(channel.state["worker"], before, after),
        )
        return channel.transport.push(
            payload,
            own[-1],
            *(channel.compressor, channel.server, channel.layout),
            *(context, status, channel.name),
        )

    def _follow(self, pusher, gradients, variables, own):
        """Applies a push; `own` are the answers that this worker knows itself."""
        rank = self.transport.collectives.rank
        context = self._context()
        pieces, state, statuses = {}, [], []
        for channel, answers in zip(self._channels, own, strict=True):
            update, status, had = channel.transport.pull(
                *(channel.compressor, channel.server, channel.layout),
                *(channel.name, pusher, answers),
            )
            if channel.weight_decay:
                weights = channel.flatten(self._trainable_variables)
                local = tf.nest.map_structure(
                    tf.convert_to_tensor, channel.state["local"]
                )
                term, local = channel.weight_decay.term(weights, local)
                update += term
                pairs = zip(
                    *map(tf.nest.flatten, (channel.state["local"], local)), strict=True
                )
                state.extend(pairs)
            if channel.state["server"]:
                last = channel.state["server"]["last"]
                rows = tf.range(last.shape[0])[:, tf.newaxis]
                is_new = (rows == pusher) & (rows != rank)
                state.append((last, tf.where(is_new, had, tf.convert_to_tensor(last))))
            pieces.update(channel.split(update))
            statuses.append(status[tf.newaxis])
        status = nonfinite.first_of(statuses)
        workers = self.transport.collectives.log.num_workers
        statuses = status * tf.one_hot(pusher, workers, dtype=tf.int32)
        self._commit(pieces, state, statuses, gradients, variables, context)
