"""A bucket of one table, whose gradient names the rows that it has values for."""

from __future__ import annotations

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.core import SplitVector
from tfgradcomp.core.logging import logger
from tfgradcomp.engine.bucket_ranges import BucketRange
from tfgradcomp.engine.consistency_check import path_of
from tfgradcomp.engine.flat_vectors import FlatVector
from tfgradcomp.engine.gradient_bucket import GradientBucket, Operands
from tfgradcomp.engine.step_records import BucketState
from tfgradcomp.transports import Route, RowsRoute


class RowsBucket(GradientBucket):
    """A table of which only the rows travel that some worker has touched in the step.

    The state is that of the whole table. A step reads and writes the touched rows of
    it; residuals of other rows wait until these are touched again. A dense gradient
    travels like that of any other bucket, with the same state.

    Attributes:
        rows_route: The method, bound to `transports.Rows`.
        num_rows: Rows of the table.
        width: Elements of a row.
    """

    takes_rows = True

    def __init__(
        self,
        vector: FlatVector,
        bucket_range: BucketRange,
        route: Route,
        rows_route: RowsRoute,
    ):
        super().__init__(vector, bucket_range, route)
        self.rows_route, self.num_rows = rows_route, vector.num_rows or 1
        self.width = self.size // self.num_rows
        # The gradient may be dense or not: all traffic is counted in the step.
        self.has_variable_length, self.can_batch = True, False
        self._has_logged_dense = False

    @property
    @override
    def declared_routes(self):
        return []

    @override
    def operands(self, step, route_of, observer):
        (position,) = self.positions
        gradients = step.gradients
        gradient = gradients.values[position]
        if not isinstance(gradient, tf.IndexedSlices):
            self._log_dense(step.weights[position], gradient)
            return super().operands(step, route_of, observer)
        observer.note("ready", [gradient])
        rows_route = observer.timed(self.rows_route)
        touched = rows_route.agree(gradient.indices, self.num_rows)
        rows = touched.rows
        worker, server, local = (
            tf.nest.map_structure(lambda leaf: leaf.rows_at(rows, self.width), nest)
            for nest in (self.state.worker, self.state.server, self.state.local)
        )
        values = tf.reshape(tf.cast(gradient.values, tf.float32), [-1, self.width])
        places = tf.searchsorted(rows, gradient.indices)[:, tf.newaxis]
        own = tf.scatter_nd(places, values, [tf.size(rows), self.width])
        weights = self.weights_to_decay(step.weights)
        if weights is not None:
            table = tf.reshape(weights.tensors[0], [-1, self.width])
            weights = tf.reshape(tf.gather(table, rows), [-1])
        return Operands(
            self,
            rows_route.at(tf.size(rows) * self.width),
            SplitVector([own], gradients.scale),
            BucketState(worker, (), server, local),
            weights,
            step.context._replace(offset=self.offset),
            len(gradients.values),
            touched,
        )

    @override
    def completed(self, result, operands):
        touched = operands.rows
        if touched is None:
            # The words of the route, as if a gather had sent them to each worker.
            others = max(self.route.num_workers - 1, 1)
            words = round(self.route.words.sent / others)
            return result._replace(variable_length_words=words)

        def slices(vector):
            values = tf.reshape(vector, [-1, self.width])[: touched.count]
            shape = tf.constant([self.num_rows, self.width])
            return tf.IndexedSlices(values, touched.rows[: touched.count], shape)

        return result._replace(
            update=slices(result.update),
            state=tf.nest.map_structure(slices, result.state),
            elements_sent=touched.count * self.width,
            variable_length_words=touched.words + result.variable_length_words,
        )

    @override
    def split(self, vector):
        if isinstance(vector, tf.IndexedSlices):
            (piece,) = self.pieces
            return {piece: vector}
        return super().split(vector)

    def _log_dense(self, table, gradient):
        """Logs once that a gradient is dense which might have been sparse."""
        rank = self.rows_route.collectives.rank
        if gradient is None or self._has_logged_dense or rank:
            return
        self._has_logged_dense = True
        logger.info(
            "The gradient of %s is dense, and travels apart from those of other "
            "variables. sparse='dense' lets it travel with them",
            self.name if table is None else path_of(table),
        )
