"""The step and the transport of workers that do not wait for each other."""

from __future__ import annotations

from typing import cast

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.engine import inner_step, nonfinite
from tfgradcomp.engine.exchange import Exchange, compress
from tfgradcomp.engine.gradient_bucket import GradientBucket
from tfgradcomp.engine.probe import IGNORE
from tfgradcomp.engine.step import Stepper, pairs_of
from tfgradcomp.engine.step_records import StepInputs
from tfgradcomp.parameter_server.push_log import PushLog
from tfgradcomp.parameter_server.push_route import LogCollectives, PushLogRoute
from tfgradcomp.parameter_server.transport import ParameterServer


class PushLogStepper(Stepper):
    """Pushes a gradient, then applies the log up to and including this push.

    The routes of its buckets are `PushLogRoute`s.

    Attributes:
        staleness: int64 variable, the number of pushes of other workers between the
            weights of a gradient and its push, summed over this worker's pushes.
    """

    collectives: LogCollectives

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.staleness = PerReplicaVariable(tf.constant(0, tf.int64), "staleness")
        self._trained = self._variables

    @override
    def take(self, gradients, variables):
        log, rank = self.collectives.channel, self.collectives.rank
        sent, pushed = [], []
        weights = compat.decayed(self.inner, self._variables)
        # Which variables wait is the same in all steps of a training.
        self._trained = variables
        for bucket in self.exchange_of(variables).buckets:
            step = StepInputs(gradients, weights, self.context())
            operands = bucket.operands(step, Exchange.route_of, IGNORE)
            sent.append(compress(operands))
            pushed.append(self._push(operands, sent[-1]).content)
        elements = [outgoing.elements_sent for outgoing in sent]
        words = [push.variable_length_words for push in pushed]
        for counters, counts in self.scalars.counted(self.buckets, elements, words):
            counters.assign(counts)
        if gradients.calls:
            # The window's gradients are pushed; other workers' pushes may come before.
            inner_step.rewind_window(self.inner)
            self.forget_moments()
        sending = [operation for push in pushed for operation in push.operations]
        announced = log.announce(rank, sending)
        known = [push.known_replies for push in pushed]

        def follow(_, count):
            pusher = log.next(self.collectives.peer)
            self._follow(pusher, known)
            return pusher, count + 1

        # Until then, this worker must not make room in the log for other pushes.
        with tf.control_dependencies([announced]):
            _, count = tf.while_loop(
                lambda pusher, _: pusher != rank,
                follow,
                [tf.constant(-1), tf.constant(0, tf.int64)],
                parallel_iterations=1,
            )
        self.staleness.assign(self.staleness + count - 1)

    def drain(self) -> tf.Tensor:
        """Applies the rest of the log, and returns the entry at its end."""
        log, peer = self.collectives.channel, self.collectives.peer

        def follow(pusher):
            self._follow(pusher, [()] * len(self.buckets))
            return (log.next(peer),)

        return tf.while_loop(
            lambda pusher: pusher < log.num_workers,
            follow,
            [log.next(peer)],
            parallel_iterations=1,
        )[0]

    def _push(self, operands, sent):
        """Pushes a bucket, and updates the worker's state at once."""
        bucket, server = operands.bucket, operands.state.server
        after = bucket.state._replace(worker=sent.worker_state)
        after = bucket.without_waiting(after, sent.context)
        is_finite = tf.equal(sent.flag, 0)
        tf.nest.map_structure(
            lambda variable, new: variable.assign(
                tf.where(is_finite, new, tf.convert_to_tensor(variable))
            ),
            bucket.state.worker,
            after.worker,
        )
        return bucket.route.push(sent.payload, server, sent.context, sent.flag)

    def _follow(self, pusher, known):
        """Applies a worker's next push; `known` has the replies to this worker's."""
        if self.inner.gradient_accumulation_steps:
            inner_step.go_to_end_of_window(self.inner)
        context = self.context()
        decayed = compat.decayed(self.inner, self._variables)
        updates, state, flags = [], [], []
        variables = self._trained
        buckets = cast(list[GradientBucket], self.exchange_of(variables).buckets)
        for bucket, replies in zip(buckets, known, strict=True):
            before = tf.nest.map_structure(tf.convert_to_tensor, bucket.state)
            route = cast(PushLogRoute, bucket.route)
            pending = route.pending_push_of(pusher, context, replies)
            result = route.pull(pending, before.server)
            weights = bucket.weights_to_decay(decayed)
            update, local = bucket.local_terms(
                result.update, weights, before.local, context
            )
            after = bucket.without_waiting(before._replace(local=local), context)
            updates.append((bucket, update))
            state += pairs_of(bucket.state.local, after.local)
            state += pairs_of(bucket.state.server, result.state)
            flags.append(result.nonfinite_flags)
        self.commit(updates, state, nonfinite.first_of(flags), variables, context)


class PushLogTransport(ParameterServer):
    """Pushes gradients to the parameter servers without a barrier, into a `PushLog`."""

    payload_kind = (
        f"{ParameterServer.payload_kind}; a mean over all workers, and state that "
        "depends on the reply, need a barrier"
    )
    route_class = PushLogRoute
    carries_plain = True
    collectives_class = LogCollectives
    channel_class = PushLog
    stepper_class = PushLogStepper

    @override
    def supports(self, method, layout):
        compressor = method.compressor
        has_mean = bool(compressor.mean_reduced_fields(layout))
        needs_barrier = has_mean or compressor.hears_reply
        return super().supports(method, layout) and not needs_barrier
