"""Table of what an optimizer compresses and how it travels, and its traffic."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
from typing_extensions import Self

from tfgradcomp.collectives import Call
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.models import model_compiled_with
from tfgradcomp.compat.strategy import is_multi_worker
from tfgradcomp.engine.consistency_check import path_of
from tfgradcomp.engine.gradient_bucket import GradientBucket
from tfgradcomp.engine.plan import Plan
from tfgradcomp.engine.rows_bucket import RowsBucket
from tfgradcomp.engine.uncompressed_steps import UncompressedSteps
from tfgradcomp.transports import Traffic
from tfgradcomp.transports.auto import BY_NAME

_HEADER = ("Variable", "Shape", "Elements", "Bucket", "Transport", "Travels as")
_NARROWEST = 16


class Summarized:
    """The part of an optimizer that answers what it sends, and how.

    It reads the plan by which the optimizer exchanges gradients, and decides nothing.
    """

    built: bool
    build: Callable
    uncompressed_steps: UncompressedSteps
    inner_optimizer: Any
    _plan: Plan
    _scalars: Any

    @property
    def traffic(self) -> Traffic:
        """The traffic of one worker in a compressed step, by the fields that travel.

        Raises:
            ValueError: If the optimizer is not built yet.
        """
        if not self.built:
            raise ValueError(
                "`traffic` depends on the model's variables; ask after `fit`, or call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        return self._plan.traffic(self._scalars.moved)

    def summary(
        self: Self,
        model: keras.Model | None = None,
        line_length: int | None = None,
        print_fn: Callable[[str], Any] | None = None,
    ) -> None:
        """Prints which variables are compressed, how they travel, and why others not.

        A row for each trainable variable, then totals: bits an element, bytes a step
        next to those of a float32 ring all-reduce, buckets, workers, float steps.

        An optimizer that has taken no step yet is built for it, as the first step would
        do. With several processes that is an affair of all workers, so there it must be
        built before.

        Args:
            model: The model to build for. None: the one that was compiled with this
                optimizer.
            line_length: Characters a line, at most; the last column is folded. None: as
                many as needed.
            print_fn: Called with each line instead of `print`.

        Raises:
            ValueError: If the optimizer is not built, and is not to be built here.

        Example:
            ```python
            model.compile(tfgradcomp.TernGrad(keras.optimizers.SGD(0.01)), "mse")
            model.optimizer.summary()
            ```
        """
        if not self.built:
            self.build(variables_to_build_for(self, model))
        write = print_fn or print
        variables = compat.references(compat.trainable_variables(self))
        rows = list(_rows(self._plan, variables))
        for line in _table(rows, line_length):
            write(line)
        for line in _totals(self._plan, self.traffic, self.uncompressed_steps):
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


def _rows(plan: Plan, variables: Sequence) -> Iterable[_Row]:
    for position, variable in enumerate(variables):
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


def _totals(
    plan: Plan, traffic: Traffic, uncompressed_steps: UncompressedSteps
) -> Iterable[str]:
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
    ring = 4 * Call("sum", elements).words_sent(workers)
    yield (
        f"Bytes a step and worker: {_number(traffic.bytes_sent, ',.0f')} sent, "
        f"{_number(traffic.bytes_received, ',.0f')} received; float32 by a ring: "
        f"{ring:,.0f} each way"
    )
    if any(bucket.has_variable_length for bucket in plan.buckets):
        yield "What travels varies from step to step: figures are means of those so far"
    if uncompressed_steps:
        first, every = uncompressed_steps.warmup_steps, uncompressed_steps.dense_every
        parts = [f"the first {first}"] * (first > 0) + [f"one in {every}"] * bool(every)
        yield f"Steps as float32: {' and '.join(parts)}"


def _number(value: float, form: str) -> str:
    return "not known before a step" if math.isnan(value) else format(value, form)
