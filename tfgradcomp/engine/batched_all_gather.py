"""One message for the buckets of several methods, where their transport allows it."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgradcomp.core import Context
from tfgradcomp.engine.device_sharded_bucket import DeviceShardedBucket
from tfgradcomp.engine.gradient_bucket import (
    BucketResult,
    GradientBucket,
    Gradients,
)
from tfgradcomp.engine.probe import ExchangeObserver
from tfgradcomp.engine.rows_bucket import RowsBucket
from tfgradcomp.transports import SharedGather


class BatchedAllGather:
    """Exchanges buckets together that are gathered, each the whole of its vector.

    A vector that is cut into several buckets travels while others are computed, so that
    nothing is won by waiting for all of them. Neither the results nor the bytes change.

    Args:
        buckets: The buckets of an optimizer.

    Attributes:
        indices: Which of them travel together; none if there are not two.
    """

    def __init__(self, buckets: Sequence[GradientBucket]):
        vectors = [bucket.vector for bucket in buckets]
        indices = [
            index
            for index, bucket in enumerate(buckets)
            if vectors.count(bucket.vector) == 1
            and not isinstance(bucket, (DeviceShardedBucket, RowsBucket))
            and SharedGather.takes(bucket.route)
        ]
        self.indices = indices if len(indices) > 1 else []
        self._buckets = [buckets[index] for index in self.indices]
        if self.indices:
            self._gather = SharedGather([bucket.route for bucket in self._buckets])

    def exchange(
        self,
        gradients: Gradients,
        weights: list,
        context: Context,
        observers: Sequence[ExchangeObserver],
    ) -> dict[int, BucketResult]:
        """Does what `GradientBucket.exchange` does, for buckets that there are.

        Args:
            gradients: This worker's gradients.
            weights: As `GradientBucket.exchange` takes them.
            context: The step.
            observers: Are told what happens; one for each bucket of the optimizer.

        Returns:
            The results, by the indices of the buckets.
        """
        own = [observers[index] for index in self.indices]
        outgoing, states, gather = [], [], self._gather
        for bucket, observer in zip(self._buckets, own, strict=True):
            observer.ready(
                [gradients.values[position] for position in bucket.positions]
            )
            sent = bucket.compress(
                gradients, context, observer.timed(bucket.route), observer
            )
            observer.encoded(sent)
            outgoing.append(sent)
            server = bucket.state.server
            states.append(tf.nest.map_structure(tf.convert_to_tensor, server))
            gather = observer.timed(gather)
        exchanged = gather.exchange(
            [(sent.payload, sent.context, sent.flag) for sent in outgoing], states
        )
        results = []
        for bucket, observer, result, sent in zip(
            self._buckets, own, exchanged, outgoing, strict=True
        ):
            observer.exchanged(result.update)
            results.append(bucket.finish(result, weights, sent))
        return dict(zip(self.indices, results, strict=True))
