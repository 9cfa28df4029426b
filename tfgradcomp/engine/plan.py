"""The plan of an optimizer: from variables to buckets, each with a bound route."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import tensorflow as tf

from tfgradcomp.assignment.layer_method import MethodSettings
from tfgradcomp.assignment.policy import Policy, assign
from tfgradcomp.assignment.rules import rules_of
from tfgradcomp.collectives import (
    Collectives,
    Devices,
    Hosts,
    across_hosts,
    devices_of,
    for_strategy,
)
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.core import Layout
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.engine.bucket_ranges import BucketRange, cut_ranges
from tfgradcomp.engine.device_sharded_bucket import DeviceShardedBucket, part_ranges
from tfgradcomp.engine.flat_vectors import divided
from tfgradcomp.engine.gradient_bucket import GradientBucket
from tfgradcomp.engine.rows_bucket import RowsBucket
from tfgradcomp.engine.uncompressed_steps import UncompressedSteps
from tfgradcomp.ops.block_sums import CHUNK
from tfgradcomp.transports import (
    NAMES,
    AllGather,
    Costs,
    Rows,
    Transport,
    select_transports,
)

# Buckets by default. Each takes time to trace, and the smaller ones overlap no better.
_LEAST_BYTES, _BUCKETS = 16 * 2**20, 8

FALLBACKS = (None, "float32")


@dataclass(frozen=True)
class Settings:
    """The arguments of `CompressedOptimizer` that decide what travels how.

    Raises:
        ValueError: If an argument is out of range.
    """

    own: MethodSettings
    policy: Policy | None
    transport: str | Transport | Costs
    fallback: str | None
    exclude: object
    bucket_bytes: int | None
    uncompressed_steps: UncompressedSteps = UncompressedSteps()
    sparse: object = "rows"

    @classmethod
    def names(cls) -> list[str]:
        """Names of those that are attributes of the optimizer."""
        return [field.name for field in fields(cls)][2:]

    def __post_init__(self):
        if not isinstance(self.transport, (Transport, Costs)):
            check_choice("transport", self.transport, NAMES)
        check_choice("fallback", self.fallback, FALLBACKS)
        check_integer("min_size", self.own.min_size, 0)
        if self.bucket_bytes is not None:
            check_integer("bucket_bytes", self.bucket_bytes, 1)
        rules_of(self.exclude)
        rules_of(self.sparse, "sparse")
        if self.policy and self.fallback:
            raise ValueError(
                "fallback='float32' is a choice for the whole model, and a policy one "
                "for each variable. Expected: fallback=None, and 'float32' in the "
                f"policy where it is wanted. Received: fallback={self.fallback!r}"
            )


class Plan(NamedTuple):
    """The buckets of an optimizer, bound to their routes.

    Attributes:
        variables: The model's trainable variables.
        buckets: The buckets, those of the compressed vector first.
        collectives: What moves vectors between the workers.
        hosts: The collectives between the workers' processes; None where there is one.
        uncompressed_steps: The steps that travel as float32.
        is_fallback: Whether float32 was chosen instead of the method.
        reasons: Why each variable is not compressed; None where it is.
        methods: By which method each variable travels, in words.
        policy: Which vector holds which variables, by which method, in words; empty
            where the wrapper's own method is the only one.
        devices: The devices of workers that have several each; None where a worker is
            one device.
    """

    variables: tuple
    buckets: tuple[GradientBucket, ...]
    collectives: Collectives
    hosts: Hosts | None
    uncompressed_steps: UncompressedSteps
    is_fallback: bool
    reasons: tuple[str | None, ...]
    methods: tuple[str, ...]
    policy: str = ""
    devices: Devices | None = None

    @property
    def replicas(self) -> Collectives:
        """The collectives between all devices of all workers."""
        return self.devices.replicas if self.devices else self.collectives

    @property
    def devices_per_worker(self) -> int:
        """Number of devices that are one worker."""
        return self.devices.per_worker if self.devices else 1

    def describe(self) -> str:
        """Returns which variables travel in which bucket, and how, in words."""
        buckets = [
            f"{bucket.name}: {type(bucket.route).__name__}, elements "
            f"{bucket.bucket_range.begin}:{bucket.bucket_range.end} in "
            f"{bucket.layout.num_blocks} blocks, variables {bucket.positions}"
            for bucket in self.buckets
        ]
        own = [str(b.route.method) for b in self.buckets] if self.policy else []
        return (
            f"buckets={buckets}, is_fallback={self.is_fallback}, methods={own}, "
            f"devices_per_worker={self.devices_per_worker}"
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
    given, carries_plain, carries_tables = settings.transport, False, True
    if isinstance(given, Transport):
        collectives, carries_plain = given.collectives, given.carries_plain
        carries_tables = given.carries_tables
        devices = None
    else:
        devices = devices_of(strategy)
        collectives = devices.across if devices else for_strategy(strategy)
    count = devices.per_worker if devices else 1
    hosts = across_hosts(strategy)
    buckets: list[GradientBucket] = []
    assigned = [
        one
        if trained
        else one._replace(reason="overwritten with its gradient, takes no update")
        for one, trained in zip(
            assign(variables, settings.own, settings.exclude, settings.policy),
            is_trained,
            strict=True,
        )
    ]
    squares = [one for one in assigned if one.settings.method.needs_second_moments]
    if count > 1 and accumulates and squares:
        raise ValueError(
            "Second moments are not added up over several calls where a worker has "
            "several devices. Use gradient_accumulation_steps=None, or a method that "
            f"needs none. Received: method={squares[0].settings.method.name}, "
            f"devices={count}"
        )
    reasons = [one.reason for one in assigned]
    # Float steps are of whole vectors.
    has_tables = carries_tables and not settings.uncompressed_steps and count == 1
    sparse = settings.sparse if has_tables else ()
    vectors = divided(variables, assigned, is_trained, settings.own, sparse)
    for vector in vectors:
        is_compressed = vector.is_compressed
        layout, ranges = _cut(vector, settings.bucket_bytes, is_compressed)
        # One for each device, of which each bucket then has its transport.
        parts = [part for one in ranges for part in _parts(one, devices)]
        layouts = [part.layout(layout) for part in parts]
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
        for index, one in enumerate(ranges):
            name = vector.name if len(ranges) == 1 else f"{vector.name}.{index}"
            transport = selection.transports[index * count]
            pieces = _pieces(vector, layout, one)
            if vector.num_rows is not None:
                kind = method, layout, is_compressed
                buckets.append(_rows_bucket(vector, pieces, one, transport, *kind))
                continue
            bind = functools.partial(
                _bind, vector, layout, transport, method, is_compressed, settings
            )
            if devices:
                bucket: GradientBucket = DeviceShardedBucket(
                    name, pieces, one, bind, devices
                )
            else:
                bucket = bind(one, name, accumulates)
            buckets.append(bucket)
    if is_fallback:
        quicker = "float32 is quicker on this cluster (fallback='float32')"
        reasons = [reason or quicker for reason in reasons]
    return Plan(
        tuple(variables),
        tuple(buckets),
        collectives,
        hosts,
        settings.uncompressed_steps,
        bool(is_fallback),
        tuple(reasons),
        tuple(one.settings.method.name for one in assigned),
        "; ".join(map(str, vectors)) if settings.policy else "",
        devices,
    )


def _parts(bucket_range, devices):
    return part_ranges(bucket_range, devices.per_worker) if devices else [bucket_range]


def _pieces(vector, layout, bucket_range):
    return tuple(
        piece._replace(position=vector.positions[piece.position])
        for piece in bucket_range.pieces(layout)
    )


def _bind(
    vector,
    layout,
    transport,
    method,
    is_compressed,
    settings,
    bucket_range,
    name,
    accumulates=False,
    create_variable=PerReplicaVariable.known,
):
    """Binds the method for a range of a vector, and creates its bucket."""
    route = transport.bind(method, bucket_range.layout(layout), name)
    uncompressed_route = None
    if is_compressed and settings.uncompressed_steps:
        uncompressed_route = _bind_lossless(route)
    return GradientBucket(
        vector.name,
        _pieces(vector, layout, bucket_range),
        bucket_range,
        route,
        is_compressed,
        accumulates and route.method.compressor.needs_second_moments,
        uncompressed_route,
        vector.stream_offset,
        create_variable=create_variable,
    )


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


def _bind_lossless(route):
    """Binds a route's method for steps that travel as float32, by a rule."""
    method, layout = route.method.uncompressed_step(), route.layout
    own, other = (one.compressor.init(layout) for one in (route.method, method))
    try:
        tf.nest.assert_same_structure(own, other)
    except (TypeError, ValueError):
        raise ValueError(
            "warmup_steps and dense_every need a compressor's `uncompressed_step`, "
            "with a state of the same form, and this method has none. "
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
        if bucket_bytes is None:
            bucket_bytes = max(_LEAST_BYTES, 4 * layout.size // _BUCKETS)
        return layout, cut_ranges(layout, max(bucket_bytes // 4, 1), most)
    return layout, [BucketRange(0, layout.size)]
