"""The exchange of a step: from this worker's gradients to the update of all workers."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.engine import nonfinite
from tfgradcomp.engine.device_sharded_bucket import Bucket
from tfgradcomp.engine.gradient_bucket import GradientBucket, Operands
from tfgradcomp.engine.probe import IGNORE, ExchangeObserver
from tfgradcomp.engine.step_records import (
    BucketResult,
    BucketState,
    CompressedBucket,
    StepInputs,
)
from tfgradcomp.transports import ExchangeResult, Route, SharedGather


class Exchange:
    """The exchange of compressed steps.

    Buckets that are gathered, each the whole of its vector, share one message. Buckets
    of a vector that is cut do not: some travel while others are computed. Neither the
    results nor the bytes depend on it.

    Attributes:
        buckets: The buckets, in their order.
        is_uncompressed: Whether the gradients travel as float32.
    """

    is_uncompressed = False

    def __init__(self, buckets: Sequence[Bucket]):
        self.buckets = buckets
        vectors = [bucket.vector for bucket in buckets]
        batched = [
            index
            for index, bucket in enumerate(buckets)
            if bucket.can_batch and vectors.count(bucket.vector) == 1
        ]
        has_batch = len(batched) > 1 and not self.is_uncompressed
        self._batched = batched if has_batch else []
        if has_batch:
            self._gather = SharedGather([buckets[index].route for index in batched])

    def exchange_all(
        self, step: StepInputs, observers: Sequence[ExchangeObserver]
    ) -> list[BucketResult]:
        """Returns the results of all buckets, each exchanged under its observer."""
        pairs = list(zip(self.buckets, observers, strict=True))
        results = {
            index: self.exchange(bucket, step, observer)
            for index, (bucket, observer) in enumerate(pairs)
            if index not in self._batched
        }
        batch = [pairs[index] for index in self._batched]
        if batch:
            shared = self._exchange_batch(batch, step)
            results.update(zip(self._batched, shared, strict=True))
        return [results[index] for index in range(len(pairs))]

    def exchange(
        self, bucket: Bucket, step: StepInputs, observer: ExchangeObserver
    ) -> BucketResult:
        """Compresses a gradient, carries it to the server and decodes the reply."""
        operands = bucket.operands(step, self.route_of, observer)
        sent = compress(operands, observer, step.notice)
        reply = self._carry(operands, sent)
        return bucket.completed(finish(operands, sent, reply, observer), operands)

    def _exchange_batch(self, batch, step):
        """Does what `exchange` does, for buckets whose payloads share one message."""
        gather, prepared = self._gather, []
        for bucket, observer in batch:
            operands = bucket.operands(step, self.route_of, observer)
            prepared.append((operands, compress(operands, observer, step.notice)))
            gather = observer.timed(gather)
        replies = gather.exchange(
            [(sent.payload, sent.context, sent.flag) for _, sent in prepared],
            [operands.state.server for operands, _ in prepared],
        )
        return [
            bucket.completed(finish(operands, sent, reply, observer), operands)
            for (bucket, observer), (operands, sent), reply in zip(
                batch, prepared, replies, strict=True
            )
        ]

    @staticmethod
    def route_of(bucket: GradientBucket) -> Route:
        """Returns the route that a bucket takes in these steps."""
        return bucket.route

    def _carry(self, operands, sent):
        server = operands.state.server
        return operands.route.exchange(sent.payload, server, sent.context, sent.flag)


class UncompressedExchange(Exchange):
    """The exchange of uncompressed steps, which bypass the method's server."""

    is_uncompressed = True

    @staticmethod
    @override
    def route_of(bucket):
        return bucket.uncompressed_route

    @override
    def _carry(self, operands, sent):
        reply = operands.route.exchange(sent.payload, (), sent.context, sent.flag)
        route = operands.bucket.route
        owned = route.owned_range(sent.context.rank)
        context = sent.context.at_server()
        context = context._replace(offset=context.offset + owned.start)
        server = route.method.server.wait(operands.state.server, context)
        return reply._replace(state=server)


def compress(
    operands: Operands,
    observer: ExchangeObserver = IGNORE,
    notice: tf.Tensor | None = None,
) -> CompressedBucket:
    """Compresses this worker's mean gradient, after the first round if there is one."""
    route, x, state = operands.route, operands.x, operands.state
    observer.note("flattened", list(x))
    compressed, context = route.compress(
        x, state.worker, state.server, operands.context
    )
    is_finite = compressed.is_all_finite(x)
    # The padding before the first variable is finite.
    positions = operands.bucket.positions
    padding = len(x.tensors) - len(positions)
    places = positions[:1] * padding + positions
    flag = nonfinite.flag_of(is_finite, x, places, operands.num_variables)
    flag = nonfinite.with_notice(flag, notice)
    compressor = route.method.compressor
    elements_sent = compressor.elements_sent(compressed.payload, route.layout)
    observer.note("encoded", compressed.payload)
    return CompressedBucket(
        compressed.payload, context, flag, compressed.state, elements_sent
    )


def finish(
    operands: Operands,
    sent: CompressedBucket,
    reply: ExchangeResult,
    observer: ExchangeObserver,
) -> BucketResult:
    """Adds weight decay and noise to a reply, and joins the new states."""
    before, route = operands.state, operands.route
    worker = route.received(sent.worker_state, reply, sent.context)
    observer.exchanged(operands.x, before.worker, sent, reply.update)
    update, local = operands.bucket.local_terms(
        reply.update, operands.weights, before.local, sent.context
    )
    moments = tf.nest.map_structure(tf.zeros_like, before.moments)
    return BucketResult(
        update,
        BucketState(worker, moments, reply.state, local),
        reply.nonfinite_flags,
        sent.elements_sent,
        reply.variable_length_words,
    )
