"""Rows of a table: of a sparse gradient only those that some worker has touched.

The indices of all workers are gathered, as gaps. Their sorted union U is the layout of
the step: each worker compresses its rows of U, zeros where it has touched none, and all
payloads go to all workers, each of them a server.
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
    """The rows of a step.

    Attributes:
        rows: int32, ascending; at least one.
        count: How many of them were touched: all, or 0 if there is one that nobody has
            touched, so that no layout is empty.
        words: Words that this worker has handed to collectives to find them.
    """

    rows: tf.Tensor
    count: tf.Tensor
    words: tf.Tensor | int


class TouchedRowsRoute(AllGatherRoute):
    """The route of a step: an all-gather whose size the step's rows say."""

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
        first_round = sum(field.count for field in self.max_reduced_fields.values())
        return PendingExchange(context, (rows, tf.shape(rows)[1] + first_round))

    def _gather_padded(self, vector, call_site):
        """Gathers vectors of one size, which may be another in the next step."""
        if self.num_workers > 1 and vector.shape[0] is None:
            size = tf.size(vector)
            vector = tf.pad(vector, [[0, padded_size(size) - size]])
        return self.collectives.gather(vector, call_site)


class RowsRoute(Route):
    """A method and the rows of a table; each step has a `TouchedRowsRoute` of its own.

    The layout is that of the whole table. Its blocks, if there are several, say how the
    rows of a step are cut into blocks.
    """

    def agree(self, indices: tf.Tensor) -> TouchedRows:
        """Returns the union of the rows that the workers have touched.

        Args:
            indices: int32, those of this worker, each once.
        """
        words: tf.Tensor | int = 0
        if self.num_workers > 1:
            own = index_coding.encode(tf.sort(indices), "delta", value_bits=1)
            size = tf.size(own)[tf.newaxis]
            sizes = self.collectives.gather(size, f"{self.call_site}/size")
            count = padded_size(tf.reduce_max(sizes))
            padded = messages.padded(own, count)
            gathered = self.collectives.gather(padded, f"{self.call_site}/indices")
            indices = index_coding.decode(gathered, "delta", value_bits=1)
            indices = tf.boolean_mask(indices, indices >= 0)
            words = 1 + count
        rows = tf.sort(tf.unique(indices).y)
        count = tf.size(rows)
        # Where there is none, row 0.
        rows = tf.pad(rows, [[0, tf.cast(tf.equal(count, 0), tf.int32)]])
        return TouchedRows(rows, count, words)

    def at(self, size: tf.Tensor) -> TouchedRowsRoute:
        """Returns the route of a step.

        Args:
            size: The elements of its rows.
        """
        splits = self.layout.row_splits
        block_size = splits[1] if self.layout.num_blocks > 1 else None
        layout = VaryingLayout.from_size(size, block_size)
        return TouchedRowsRoute(self.collectives, self.method, layout, self.call_site)


class Rows(Transport):
    """Sends the rows of sparse gradients to every worker; each of them is a server."""

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
        """Returns whether rows of a table can go this way."""
        fields = method.compressor.fields(layout).values()
        return not method.compressor.needs_second_moments and all(
            field.per in ("element", "block") and not field.variable_length
            for field in fields
        )
