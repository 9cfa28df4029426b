"""The choice of a method for a model on a cluster, and the table of its reasons."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import keras

from tfgradcomp.core import Layout
from tfgradcomp.core.arguments import check_choice
from tfgradcomp.methods import Method
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.planning.candidates import FLOAT32, Candidate, Option, options
from tfgradcomp.planning.forecasts import Forecast, Planner, Profile
from tfgradcomp.planning.layer_errors import WorstLayer
from tfgradcomp.planning.network import NO_LINK, Link
from tfgradcomp.planning.risks import LIMITS, RISKS
from tfgradcomp.transports.auto import names_with_equal_bits
from tfgradcomp.transports.costs import SimulatedCollectives

# Compression must make a step shorter by this factor.
MARGIN = 1.1
# A forecast may be too long by this factor, as found by `benchmarks/choices.py`.
_TOO_LONG = 1.4
# Seconds that an exchange adds to a step, given its method and the name of its
# transport.
Timer = Callable[[Method, str], float]


@dataclass(frozen=True)
class Row:
    """A candidate in the table of a decision.

    Attributes:
        name: The call of the candidate, without the inner optimizer.
        bytes_sent: Bytes that a worker sends in a step; None where not computed.
        error: The largest error of a layer; None where not measured.
        layer: The name of that layer.
        transport: Name of the quickest transport; empty where not computed.
        seconds: Duration of a step; None where not computed.
        mark: What stands before the duration: `>` if it leaves the arithmetic out,
            which need not be measured where the rest takes too long already; `~` if
            it is a forecast where others were timed.
        reason: Why the candidate was left out; empty if it was not.
    """

    name: str
    bytes_sent: float | None = None
    error: float | None = None
    layer: str = ""
    transport: str = ""
    seconds: float | None = None
    mark: str = ""
    reason: str = ""

    @property
    def milliseconds(self) -> str:
        """The duration in words; empty where not computed."""
        if self.seconds is None:
            return ""
        return f"{self.mark} {1e3 * self.seconds:.1f}".lstrip()


@dataclass(frozen=True)
class Decision:
    """A method for a model on a cluster, and why.

    Attributes:
        candidate: The choice.
        risk: The class of risk.
        workers: N.
        link: The link, in words.
        compute_seconds: Duration of a step without an exchange.
        limit: The largest error that a layer may have.
        rows: The candidates.
    """

    candidate: Candidate
    risk: str
    workers: int
    link: str
    compute_seconds: float
    limit: float
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, value: Decision | Mapping | str | Path) -> Decision:
        """Returns a decision from its configuration, or from a file of `save`.

        Raises:
            ValueError: If it is neither.
        """
        if isinstance(value, Decision):
            return value
        try:
            config: Any = value
            if isinstance(value, (str, Path)):
                config = json.loads(Path(value).read_text())
            candidate = Candidate(**config["candidate"])
            rows = tuple(Row(**row) for row in config["rows"])
            return cls(**{**config, "candidate": candidate, "rows": rows})
        except (OSError, TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(
                "decision must be a file that `Decision.save` wrote, or its content. "
                f"Received: decision={value!r}, {type(error).__name__}: {error}"
            ) from None

    def to_config(self) -> dict[str, Any]:
        """Returns the decision as JSON can hold it."""
        config = asdict(self)
        config["candidate"]["arguments"] = dict(self.candidate.arguments)
        return {**config, "rows": [asdict(row) for row in self.rows]}

    def save(self, path: str | Path) -> None:
        """Writes the decision to a file, for the argument `decision` of `Auto`."""
        Path(path).write_text(json.dumps(self.to_config(), indent=2) + "\n")

    def wrap(self, inner_optimizer: Any, **arguments: Any) -> CompressedOptimizer:
        """Returns the wrapper of the choice around an optimizer.

        Args:
            inner_optimizer: A Keras optimizer, its name or its config.
            **arguments: Further arguments of the wrapper, such as `exclude`.
        """
        return self._chosen.wrap(inner_optimizer, **arguments)

    def call(self, inner_optimizer: keras.optimizers.Optimizer) -> str:
        """Returns the call that makes the wrapper around an optimizer, as a program."""
        return self._chosen.call(inner_optimizer)

    @property
    def _chosen(self) -> Candidate:
        """The choice with its transport, which a clock would choose otherwise."""
        arguments = dict(self.candidate.arguments)
        if self.row.transport:
            arguments["transport"] = self.row.transport
        return Candidate(self.candidate.wrapper, arguments)

    @property
    def row(self) -> Row:
        """The row of the choice."""
        return next(row for row in self.rows if row.name == self.candidate.name)

    def __str__(self) -> str:
        lines = [["", "method", "MB sent", "error", "ms a step", "left out, because"]]
        for row in self.rows:
            lines.append(
                [
                    "*" if row is self.row else "",
                    row.name,
                    "" if row.bytes_sent is None else f"{row.bytes_sent / 1e6:.2f}",
                    "" if row.error is None else f"{row.error:.2f}",
                    row.milliseconds,
                    row.reason,
                ]
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(
                cell.rjust(width) if index in (2, 3, 4) else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ).rstrip()
            for cells in lines
        ]
        head = (
            f"risk={self.risk!r}, {self.workers} workers, {self.link}, "
            f"{1e3 * self.compute_seconds:.1f} ms a step without exchange: "
            f"{self.candidate.name}"
        )
        if self.row.error is not None:
            head += f", whose worst layer is {self.row.layer}"
        return "\n".join([head, *table])


def decide(
    inner: keras.optimizers.Optimizer,
    variables: Sequence,
    workers: int,
    compute_seconds: float,
    *,
    risk: str = "low",
    link: Link = NO_LINK,
    link_name: str = "",
    profile: Profile | None = None,
    errors: Mapping[str, WorstLayer] | None = None,
    exclude: object = None,
    warmup_steps: int = 1,
    timer: Timer | None = None,
) -> Decision:
    """Chooses the method of the shortest step among those that a risk allows.

    A method compresses only if its step is shorter than that of bfloat16 and float32 by
    a tenth, and bfloat16 is taken only if it is quicker than float32 by a tenth.
    With a `timer`, forecasts only tell which candidates may win, and these are timed.

    Args:
        inner: The inner optimizer.
        variables: The trainable variables, or `stand_ins` of their shapes.
        workers: N.
        compute_seconds: Duration of a step without an exchange.
        risk: `"none"`, `"low"`, `"medium"` or `"high"`.
        link: The link of each node; `NO_LINK` if the profile has costs.
        link_name: The link, in words.
        profile: Durations of the work on each machine.
        errors: The largest error of a layer, and the layer, by names of candidates;
            those that are not there are not limited.
        exclude: Variables that are not compressed, as the wrappers take them.
        warmup_steps: Steps after which 1-bit Adam compresses.
        timer: Times exchanges on the cluster; None: forecasts decide.
    """
    check_choice("risk", risk, RISKS)
    planner = Planner(
        variables,
        None,
        link,
        profile or Profile(),
        exclude=exclude,
        compute_seconds=compute_seconds,
    )
    found = options(inner, warmup_steps)
    rows = _Rows(found, planner, workers, risk, errors or {}, timer)
    best = rows.choose(compute_seconds)
    return Decision(
        best.candidate,
        risk,
        workers,
        link_name,
        compute_seconds,
        LIMITS[risk],
        rows.in_order(),
    )


def exclusion(option: Option, risk: str, error: float | None) -> str:
    """Returns why a candidate may not be taken, whatever its speed, or nothing.

    Args:
        option: The candidate.
        risk: The class of risk.
        error: The largest error of a layer; None where it is not known.
    """
    if RISKS.index(option.risk) > RISKS.index(risk):
        return f"needs risk={option.risk!r}"
    if option.reason:
        return option.reason
    limit = LIMITS[risk]
    if option.has_limit and error is not None and error > limit:
        return f"an error of {error:.3g}, more than {limit:g}"
    return ""


class _Rows:
    """The rows of one call of `decide`, by the names of candidates."""

    def __init__(self, options, planner, workers, risk, errors, timer):
        self._options = options
        self._planner, self._workers, self._timer = planner, workers, timer
        self._rows: dict[str, Row] = {}
        for option in self._options:
            worst = errors.get(option.name)
            row = Row(option.name, error=worst and worst.error)
            reason = exclusion(option, risk, row.error)
            layer = worst.layer if worst else ""
            self._rows[option.name] = replace(row, layer=layer, reason=reason)

    def in_order(self) -> tuple[Row, ...]:
        """Returns all rows."""
        return tuple(self._rows[option.name] for option in self._options)

    def choose(self, compute_seconds: float) -> Option:
        """Returns the choice, and fills the rows in.

        Args:
            compute_seconds: Duration of a step without an exchange.
        """
        found = [one for one in self._options if not self._rows[one.name].reason]
        plain = [option for option in found if option.risk == "none"]
        others = [option for option in found if option not in plain]
        for option in found:
            self._estimate(option)
        # What can be forecast at once comes first, and spares other measurements.
        ordered = sorted(found, key=self._seconds)
        if self._timer is None:
            ordered.sort(key=lambda option: option in others)
        best_plain = best_other = math.inf
        for option in ordered:
            least = self._seconds(option) / (_TOO_LONG if self._timer else 1)
            if option in plain:
                if least < MARGIN * min(best_plain, best_other):
                    self._measure(option, compute_seconds)
                    best_plain = min(best_plain, self._seconds(option))
            elif least < min(best_other, best_plain / MARGIN):
                self._measure(option, compute_seconds)
                best_other = min(best_other, self._seconds(option))
        return self._quickest(plain, others)

    def _quickest(self, plain, others):
        """Returns the choice, and says why the others are left out."""
        float32, bfloat16 = plain
        is_half = self._seconds(bfloat16) * MARGIN <= self._seconds(float32)
        base, other = (bfloat16, float32) if is_half else (float32, bfloat16)
        best = min([base, *others], key=self._seconds)
        if self._seconds(best) * MARGIN > self._seconds(base):
            best = base
        for option in others:
            slower = f"slower than {best.name}"
            self._leave_out(option, _not_faster(base) if best is base else slower)
        if best is not base:
            self._leave_out(base, f"slower than {best.name}")
        slower = f"slower than {base.name}"
        self._leave_out(other, slower if is_half else _not_faster(base))
        self._leave_out(best, "")
        return best

    def _estimate(self, option):
        """Fills in a forecast; a complete one needs no mark."""
        is_bound = option.risk != "none" and self._timer is None
        self._fill(option, is_bound, "~" if self._timer else ">" * is_bound)

    def _measure(self, option, compute_seconds):
        """Replaces a marked duration, by measured arithmetic or a timed exchange."""
        row = self._rows[option.name]
        if self._timer is not None:
            taken = self._timer(option.candidate.method, row.transport)
            row = replace(row, seconds=compute_seconds + taken, mark="")
            self._rows[option.name] = row
        elif row.mark:
            self._fill(option)

    def _forecast(self, option: Option, is_bound: bool) -> Forecast:
        """Returns the forecast of a candidate by its quickest transport."""
        candidate, workers = option.candidate, self._workers
        if candidate.wrapper == FLOAT32:
            return self._planner.float32(workers)
        planner = self._planner.without_arithmetic() if is_bound else self._planner
        # The other transports would give other bits than `transport="auto"`.
        method, collectives = candidate.method, SimulatedCollectives(workers)
        shapes = [variable.shape for variable in planner.variables]
        layout = Layout.from_shapes(shapes, method.block_size)
        names = names_with_equal_bits(method, layout, collectives)
        forecasts = planner.forecasts(candidate, workers, names)
        return min(forecasts, key=lambda forecast: forecast.step_seconds)

    def _fill(self, option, is_bound=False, mark=""):
        forecast = self._forecast(option, is_bound)
        self._rows[option.name] = replace(
            self._rows[option.name],
            bytes_sent=forecast.bytes_sent,
            transport=forecast.transport,
            seconds=forecast.step_seconds,
            mark=mark,
        )

    def _leave_out(self, option, reason):
        self._rows[option.name] = replace(self._rows[option.name], reason=reason)

    def _seconds(self, option) -> float:
        return self._rows[option.name].seconds or math.inf


def _not_faster(base: Option) -> str:
    return f"less than a tenth faster than {base.name}"
