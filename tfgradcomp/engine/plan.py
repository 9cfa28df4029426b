"""The plan of an optimizer: from variables to buckets, each with a bound route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import tensorflow as tf

from tfgradcomp.assignment.layer_method import MethodSettings
from tfgradcomp.assignment.policy import Policy, assign
from tfgradcomp.assignment.rules import rules_of
from tfgradcomp.collectives import (
    CARRIERS,
    Collectives,
    Devices,
    Hosts,
    across_hosts,
    devices_of,
    for_strategy,
    over_carrier,
)
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.core import Layout
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.engine.bucket_ranges import BucketRange, cut_ranges
from tfgradcomp.engine.device_sharded_bucket import (
    Bucket,
    DeviceShardedBucket,
    StatePart,
    part_ranges,
)
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

# More buckets by default would take longer to trace and overlap no better.
_LEAST_BYTES, _BUCKETS = 16 * 2**20, 8
# More of them make a step slower on quick links.
_BUCKETS_OF_TWO_ROUNDS = 2

FALLBACKS = (None, "float32")


@dataclass(frozen=True)
class Settings:
    """The arguments of `CompressedOptimizer` that decide how each variable travels.

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
    carrier: str = "auto"

    @classmethod
    def names(cls) -> list[str]:
        """Returns the names of the fields that are attributes of the optimizer."""
        return [field.name for field in fields(cls)][2:]

    def __post_init__(self):
        if not isinstance(self.transport, (Transport, Costs)):
            check_choice("transport", self.transport, NAMES)
        check_choice("carrier", self.carrier, CARRIERS)
        if self.carrier == "tcp" and isinstance(self.transport, Transport):
            raise ValueError(
                "A transport that is handed in has collectives of its own. Expected: "
                "carrier='auto', or the name of a transport. "
                f"Received: carrier={self.carrier!r}, transport={self.transport}"
            )
        check_choice("fallback", self.fallback, FALLBACKS)
        check_integer("min_size", self.own.min_size, 0)
        if self.bucket_bytes is not None:
            check_integer("bucket_bytes", self.bucket_bytes, 1)
        rules_of(self.exclude)
        rules_of(self.sparse, "sparse")
        if self.policy and self.fallback:
            raise ValueError(
                "fallback='float32' chooses for the whole model, a policy for each "
                "variable. Expected: fallback=None, and 'float32' in the policy for "
                f"some variables. Received: fallback={self.fallback!r}"
            )


