"""Traffic of a plan, and the table of what an optimizer compresses and how."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import keras

from tfgradcomp.assignment.models import model_compiled_with
from tfgradcomp.collectives import CollectiveCall
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.compat.strategy import is_multi_worker
from tfgradcomp.engine.consistency_check import path_of
from tfgradcomp.engine.device_sharded_bucket import Bucket
from tfgradcomp.engine.plan import Plan
from tfgradcomp.transports import Traffic
from tfgradcomp.transports.auto import BY_NAME
from tfgradcomp.transports.messages import fixed_words, message_words

_ELEMENTS = "Elements"
_HEADER = ("Variable", "Shape", _ELEMENTS, "Bucket", "Transport", "Travels as")
_NARROWEST = 16


def traffic_of(plan: Plan, counters: PerReplicaVariable | None) -> Traffic:
    """Returns the traffic of one worker in a compressed step.

    Args:
        plan: The plan by which the optimizer exchanges gradients.
        counters: `StepVariables.traffic_counters`.
    """
    buckets, collectives = plan.buckets, plan.collectives
    compressed = sum(bucket.size for bucket in buckets if bucket.is_compressed)
    sent: float = sum(b.size for b in buckets if not b.has_variable_length)
    variable_words = 0.0
    if counters is not None:
        steps, *counts = counters.numpy().tolist()
        means = [count / steps if steps else math.nan for count in counts]
        sent, variable_words = sent + means[0], means[1]
    # The traffic of tables is counted in the step.
    words = [route.words for b in buckets for route in b.declared_routes]
    routes = [r for b in buckets if b.is_compressed for r in b.declared_routes]
    first = sum(message_words(route.mean_reduced_fields) for route in routes)
    up = first + sum(fixed_words(route.fields) for route in routes)
    reply = first + sum(message_words(route.reply_fields) for route in routes)
    call = CollectiveCall("gather", variable_words)
    return Traffic(
        num_workers=collectives.num_workers,
        elements_compressed=compressed,
        elements_plain=sum(bucket.size for bucket in buckets) - compressed,
        bits_per_element_up=32 * (up + variable_words) / max(compressed, 1),
        bits_per_element_reply=32 * reply / max(compressed, 1),
        words_sent=sum(w.sent for w in words) + collectives.words_sent(call),
        words_received=sum(w.received for w in words)
        + collectives.words_received(call),
        elements_sent=sent,
    )


def joined(plans: Sequence[Plan]) -> Plan:
    """Returns the plan of a model whose variables several plans divide."""
    owners = {
        position: plan
        for plan in plans
        for bucket in plan.buckets
        for position in bucket.positions
    }
    first, number = plans[0], len(plans[0].variables)
    return replace(
        first,
        buckets=tuple(bucket for plan in plans for bucket in plan.buckets),
        reasons=tuple(owners.get(i, first).reasons[i] for i in range(number)),
    )


def print_summary(
    plan: Plan,
    traffic: Traffic,
    line_length: int | None = None,
    print_fn: Callable[[str], Any] | None = None,
    exchange: str = "a step",
) -> None:
    """Prints a row for each variable of a plan, then totals.

    Args:
        plan: The plan by which the optimizer exchanges gradients.
        traffic: Its traffic.
        line_length: The most characters of a line; the last column is folded. None: any
            number.
        print_fn: Called with each line instead of `print`.
        exchange: What the traffic is of, in words.
    """
    write = print_fn or print
    for line in _table(_rows(plan), line_length):
        write(line)
    for line in _totals(plan, traffic, exchange):
        for part in textwrap.wrap(line, line_length or len(line)):
            write(part)


def variables_to_build_for(optimizer: Any, model: keras.Model | None) -> list:
    """Returns the variables that an optimizer is built for.

    Args:
        optimizer: A wrapper that is not built.
        model: The model; None: the model that was compiled with the optimizer.

    Raises:
        ValueError: If there is no model with weights, or several processes must build.
    """
    model = model or model_compiled_with(optimizer)
    has_others = is_multi_worker(compat.strategy_of(optimizer.inner_optimizer))
    if model is not None and model.built and not has_others:
        return model.trainable_variables
    known = "none" if model is None else model.name
    if model is not None and not model.built:
        known += " without weights"
    raise ValueError(
        "`summary` depends on the model's variables. Ask after `fit`, or call "
        "`optimizer.build(model.trainable_variables)` first: on all workers, where "
        "there are several. Received: "
        f"model={known}, processes={'several' if has_others else 'one'}"
    )


def _rows(plan: Plan) -> Iterable[tuple[str, ...]]:
    """Yields the cells of each variable."""
    for position, variable in enumerate(plan.variables):
        buckets = [b for b in plan.buckets if position in b.positions]
        travels_as = plan.methods[position]
        if not any(bucket.is_compressed for bucket in buckets):
            reason = plan.reasons[position] or ""
            travels_as = f"float32: {reason}" if buckets else reason
        names = [bucket.name for bucket in buckets] or ["-"]
        if len(names) > 1:
            # The first and the last bucket that a variable is cut into.
            names = [f"{names[0]} to .{names[-1].rpartition('.')[2]}"]
        yield (
            path_of(variable),
            str(tuple(variable.shape)),
            f"{math.prod(variable.shape):,}",
            names[0],
            ", ".join(dict.fromkeys(map(_transport_of, buckets))) or "-",
            travels_as,
        )


def _transport_of(bucket: Bucket) -> str:
    """Returns the name of a bucket's transport; if it has none, the route's class."""
    names = {kind.route_class: name for name, kind in BY_NAME.items()}
    kind = type(bucket.route)
    return "rows" if bucket.takes_rows else names.get(kind, kind.__name__)


def _table(rows: Iterable[tuple[str, ...]], line_length: int | None) -> Iterable[str]:
    cells = [_HEADER, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if line_length:
        before = sum(widths[:-1]) + 2 * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(line_length - before, _NARROWEST))
    rule = "  ".join("─" * width for width in widths)
    for row in cells:
        others = row[:-1]
        for part in textwrap.wrap(row[-1], widths[-1]):
            columns = [
                cell.rjust(width) if column == _ELEMENTS else cell.ljust(width)
                for column, cell, width in zip(
                    _HEADER, (*others, part), widths, strict=True
                )
            ]
            yield "  ".join(columns).rstrip()
            others = ("",) * len(others)
        if row is _HEADER:
            yield rule
    yield rule


def _totals(plan: Plan, traffic: Traffic, exchange: str) -> Iterable[str]:
    elements = traffic.elements_compressed + traffic.elements_plain
    yield (
        f"Compressed: {traffic.elements_compressed:,} of {elements:,} elements; "
        f"buckets: {len(plan.buckets)}; workers: {traffic.num_workers}"
    )
    if traffic.elements_compressed:
        yield (
            f"Bits an element: {_number(traffic.bits_per_element_up, '.2f')} up, "
            f"{_number(traffic.bits_per_element_reply, '.2f')} in the reply"
        )
    ring = 4 * CollectiveCall("sum", elements).words_sent(traffic.num_workers)
    yield (
        f"Bytes {exchange} and worker: {_number(traffic.bytes_sent, ',.0f')} sent, "
        f"{_number(traffic.bytes_received, ',.0f')} received; float32 by a ring: "
        f"{ring:,.0f} each way"
    )
    if any(bucket.has_variable_length for bucket in plan.buckets):
        yield "Traffic varies from step to step: figures are means of the steps so far"
    steps = plan.uncompressed_steps
    parts = [f"the first {steps.warmup_steps}"] if steps.warmup_steps else []
    parts += [f"one in {steps.dense_every}"] if steps.dense_every else []
    if parts:
        yield f"Steps as float32: {' and '.join(parts)}"


def _number(value: float, form: str) -> str:
    return "not known before a step" if math.isnan(value) else format(value, form)
