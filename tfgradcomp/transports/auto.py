"""The choice of a transport for each bucket: by name, by rule, or by measurement.

Measurements never change a result: they choose among transports that give the same
bits. A ring adds floats in another order than a gather, so a rule decides for them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import CollectiveCall, Collectives
from tfgradcomp.core import Layout
from tfgradcomp.core.logging import logger
from tfgradcomp.methods import Method
from tfgradcomp.transports import messages
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce
from tfgradcomp.transports.base import Transport
from tfgradcomp.transports.costs import Costs, measure, route_seconds
from tfgradcomp.transports.sharded import Sharded

BY_NAME = {"all_gather": AllGather, "all_reduce": AllReduce, "sharded": Sharded}
NAMES = ("auto", *BY_NAME)

# A log line or a fallback needs uncompressed training to be faster by this factor.
_FLOAT32_MARGIN = 1.1


class Estimate(NamedTuple):
    """Estimated durations of a bucket's exchange.

    Attributes:
        seconds: By name of the transport; all of them give the same bits.
        float32_seconds: Of a float32 all-reduce of the bucket.
    """

    seconds: dict[str, float]
    float32_seconds: float

    @property
    def quickest(self) -> str:
        """The name of the transport with the shortest estimate."""
        return min(self.seconds, key=self.seconds.__getitem__)


class Selection(NamedTuple):
    """The transports of a vector's buckets.

    Attributes:
        transports: One for each bucket.
        is_float32_quicker: Whether uncompressed training should be faster by more than
            a tenth; False without a measurement.
    """

    transports: list[Transport]
    is_float32_quicker: bool = False


def supported_names(
    method: Method, layout: Layout, collectives: Collectives
) -> list[str]:
    """Returns the names of the transports that can carry a method's payloads."""
    fused = method.fused()
    return [
        name
        for name, kind in BY_NAME.items()
        if kind(collectives).supports(fused, layout)
    ]


def name_by_rule(method: Method, layout: Layout, collectives: Collectives) -> str:
    """Returns the transport without a measurement: all-reduce for sums of numbers.

    All other payloads use all-gather.
    """
    fields = method.compressor.fields(layout).values()
    is_codes = any(field.base for field in fields if not field.shared)
    can_sum = "all_reduce" in supported_names(method, layout, collectives)
    return "all_reduce" if can_sum and not is_codes else "all_gather"


def names_with_equal_bits(
    method: Method, layout: Layout, collectives: Collectives
) -> list[str]:
    """Returns the names of the transports from which a measurement may choose."""
    by_rule = name_by_rule(method, layout, collectives)
    is_variable = messages.has_variable_length(method.compressor.fields(layout))
    if by_rule == "all_reduce" or is_variable:
        return [by_rule]
    return supported_names(method, layout, collectives)


def select_transports(
    transport: str | Transport | Costs,
    method: Method,
    layouts: list[Layout],
    collectives: Collectives,
    hosts: Collectives | None = None,
) -> Selection:
    """Selects the transport of each bucket.

    Args:
        transport: A transport, its name, `"auto"`, or `Costs`, from which `"auto"`
            chooses without a measurement.
        method: The method.
        layouts: The blocks of each bucket.
        collectives: The collectives of the transports.
        hosts: The collectives between processes, which `"auto"` measures. If neither
            `hosts` nor `Costs` are given, `"auto"` falls back to `name_by_rule`.

    Raises:
        ValueError: If the transport cannot carry the method's payloads.
    """
    if isinstance(transport, Transport):
        return Selection([transport] * len(layouts))
    if isinstance(transport, str) and transport != "auto":
        for layout in layouts:
            names = supported_names(method, layout, collectives)
            if transport not in names:
                raise ValueError(
                    f"transport={transport!r} cannot carry this method's payloads: it "
                    f"carries {BY_NAME[transport].payload_kind}. Use 'auto' or one of "
                    f"{names}. Received: method={method}"
                )
        return Selection([BY_NAME[transport](collectives)] * len(layouts))
    costs = transport if isinstance(transport, Costs) else None
    is_float32_quicker, is_measurable = False, _has_fixed_length(method, layouts)
    if is_measurable and costs is None and hosts is not None:
        costs = measure(hosts)
    if costs is None or not is_measurable:
        names = [name_by_rule(method, layout, collectives) for layout in layouts]
    else:
        estimates = []
        for layout in layouts:
            names = names_with_equal_bits(method, layout, collectives)
            count = collectives.num_workers
            estimates.append(estimate(names, method, layout, count, costs))
        names, is_float32_quicker = _agree(estimates, hosts)
    transports = [BY_NAME[name](collectives) for name in names]
    return Selection(transports, is_float32_quicker)


def estimate(
    names: list[str], method: Method, layout: Layout, num_workers: int, costs: Costs
) -> Estimate:
    """Returns the estimated durations of a bucket's exchange by some transports."""
    seconds = {
        name: route_seconds(BY_NAME[name], method, layout, num_workers, costs)
        for name in names
    }
    return Estimate(seconds, costs.seconds([CollectiveCall("sum", layout.size)]))


def _has_fixed_length(method, layouts):
    # Maximum size does not predict transfer time.
    return not any(
        messages.has_variable_length(method.compressor.fields(layout))
        for layout in layouts
    )


def _agree(estimates, hosts):
    """Returns the choice by the medians of all workers' estimates; worker 0 logs it."""
    own = [[*bucket.seconds.values(), bucket.float32_seconds] for bucket in estimates]
    flat = np.concatenate(own)
    is_common = hosts is not None and _is_common(flat.size, hosts)
    # The consistency check rejects workers with different buckets, and says why.
    if is_common:
        # A probe that other load has disturbed decides for nobody.
        numbers = tf.constant(flat, tf.float32)
        # TensorFlow binds a call site to one shape.
        every = hosts.gather(numbers, f"agree/{flat.size}").numpy()
        medians = iter(np.median(every, axis=0).tolist())
        estimates = [
            Estimate({name: next(medians) for name in bucket.seconds}, next(medians))
            for bucket in estimates
        ]
    compressed = sum(min(bucket.seconds.values()) for bucket in estimates)
    float32 = sum(bucket.float32_seconds for bucket in estimates)
    is_float32_quicker = _FLOAT32_MARGIN * float32 < compressed
    if is_common and hosts.rank == 0:
        _log(estimates, compressed, float32, is_float32_quicker, hosts.num_workers)
    return [bucket.quickest for bucket in estimates], is_float32_quicker


def _is_common(count, hosts):
    """Returns whether all workers have the same count."""
    most, minus_least = hosts.max(tf.constant([count, -count]), "agree/count").numpy()
    return most == -minus_least


def _log(estimates, compressed, float32, is_float32_quicker, num_workers):
    reasons = "; ".join(
        f"{bucket.quickest} ("
        + ", ".join(f"{name} {1e3 * s:.3g}" for name, s in bucket.seconds.items())
        + f", float32 {1e3 * bucket.float32_seconds:.3g})"
        for bucket in estimates
    )
    logger.info(
        "transport='auto' on %d workers, by estimated ms per bucket: %s",
        num_workers,
        reasons,
    )
    if is_float32_quicker:
        logger.info(
            "float32 would be quicker on this network: %.3g ms a step instead of %.3g. "
            "Compression continues; use fallback='float32' to switch in such a case",
            1e3 * float32,
            1e3 * compressed,
        )
