"""The choice of a transport for each bucket: by name, by rule, or by measurement.

Nothing that is measured changes a result. Measurement chooses among transports that
give the same bits. Numbers that are added up are the exception, because the order of a
ring's additions is not that of a gather's: for them a rule decides, never a clock.
"""

from __future__ import annotations

from typing import NamedTuple

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

# Uncompressed training must be this much quicker to be worth a word, or the fallback.
_FLOAT32_MARGIN = 1.1


class Estimate(NamedTuple):
    """Estimated durations of a bucket's exchange.

    Attributes:
        seconds: By the names of the transports that give the same bits.
        float32_seconds: Of a float32 all-reduce of the bucket.
    """

    seconds: dict[str, float]
    float32_seconds: float

    @property
    def quickest(self) -> str:
        """The name of the transport that should be quickest."""
        return min(self.seconds, key=self.seconds.__getitem__)


class Selection(NamedTuple):
    """The transports of a vector's buckets.

    Attributes:
        transports: One for each bucket.
        is_float32_quicker: Whether uncompressed training should be quicker by more than
            a tenth; False where nothing was measured.
    """

    transports: list[Transport]
    is_float32_quicker: bool = False


def supported_names(
    method: Method, layout: Layout, collectives: Collectives
) -> list[str]:
    """Returns the names of the transports that can carry what a method sends."""
    fused = method.fused()
    return [
        name
        for name, kind in BY_NAME.items()
        if kind(collectives).supports(fused, layout)
    ]


def name_by_rule(method: Method, layout: Layout, collectives: Collectives) -> str:
    """Returns the transport that is taken without a measurement.

    Sums of numbers go by all-reduce, everything else by all-gather.
    """
    is_codes = any(f.base for f in method.compressor.fields(layout).values())
    can_sum = "all_reduce" in supported_names(method, layout, collectives)
    return "all_reduce" if can_sum and not is_codes else "all_gather"


def names_with_equal_bits(
    method: Method, layout: Layout, collectives: Collectives
) -> list[str]:
    """Returns the names of the transports among which a measurement may choose."""
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
        transport: A transport, the name of one, `"auto"`, or the durations of the
            collectives, from which `"auto"` then chooses without measuring.
        method: The method.
        layouts: The blocks of each bucket.
        collectives: What the transports are made of.
        hosts: The collectives of the processes, where there are several: `"auto"`
            measures these. If neither these nor durations are given, `"auto"` falls
            back to `name_by_rule`.

    Raises:
        ValueError: If the transport cannot carry what the method sends.
    """
    if isinstance(transport, Transport):
        return Selection([transport] * len(layouts))
    if isinstance(transport, str) and transport != "auto":
        for layout in layouts:
            names = supported_names(method, layout, collectives)
            if transport not in names:
                raise ValueError(
                    f"transport={transport!r} cannot carry what this method sends: it "
                    f"carries {BY_NAME[transport].payload_kind}. Use 'auto' or one of "
                    f"{names}. Received: method={method}"
                )
        return Selection([BY_NAME[transport](collectives)] * len(layouts))
    costs = transport if isinstance(transport, Costs) else None
    is_measurable = _has_fixed_length(method, layouts)
    if is_measurable and costs is None and hosts is not None:
        costs = measure(hosts)
    if costs is None or not is_measurable:
        names = [name_by_rule(method, layout, collectives) for layout in layouts]
        return Selection([BY_NAME[name](collectives) for name in names])
    estimates = []
    for layout in layouts:
        names = names_with_equal_bits(method, layout, collectives)
        estimates.append(
            estimate(names, method, layout, collectives.num_workers, costs)
        )
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
    # The declared size of messages of variable length says nothing of their duration.
    return not any(
        messages.has_variable_length(method.compressor.fields(layout))
        for layout in layouts
    )


def _agree(estimates, hosts):
    """Returns worker 0's choice on all workers; worker 0 logs what and why."""
    names = [*BY_NAME]
    own = [names.index(one.quickest) for one in estimates]
    compressed = sum(min(one.seconds.values()) for one in estimates)
    float32 = sum(one.float32_seconds for one in estimates)
    own.append(int(_FLOAT32_MARGIN * float32 < compressed))
    # Workers that differ are refused before the first step, with the reason.
    if hosts is not None and _is_common(len(own), hosts):
        call_site = f"agree/{len(estimates)}"
        own = hosts.gather(tf.constant(own), call_site).numpy()[0].tolist()
        if hosts.rank == 0:
            _log(estimates, own, names, compressed, float32, hosts.num_workers)
    *chosen, is_float32_quicker = own
    return [names[index] for index in chosen], bool(is_float32_quicker)


def _is_common(count, hosts):
    """Returns whether all workers have the same number."""
    most, minus_least = hosts.max(tf.constant([count, -count]), "agree/count").numpy()
    return most == -minus_least


def _log(estimates, own, names, compressed, float32, num_workers):
    reasons = "; ".join(
        f"{names[index]} ("
        + ", ".join(f"{name} {1e3 * s:.3g}" for name, s in one.seconds.items())
        + f", float32 {1e3 * one.float32_seconds:.3g})"
        for index, one in zip(own, estimates, strict=False)
    )
    logger.info(
        "transport='auto' on %d workers, by estimated ms a bucket: %s",
        num_workers,
        reasons,
    )
    if own[-1]:
        logger.info(
            "float32 would be quicker on this network: %.3g ms a step instead of %.3g. "
            "Compression goes on; fallback='float32' takes float32 in such a case",
            1e3 * float32,
            1e3 * compressed,
        )
