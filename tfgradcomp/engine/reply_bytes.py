"""A warning about float32 replies where a quantized reply would send less."""

from __future__ import annotations

from dataclasses import replace

from tfgradcomp.core.logging import logger
from tfgradcomp.engine.plan import Plan
from tfgradcomp.methods import Method, half_precision
from tfgradcomp.servers import Mean, Requantize
from tfgradcomp.transports.auto import BY_NAME, supported_names
from tfgradcomp.transports.costs import SimulatedCollectives

_ROUTES = {kind.route_class for kind in BY_NAME.values()}


def warn_of_long_replies(plan: Plan, method: Method) -> None:
    """Logs a warning on worker 0 if a method sends more bytes than bfloat16 would.

    It does so only if a quantized reply would send fewer than bfloat16's all-reduce.

    Args:
        plan: The plan of an optimizer.
        method: Its method, which has an argument `reply`.
    """
    fused, server = method.fused(), method.server
    routes = [
        route
        for bucket in plan.buckets
        if bucket.is_compressed
        for route in bucket.declared_routes
        if route.method == fused
    ]
    # Parameter servers have a transport of their own.
    is_known = all(type(route) in _ROUTES for route in routes)
    is_first = plan.hosts is None or plan.hosts.rank == 0
    if not (isinstance(server, Mean) and is_known and is_first):
        return
    collectives = SimulatedCollectives(plan.collectives.num_workers)

    def megabytes(name, other):
        transport = BY_NAME[name](collectives)
        bound = [transport.bind(other, route.layout, "estimate") for route in routes]
        return 4e-6 * sum(route.words.sent for route in bound)

    def least(other):
        names = set(BY_NAME).intersection(
            *(supported_names(other, route.layout, collectives) for route in routes)
        )
        return min((megabytes(name, other), name) for name in names)

    sent = 4e-6 * sum(route.words.sent for route in routes)
    half = megabytes("all_reduce", half_precision())
    if sent <= half:
        return
    fewer, name = least(replace(method, server=Requantize(server.compressor)))
    # In a gather no reply travels.
    if fewer < min(half, least(method)[0]):
        logger.warning(
            "%s with reply='float32' sends %.3g MB a step and worker, more than "
            "bfloat16's all-reduce with its %.3g MB. Give reply='requantize': it sends "
            "%.3g MB with transport='%s'",
            *(method.name, sent, half, fewer, name),
        )
