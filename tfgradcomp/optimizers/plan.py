"""The plan of an optimizer: from variables to buckets, each with a bound route."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import tensorflow as tf

from tfgradcomp.collectives import Collectives, Hosts, across_hosts, for_strategy
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.core import Layout, Method
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.ops import INDEX_BITS
from tfgradcomp.ops.block_sums import CHUNK
from tfgradcomp.optimizers.bucket_ranges import BucketRange, cut_ranges
from tfgradcomp.optimizers.float_steps import FloatSteps
from tfgradcomp.optimizers.gradient_bucket import GradientBucket
from tfgradcomp.optimizers.partition import (
    reasons_to_leave,
    rules_of,
    table_positions,
)
from tfgradcomp.optimizers.rows_bucket import RowsBucket
from tfgradcomp.transports import (
    NAMES,
    AllGather,
    Costs,
    Rows,
    Traffic,
    Transport,
    select_transports,
)
from tfgradcomp.transports.messages import fixed_words, message_words

FALLBACKS = (None, "float32")


@dataclass(frozen=True)
class Settings:
    """The arguments of `CompressedOptimizer` that decide what travels how.

    Raises:
        ValueError: If an argument is out of range.
    """

    method: Method
    block_size: int | str | None
    transport: str | Transport | Costs
    fallback: str | None
    exclude: object
    min_size: int
    bucket_bytes: int
    float_steps: FloatSteps = FloatSteps()
    sparse: object = "rows"

    @classmethod
    def names(cls) -> list[str]:
        """Names of those that are attributes of the optimizer: all but `block_size`."""
        return [field.name for field in fields(cls) if field.name != "block_size"]

    def __post_init__(self):
        if not isinstance(self.transport, (Transport, Costs)):
            check_choice("transport", self.transport, NAMES)
        check_choice("fallback", self.fallback, FALLBACKS)
        check_integer("min_size", self.min_size, 0)
        check_integer("bucket_bytes", self.bucket_bytes, 1)
        rules_of(self.exclude)
        rules_of(self.sparse, "sparse")
        if self.block_size not in (None, "model"):
            check_integer("block_size", self.block_size, 1)


class _Vector(NamedTuple):
    """Variables that are flattened together, with the method for them.

    A table whose gradient may travel as rows is a vector by itself.
    """

    name: str
    positions: list[int]
    sizes: list[int]
    method: Method
    block_size: int | str | None
    num_rows: int | None = None
    stream_offset: int = 0


class Plan(NamedTuple):
    """The buckets of an optimizer, bound to their routes.

    Attributes:
        buckets: The buckets, those of the compressed vector first.
        collectives: What moves vectors between the workers.
        hosts: The collectives between the workers' processes; None where there is one.
        is_fallback: Whether float32 was chosen instead of the method.
        reasons: Why each variable is not compressed; None where it is.
    """

    buckets: tuple[GradientBucket, ...]
    collectives: Collectives
    hosts: Hosts | None
    is_fallback: bool
    reasons: tuple[str | None, ...]

    def describe(self) -> str:
        """Returns which variables travel in which bucket, and how, in words."""
        buckets = [
            f"{bucket.name}: {type(bucket.route).__name__}, elements "
            f"{bucket.bucket_range.begin}:{bucket.bucket_range.end} in "
            f"{bucket.layout.num_blocks} blocks, variables {bucket.positions}"
            for bucket in self.buckets
        ]
        return f"buckets={buckets}, is_fallback={self.is_fallback}"

    def traffic(self, moved: PerReplicaVariable | None) -> Traffic:
        """Returns what one worker moves in one step.

        Args:
            moved: Where messages vary in length: the steps so far, the elements sent
                and the words that varied, int64 `[3]`.
        """
        workers = self.collectives.num_workers
        # Of a table everything is counted in the step.
        fixed = [b for b in self.buckets if not isinstance(b, RowsBucket)]
        words = [bucket.route.words for bucket in fixed]
        compressed = [bucket for bucket in self.buckets if bucket.is_compressed]
        elements = sum(bucket.size for bucket in compressed)
        plain = sum(bucket.size for bucket in self.buckets) - elements
        declared = [bucket for bucket in fixed if bucket.is_compressed]
        sent: float = sum(b.size for b in fixed if not b.has_variable_length)
        variable = 0.0
        if moved is not None:
            steps, counted, variable = moved.numpy().tolist()
            counted, variable = (
                x / steps if steps else math.nan for x in (counted, variable)
            )
            sent += counted
        up = sum(fixed_words(bucket.route.fields) for bucket in declared)
        reply = sum(message_words(bucket.route.reply_fields) for bucket in declared)
        others = (workers - 1) * variable
        return Traffic(
            num_workers=workers,
            elements_compressed=elements,
            elements_plain=plain,
            bits_per_element_up=32 * (up + variable) / max(elements, 1),
            bits_per_element_reply=32 * reply / max(elements, 1),
            words_sent=sum(one.sent for one in words) + others,
            words_received=sum(one.received for one in words) + others,
            elements_sent=sent,
        )


def make_plan(
    variables: Sequence,
    is_trained: Sequence[bool],
    settings: Settings,
    strategy: tf.distribute.Strategy,
    accumulates: bool = False,
    is_fallback: bool | None = None,
) -> Plan:
    """Cuts the variables into buckets and binds each to a route.

    Args:
        variables: The model's trainable variables.
        is_trained: Whether each of them takes an update.
        settings: The optimizer's arguments.
        strategy: The strategy whose replicas are the workers, unless the transport
            has collectives of its own.
        accumulates: Whether second moments add up over several calls.
        is_fallback: Whether to take float32 instead of the method, as a saved state
            says; None: decided here.
    """
    given, carries_plain = settings.transport, False
    if isinstance(given, Transport):
        collectives, carries_plain = given.collectives, given.carries_plain
    else:
        collectives = for_strategy(strategy)
    hosts = across_hosts(strategy)
    buckets: list[GradientBucket] = []
    reasons = reasons_to_leave(variables, settings.exclude, settings.min_size)
    reasons = [
        reason if trained else "overwritten with its gradient, takes no update"
        for reason, trained in zip(reasons, is_trained, strict=True)
    ]
    # Float steps and noise are of whole vectors.
    is_whole = carries_plain or settings.float_steps or settings.method.noise_std
    for vector in _vectors(variables, reasons, is_trained, settings, not is_whole):
        is_compressed = vector.method is settings.method
        layout, ranges = _cut(vector, settings.bucket_bytes, is_compressed)
        layouts = [one.layout(layout) for one in ranges]
        method = vector.method
        if is_compressed and is_fallback:
            method, is_compressed = method.uncompressed(), False
        selection = select_transports(
            given if is_compressed or carries_plain else "auto",
            method,
            layouts,
            collectives,
            hosts if is_compressed else None,
        )
        is_open = is_fallback is None and settings.fallback and vector.num_rows is None
        if is_compressed and is_open:
            is_fallback = selection.is_float32_quicker
            if is_fallback:
                method, is_compressed = method.uncompressed(), False
                selection = select_transports("auto", method, layouts, collectives)
        for index, (one, transport) in enumerate(
            zip(ranges, selection.transports, strict=True)
        ):
            name = vector.name if len(ranges) == 1 else f"{vector.name}.{index}"
            pieces = tuple(
                piece._replace(position=vector.positions[piece.position])
                for piece in one.pieces(layout)
            )
            if vector.num_rows is not None:
                kind = method, layout, is_compressed
                buckets.append(_rows_bucket(vector, pieces, one, transport, *kind))
                continue
            route = transport.bind(method, layouts[index], name)
            float_route = None
            if is_compressed and settings.float_steps:
                float_route = _bind_lossless(route)
            needs_moments = route.method.compressor.needs_second_moments
            buckets.append(
                GradientBucket(
                    vector.name,
                    pieces,
                    one,
                    route,
                    is_compressed,
                    accumulates and needs_moments,
                    float_route,
                )
            )
    if is_fallback:
        quicker = "float32 is quicker on this cluster (fallback='float32')"
        reasons = [reason or quicker for reason in reasons]
    return Plan(tuple(buckets), collectives, hosts, bool(is_fallback), tuple(reasons))


def _rows_bucket(
    vector, pieces, bucket_range, transport, method, layout, is_compressed
):
    """Binds the method of a table both ways: with all of its rows and with some."""
    collectives = transport.collectives
    if tf.nest.flatten(method.server.init(Layout((0, 1)))):
        # Rows of the server's state are read on every worker.
        transport = AllGather(collectives)
    rows = Rows(collectives).bind(method, layout, f"{vector.name}/rows")
    return RowsBucket(
        vector.name,
        pieces,
        bucket_range,
        transport.bind(method, layout, vector.name),
        is_compressed,
        stream_offset=vector.stream_offset,
        rows_route=rows,
        num_rows=vector.num_rows,
    )


def _vectors(variables, reasons, is_trained, settings, has_tables):
    """Divides the variables: what the method compresses, what it leaves, and tables."""
    method, block_size = settings.method, settings.block_size
    plain = method.uncompressed()
    chosen = {i for i, reason in enumerate(reasons) if reason is None}
    sizes = [variable.shape.num_elements() for variable in variables]
    tables: dict[int, _Vector] = {}
    if has_tables:
        for i in table_positions(variables, settings.sparse):
            own = (method, block_size) if i in chosen else (plain, "model")
            vector = _Vector(f"table_{i}", [i], [sizes[i]], *own)
            layout = Layout.from_sizes(vector.sizes, vector.block_size)
            rows = variables[i].shape[0] if variables[i].shape else 0
            fits = sizes[i] >= max(settings.min_size, 1) and rows < 2**INDEX_BITS
            if is_trained[i] and fits and Rows.carries(vector.method, layout):
                tables[i] = vector._replace(num_rows=rows)
    end = 0
    for name, is_chosen, own in (
        ("compressed", True, (method, block_size)),
        ("plain", False, (plain, "model")),
    ):
        positions = [
            i
            for i, trained in enumerate(is_trained)
            if trained and (i in chosen) == is_chosen and i not in tables
        ]
        if sum(sizes[i] for i in positions):
            vector = _Vector(name, positions, [sizes[i] for i in positions], *own)
            end = max(end, sum(vector.sizes))
            yield vector
    for vector in tables.values():
        # Their random numbers follow those of the vectors before.
        end = -(-end // CHUNK) * CHUNK
        yield vector._replace(stream_offset=end)
        end += sum(vector.sizes)


def _bind_lossless(route):
    """Binds a route's method for steps that travel as float32, by a rule."""
    method, layout = route.method.lossless(), route.layout
    own, other = (
        (one.compressor.init(layout), one.server.init(layout))
        for one in (route.method, method)
    )
    try:
        tf.nest.assert_same_structure(own, other)
    except (TypeError, ValueError):
        raise ValueError(
            "warmup_steps and dense_every need a `lossless` form of the compressor and "
            "the server, with states of the same form, and this method has none. "
            f"Received: method={route.method}"
        ) from None
    selection = select_transports("auto", method, [layout], route.collectives)
    return selection.transports[0].bind(method, layout, f"{route.call_site}/float")


def _cut(vector, bucket_bytes, is_compressed):
    layout = Layout.from_sizes(vector.sizes, vector.block_size)
    most = vector.method.compressor.most_elements
    if most is not None:
        # The padding that aligns a bucket is shorter than a chunk.
        most -= CHUNK
        layout = layout.cut(most)
    is_cut = is_compressed and vector.num_rows is None
    if is_cut and vector.method.is_blockwise:
        return layout, cut_ranges(layout, max(bucket_bytes // 4, 1), most)
    return layout, [BucketRange(0, layout.size)]
