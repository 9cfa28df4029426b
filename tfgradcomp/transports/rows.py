"""Exchange of a sparse gradient: only rows that some worker has touched.

The workers gather their row indices, encoded as gaps. The sorted union of these indices
is the layout of the step. Each worker compresses the union's rows, with zeros in rows
that the worker has not touched. Every worker receives all payloads and runs the server.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives import padded_size
from tfgradcomp.compressors import index_coding
from tfgradcomp.core import Layout, VaryingLayout
from tfgradcomp.methods import Method
from tfgradcomp.transports import messages
from tfgradcomp.transports.all_gather import AllGatherRoute
from tfgradcomp.transports.base import PendingExchange, Route, Transport


class TouchedRows(NamedTuple):
    """The rows of a table that some worker has touched in a step.

    Attributes:
        rows: int32, ascending; row 0 if no row was touched, as no layout may be empty.
        count: Number of touched rows, all or none of `rows`.
        words: Words that this worker passed to collectives to find the rows.
    """

    rows: tf.Tensor
    count: tf.Tensor
    words: tf.Tensor | int


class TouchedRowsRoute(AllGatherRoute):
    """The route of one step: an all-gather whose size depends on the touched rows."""

    @override
    def reduce_max(self, prepared, state):
        for name in self.max_reduced_fields:
            rows = self._gather_padded(prepared[name], f"{self.call_site}/{name}")
            size = tf.size(prepared[name])
            prepared = {**prepared, name: tf.reduce_max(rows[:, :size], 0)}
        return prepared

    @override
    def push(self, payload, state, context, flag):
        words = messages.pack(payload, self.fields)
        message = tf.concat([flag[tf.newaxis], words], 0)
        rows = self._gather_padded(message, f"{self.call_site}/message")
        return PendingExchange(
            context, (rows, tf.shape(rows)[1] + self.num_max_reduced, payload)
        )

    def _gather_padded(self, vector, call_site):
        """Gathers vectors whose common size may change in the next step."""
        if self.num_workers > 1 and vector.shape[0] is None:
            size = tf.size(vector)
            vector = tf.pad(vector, [[0, padded_size(size) - size]])
        return self.collectives.gather(vector, call_site)


class RowsRoute(Route):
    """A method bound to the rows of a table; creates a `TouchedRowsRoute` per step.

    The layout is that of the whole table. If it has several blocks, the rows of a step
    are cut into blocks of the same size.
    """

    def agree(self, indices: tf.Tensor, num_rows: int) -> TouchedRows:
        """Returns the union of the rows that the workers have touched.

        Args:
            indices: int32, this worker's rows, without duplicates.
            num_rows: Number of rows of the table. Messages with other rows or lengths
                than it has come from no worker; such rows are left out.
        """
        words: tf.Tensor | int = 0
        if self.num_workers > 1:
            encoded = index_coding.encode(tf.sort(indices), "delta", value_bits=1)
            size = tf.size(encoded)[tf.newaxis]
            sizes = self.collectives.gather(size, f"{self.call_site}/size")
            # A header, and a word for each row at most.
            longest = tf.clip_by_value(tf.reduce_max(sizes), 0, 1 + num_rows)
            count = padded_size(longest)
            padded = messages.padded(encoded, count)
            gathered = self.collectives.gather(padded, f"{self.call_site}/indices")
            indices = index_coding.decode(gathered, "delta", value_bits=1)
            is_row = (indices >= 0) & (indices < num_rows)
            indices = tf.boolean_mask(indices, is_row)
            words = 1 + count
        rows = tf.sort(tf.unique(indices).y)
        count = tf.size(rows)
        rows = tf.pad(rows, [[0, tf.cast(tf.equal(count, 0), tf.int32)]])
        return TouchedRows(rows, count, words)

    def at(self, size: tf.Tensor) -> TouchedRowsRoute:
        """Returns the route of a step.

        Args:
            size: Number of elements in the touched rows.
        """
        splits = self.layout.row_splits
        block_size = splits[1] if self.layout.num_blocks > 1 else None
        layout = VaryingLayout.from_size(size, block_size)
        return TouchedRowsRoute(self.collectives, self.method, layout, self.call_site)


class Rows(Transport):
    """Sends touched rows of sparse gradients to every worker, which runs the server."""

    payload_kind = "fields of a fixed length with an item for each element or block"
    route_class = RowsRoute

    @override
    def supports(self, method, layout):
        return self.carries(method, layout)

    @override
    def bind(self, method: Method, layout: Layout, call_site: str) -> RowsRoute:
        return cast(RowsRoute, super().bind(method, layout, call_site))

    @staticmethod
    def carries(method: Method, layout: Layout) -> bool:
        """Returns whether rows of a table can use this transport."""
        compressor = method.compressor
        needs_more = (
            compressor.needs_second_moments
            or compressor.needs_whole_tensors
            or compressor.hears_reply
            or compressor.mean_reduced_fields(layout)
        )
        return not needs_more and all(
            field.per in ("element", "block") and not field.variable_length
            for field in compressor.fields(layout).values()
        )
