"""Traffic of a plan, and the table of what an optimizer compresses and how."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras

from tfgradcomp.assignment.models import model_compiled_with
from tfgradcomp.collectives import CollectiveCall
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.compat.strategy import is_multi_worker
from tfgradcomp.engine.consistency_check import path_of
from tfgradcomp.engine.gradient_bucket import GradientBucket
from tfgradcomp.engine.plan import Plan
from tfgradcomp.engine.rows_bucket import RowsBucket
from tfgradcomp.transports import Traffic
from tfgradcomp.transports.auto import BY_NAME
from tfgradcomp.transports.messages import fixed_words, message_words

_HEADER = ("Variable", "Shape", "Elements", "Bucket", "Transport", "Travels as")
_NARROWEST = 16


def traffic_of(plan: Plan, counters: PerReplicaVariable | None) -> Traffic:
    """Returns the traffic of one worker in a compressed step.

    Args:
        plan: The plan by which the optimizer exchanges gradients.
        counters: Where messages vary in length, int64 `[3]`: the steps so far, the
            elements sent and the words that varied.
    """
    workers = plan.collectives.num_workers
    # The traffic of tables is counted at run time.
    fixed = [b for b in plan.buckets if not isinstance(b, RowsBucket)]
    words = [part.route.words for bucket in fixed for part in bucket.parts]
    compressed = sum(bucket.size for bucket in plan.buckets if bucket.is_compressed)
    plain = sum(bucket.size for bucket in plan.buckets) - compressed
    sent: float = sum(b.size for b in fixed if not b.has_variable_length)
    variable = 0.0
    if counters is not None:
        steps, counted, variable = counters.numpy().tolist()
        counted, variable = (
            x / steps if steps else math.nan for x in (counted, variable)
        )
        sent += counted
    routes = [p.route for b in fixed if b.is_compressed for p in b.parts]
    up = sum(fixed_words(route.fields) for route in routes)
    reply = sum(message_words(route.reply_fields) for route in routes)
    varying = CollectiveCall("gather", variable)
    return Traffic(
        num_workers=workers,
        elements_compressed=compressed,
        elements_plain=plain,
        bits_per_element_up=32 * (up + variable) / max(compressed, 1),
        bits_per_element_reply=32 * reply / max(compressed, 1),
        words_sent=sum(one.sent for one in words)
        + plan.collectives.words_sent(varying),
        words_received=sum(one.received for one in words)
        + plan.collectives.words_received(varying),
        elements_sent=sent,
    )


def print_summary(
    plan: Plan,
    traffic: Traffic,
    line_length: int | None = None,
    print_fn: Callable[[str], Any] | None = None,
) -> None:
    """Prints a row for each variable of a plan, then totals.

    Args:
        plan: The plan by which the optimizer exchanges gradients.
        traffic: Its traffic.
        line_length: The most characters of a line; the last column is folded. None: any
            number.
        print_fn: Called with each line instead of `print`.
    """
    write = print_fn or print
    for line in _table(list(_rows(plan)), line_length):
        write(line)
    for line in _totals(plan, traffic):
        for part in textwrap.wrap(line, line_length or len(line)):
            write(part)


def variables_to_build_for(optimizer: Any, model: keras.Model | None) -> list:
    """Returns the variables of the model that an optimizer is to be built for.

    Args:
        optimizer: A wrapper that is not built.
        model: The model; None: the one that was compiled with the optimizer.

    Raises:
        ValueError: If there is none with weights, or if several processes must build.
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


class _Row(NamedTuple):
    variable: str
    shape: str
    elements: str
    bucket: str
    transport: str
    travels_as: str


def _rows(plan: Plan) -> Iterable[_Row]:
    for position, variable in enumerate(plan.variables):
        buckets = [b for b in plan.buckets if position in b.positions]
        reason = plan.reasons[position]
        if not any(bucket.is_compressed for bucket in buckets):
            method_or_reason = ("float32: " if buckets else "") + (reason or "")
        else:
            method_or_reason = plan.methods[position]
        shape = tuple(variable.shape)
        yield _Row(
            path_of(variable),
            str(shape),
            f"{math.prod(shape):,}",
            _span([bucket.name for bucket in buckets]),
            ", ".join(dict.fromkeys(map(_transport_of, buckets))) or "-",
            method_or_reason,
        )


def _span(names):
    """One name, or the first and the last of those that a variable is cut into."""
    if len(names) < 2:
        return "".join(names) or "-"
    return f"{names[0]} to .{names[-1].rpartition('.')[2]}"


def _transport_of(bucket: GradientBucket) -> str:
    """The transport's name as a user gives it; of another one, the route's class."""
    if isinstance(bucket, RowsBucket):
        return "rows"
    names = {kind.route_class: name for name, kind in BY_NAME.items()}
    return names.get(type(bucket.route), type(bucket.route).__name__)


def _table(rows: Sequence[_Row], line_length: int | None) -> Iterable[str]:
    cells = [_Row(*_HEADER), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if line_length:
        before = sum(widths[:-1]) + 2 * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(line_length - before, _NARROWEST))
    rule = "  ".join("─" * width for width in widths)
    for index, row in enumerate(cells):
        for number, part in enumerate(textwrap.wrap(row.travels_as, widths[-1])):
            line = row if number == 0 else _Row("", "", "", "", "", "")
            columns = [
                cell.rjust(width) if name == "elements" else cell.ljust(width)
                for name, cell, width in zip(
                    _Row._fields, line._replace(travels_as=part), widths, strict=True
                )
            ]
            yield "  ".join(columns).rstrip()
        if index == 0:
            yield rule
    yield rule


def _totals(plan: Plan, traffic: Traffic) -> Iterable[str]:
    workers = traffic.num_workers
    elements = traffic.elements_compressed + traffic.elements_plain
    yield (
        f"Compressed: {traffic.elements_compressed:,} of {elements:,} elements; "
        f"buckets: {len(plan.buckets)}; workers: {workers}"
    )
    if traffic.elements_compressed:
        yield (
            f"Bits an element: {_number(traffic.bits_per_element_up, '.2f')} up, "
            f"{_number(traffic.bits_per_element_reply, '.2f')} in the reply"
        )
    ring = 4 * CollectiveCall("sum", elements).words_sent(workers)
    yield (
        f"Bytes a step and worker: {_number(traffic.bytes_sent, ',.0f')} sent, "
        f"{_number(traffic.bytes_received, ',.0f')} received; float32 by a ring: "
        f"{ring:,.0f} each way"
    )
    if any(bucket.has_variable_length for bucket in plan.buckets):
        yield "What travels varies from step to step: figures are means of those so far"
    if plan.uncompressed_steps:
        first = plan.uncompressed_steps.warmup_steps
        every = plan.uncompressed_steps.dense_every
        parts = [f"the first {first}"] * (first > 0) + [f"one in {every}"] * bool(every)
        yield f"Steps as float32: {' and '.join(parts)}"


def _number(value: float, form: str) -> str:
    return "not known before a step" if math.isnan(value) else format(value, form)