@dataclass(frozen=True)
class Plan:
    """The buckets of an optimizer, bound to their routes.

    Attributes:
        variables: The model's trainable variables.
        buckets: The buckets, those of the compressed vector first.
        collectives: The collectives between the workers.
        hosts: The collectives between the workers' processes; None where there is one.
        measured: The collectives between processes that messages take, whose speed
            decides about transports; None where there is one process.
        devices: The devices of workers that have several each; None where a worker is
            one device.
        uncompressed_steps: The steps whose gradients travel as float32.
        is_fallback: Whether float32 was chosen instead of the method.
        reasons: Why each variable is not compressed; None where it is.
        methods: The name of the method by which each variable travels.
        policy: The variables and the method of each vector, in words; empty without a
            policy.
    """

    variables: tuple
    buckets: tuple[Bucket, ...]
    collectives: Collectives
    hosts: Hosts | None
    measured: Collectives | None
    devices: Devices | None
    uncompressed_steps: UncompressedSteps
    is_fallback: bool
    reasons: tuple[str | None, ...]
    methods: tuple[str, ...]
    policy: str

    @property
    def replicas(self) -> Collectives:
        """The collectives between all devices of all workers."""
        return self.devices.replicas if self.devices else self.collectives

    @property
    def devices_per_worker(self) -> int:
        """Number of devices that are one worker."""
        return self.devices.per_worker if self.devices else 1

    def describe(self) -> str:
        """Returns the variables and the route of each bucket, in words."""
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
        is_trained: Whether each variable takes an update.
        settings: The optimizer's arguments.
        strategy: The strategy whose replicas are the workers, unless the transport
            has collectives of its own.
        accumulates: Whether second moments accumulate over several calls.
        is_fallback: Whether float32 replaces the method, as a saved state demands;
            None: decided here.
    """
    binder = _Binder.of(settings, strategy, accumulates)
    assigned = _assigned(variables, is_trained, settings)
    if binder.devices and accumulates:
        _refuse_second_moments(assigned, binder.devices)
    sparse = settings.sparse if binder.carries_tables else ()
    vectors = divided(variables, assigned, is_trained, settings.own, sparse)
    buckets: list[Bucket] = []
    for vector in vectors:
        layout, ranges = _cut(vector, settings.bucket_bytes)
        parts = [part for one in ranges for part in binder.parts_of(vector, one)]
        layouts = [part.layout(layout) for part in parts]
        vector, transports, is_fallback = binder.choose(vector, layouts, is_fallback)
        # All devices of a worker take the transport of the first one.
        transports = transports[:: len(parts) // len(ranges)]
        for index, one in enumerate(zip(transports, ranges, strict=True)):
            name = vector.name if len(ranges) == 1 else f"{vector.name}.{index}"
            buckets.append(binder.bind(vector, layout, name, *one))
    quicker = "float32 is quicker on this cluster (fallback='float32')"
    return Plan(
        variables=tuple(variables),
        buckets=tuple(buckets),
        collectives=binder.collectives,
        hosts=binder.hosts,
        measured=binder.measured,
        devices=binder.devices,
        uncompressed_steps=settings.uncompressed_steps,
        is_fallback=bool(is_fallback),
        reasons=tuple(
            one.reason or (quicker if is_fallback else None) for one in assigned
        ),
        methods=tuple(one.settings.method.name for one in assigned),
        policy="; ".join(map(str, vectors)) if settings.policy else "",
    )


def _assigned(variables, is_trained, settings):
    """Returns the method of each variable; untrained variables are not compressed."""
    reason = "overwritten with its gradient, takes no update"
    assigned = assign(variables, settings.own, settings.exclude, settings.policy)
    return [
        one if trained else one._replace(reason=reason)
        for one, trained in zip(assigned, is_trained, strict=True)
    ]


def _refuse_second_moments(assigned, devices):
    for method in [one.settings.method for one in assigned]:
        if method.needs_second_moments:
            raise ValueError(
                "Second moments do not accumulate over several calls where a worker "
                "has several devices. Use gradient_accumulation_steps=None, or a "
                f"method that needs none. Received: method={method.name}, "
                f"devices={devices.per_worker}"
            )


def _cut(vector, bucket_bytes):
    """Returns the layout of a vector, and the ranges of its buckets."""
    layout = Layout.from_shapes(vector.shapes, vector.method.block_size)
    most = vector.method.compressor.most_elements
    if most is not None:
        # The padding that aligns a bucket is shorter than a chunk.
        most -= CHUNK
        layout = layout.cut(most)
    method, whole = vector.method, [BucketRange(0, layout.size)]
    is_cut = vector.is_compressed and vector.num_rows is None
    if not is_cut or not method.is_blockwise:
        return layout, whole
    if bucket_bytes is None:
        has_two_rounds = method.compressor.mean_reduced_fields(layout)
        count = _BUCKETS_OF_TWO_ROUNDS if has_two_rounds else _BUCKETS
        bucket_bytes = max(_LEAST_BYTES, 4 * layout.size // count)
    blocks = vector.tensors if method.needs_whole_tensors else layout
    return layout, cut_ranges(blocks, max(bucket_bytes // 4, 1), most)


@dataclass(frozen=True)
class _Binder:
    """Binds flat vectors to transports, between the workers that exchange.

    Attributes:
        settings: The optimizer's arguments.
        accumulates: Whether second moments accumulate over several calls.
        collectives: The collectives between the workers.
        hosts: The collectives between the workers' processes; None where there is one.
        measured: As in `Plan`.
        devices: The devices of workers that have several each, or None.
    """

    settings: Settings
    accumulates: bool
    collectives: Collectives
    hosts: Hosts | None
    measured: Collectives | None
    devices: Devices | None

    @classmethod
    def of(cls, settings, strategy, accumulates):
        """Returns a binder for the workers of the transport, or of the strategy."""
        given, hosts = settings.transport, across_hosts(strategy)
        if isinstance(given, Transport):
            given = given.renewed()
            settings = replace(settings, transport=given)
            return cls(settings, accumulates, given.collectives, hosts, hosts, None)
        devices = devices_of(strategy)
        measured: Collectives | None = hosts
        collectives = devices.across if devices else for_strategy(strategy)
        if hosts is not None:
            carrier = settings.carrier
            collectives, measured = over_carrier(carrier, collectives, hosts)
        return cls(settings, accumulates, collectives, hosts, measured, devices)

    @property
    def carries_tables(self) -> bool:
        """True if rows may travel, which exclude uncompressed steps and devices."""
        if self.settings.uncompressed_steps or self.devices:
            return False
        given = self.settings.transport
        return not isinstance(given, Transport) or given.carries_tables

    def parts_of(self, vector, bucket_range):
        """Returns the range that each device of a worker exchanges."""
        edges = None
        if vector.method.needs_whole_tensors:
            edges = vector.tensors.row_splits
        count = self.devices.per_worker if self.devices else 1
        return part_ranges(bucket_range, count, edges)

    def choose(self, vector, layouts, is_fallback):
        """Chooses how a vector travels.

        Returns:
            The vector, uncompressed if float32 was chosen instead of the method; a
            transport for each layout; `is_fallback`, which may be decided now.
        """
        if is_fallback:
            vector = vector.uncompressed()
        given, hosts = self.settings.transport, self.measured
        if not vector.is_compressed:
            hosts = None
            is_given = isinstance(given, Transport) and given.carries_plain
            given = given if is_given else "auto"
        selection = select_transports(
            given, vector.method, layouts, self.collectives, hosts
        )
        decides = vector.is_compressed and vector.num_rows is None
        if decides and is_fallback is None and self.settings.fallback:
            is_fallback = selection.is_float32_quicker
            if is_fallback:
                return self.choose(vector, layouts, is_fallback)
        return vector, selection.transports, is_fallback

    def bind(self, vector, layout, name, transport, bucket_range):
        """Returns the bucket of a range of a vector, with its state."""
        if vector.num_rows is not None:
            return self._rows_bucket(vector, layout, name, transport, bucket_range)
        if self.devices is None:
            return self._bucket(vector, layout, name, transport, bucket_range)
        parts = tuple(
            self._bucket(
                vector, layout, f"{name}/device{device}", transport, one, StatePart
            )
            for device, one in enumerate(self.parts_of(vector, bucket_range))
        )
        return DeviceShardedBucket(vector, bucket_range, name, parts, self.devices)

    def _bucket(
        self,
        vector,
        layout,
        name,
        transport,
        bucket_range,
        create_variable=PerReplicaVariable.known,
    ):
        route = transport.bind(vector.method, bucket_range.layout(layout), name)
        uncompressed_route = None
        if vector.is_compressed and self.settings.uncompressed_steps:
            uncompressed_route = _bind_uncompressed(route)
        accumulates = self.accumulates and route.method.needs_second_moments
        return GradientBucket(
            vector,
            bucket_range,
            route,
            uncompressed_route,
            accumulates,
            create_variable,
        )

    @staticmethod
    def _rows_bucket(vector, layout, name, transport, bucket_range):
        """Binds the method of a table both ways: with all of its rows and with some."""
        collectives = transport.collectives
        if tf.nest.flatten(vector.method.server.init(Layout((0, 1)))):
            # Every worker reads rows of the server's state.
            transport = AllGather(collectives)
        rows_route = Rows(collectives).bind(vector.method, layout, f"{name}/rows")
        route = transport.bind(vector.method, layout, name)
        return RowsBucket(vector, bucket_range, route, rows_route)


def _bind_uncompressed(route):
    """Binds the method of a route for uncompressed steps, by a rule."""
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
