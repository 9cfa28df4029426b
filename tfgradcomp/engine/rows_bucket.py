"""A bucket of one table, whose gradient names the rows that it has values for."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.core import SplitVector
from tfgradcomp.core.logging import logger
from tfgradcomp.engine.consistency_check import path_of
from tfgradcomp.engine.gradient_bucket import (
    BucketResult,
    BucketState,
    GradientBucket,
)
from tfgradcomp.engine.probe import IGNORE
from tfgradcomp.transports import Route, RowsRoute
from tfgradcomp.transports.rows import TouchedRows


class RowsBucket(GradientBucket):
    """A table, of which only the rows travel that some worker has touched in the step.

    The state is that of the whole table, read and written at these rows alone: what is
    owed to the others waits until they are touched again. A gradient that is dense goes
    the way of all others, with the same state.

    Attributes:
        rows_route: The method on its way with some rows of the table.
        num_rows: Rows of the table.
        width: Elements of a row.
    """

    def __init__(
        self,
        *args: Any,
        rows_route: RowsRoute,
        num_rows: int,
        **kwargs: Any,
    ):
        """Creates the variables of the state.

        Args:
            *args: Those of `GradientBucket`.
            rows_route: The method, bound to `transports.Rows`.
            num_rows: Rows of the table.
            **kwargs: Those of `GradientBucket`.
        """
        super().__init__(*args, **kwargs)
        self.rows_route = rows_route
        self.num_rows, self.width = num_rows, self.size // num_rows
        # All that travels is counted in the step: the gradient may be a dense one.
        self.has_variable_length = True
        self._has_said_dense = False

    @override
    def exchange(
        self, gradients, weights, context, is_uncompressed_step=False, observer=IGNORE
    ):
        (position,) = self.positions
        gradient = gradients.values[position]
        if not isinstance(gradient, tf.IndexedSlices):
            self._say_dense(weights[position], gradient)
            whole = super().exchange(gradients, weights, context, observer=observer)
            return whole._replace(variable_length_words=_words_gathered(self.route))
        observer.ready([gradient])
        rows_route = observer.timed(self.rows_route)
        touched = rows_route.agree(gradient.indices)
        rows = touched.rows
        route = rows_route.at(tf.size(rows) * self.width)
        worker, server, local = (
            tf.nest.map_structure(lambda leaf: leaf.rows_at(rows, self.width), nest)
            for nest in (self.state.worker, self.state.server, self.state.local)
        )
        values = tf.reshape(tf.cast(gradient.values, tf.float32), [-1, self.width])
        places = tf.searchsorted(rows, gradient.indices)[:, tf.newaxis]
        own = tf.scatter_nd(places, values, [tf.size(rows), self.width])
        x = SplitVector([own], gradients.scale)
        observer.flattened(x, worker)
        sent = self._compress(x, worker, gradients, context, route)
        observer.encoded(sent)
        result = route.exchange(sent.payload, server, sent.context, sent.flag)
        observer.exchanged(result.update)
        update = tf.convert_to_tensor(result.update)
        if self._weight_decay:
            table = tf.reshape(tf.cast(weights[position], tf.float32), [-1, self.width])
            some = tf.reshape(tf.gather(table, rows), [-1])
            term, local = self._weight_decay.term(some, local)
            update += term
        new = tf.nest.map_structure(
            lambda values: self._slices(values, touched),
            BucketState(sent.worker_state, (), result.state, local),
        )
        return BucketResult(
            self._slices(update, touched),
            new,
            result.nonfinite_flags,
            touched.count * self.width,
            touched.words + result.variable_length_words,
        )

    @override
    def split(self, vector):
        if isinstance(vector, tf.IndexedSlices):
            (piece,) = self.pieces
            return {piece: vector}
        return super().split(vector)

    def _say_dense(self, table, gradient):
        """Logs, once, that a gradient which might have been sparse is not."""
        if gradient is None or self._has_said_dense or self.rows_route.collectives.rank:
            return
        self._has_said_dense = True
        logger.info(
            "The gradient of %s is dense, and travels apart from those of other "
            "variables. sparse='dense' lets it travel with them",
            path_of(table),
        )

    def _slices(self, vector: tf.Tensor, touched: TouchedRows) -> tf.IndexedSlices:
        """Returns rows that were touched, as slices of the whole table."""
        values = tf.reshape(vector, [-1, self.width])[: touched.count]
        return tf.IndexedSlices(
            values,
            touched.rows[: touched.count],
            tf.constant([self.num_rows, self.width]),
        )


def _words_gathered(route: Route) -> int:
    """The words of a route, as if each worker had handed them to a gather."""
    return round(route.words.sent / max(route.num_workers - 1, 1))
