"""The choice of a method for a model on a cluster, and the table of its reasons."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import keras

from tfgradcomp.core import Layout
from tfgradcomp.planning.candidates import (
    FLOAT32,
    LIMITS,
    RISKS,
    Candidate,
    Option,
    options,
)
from tfgradcomp.planning.forecasts import Planner, Profile, no_arithmetic
from tfgradcomp.planning.network import Link
from tfgradcomp.planning.shapes import Shapes
from tfgradcomp.transports.auto import names_with_equal_bits
from tfgradcomp.transports.costs import SimulatedCollectives

# Compression must make a step shorter by this factor.
MARGIN = 1.1


@dataclass(frozen=True)
class Row:
    """A candidate in the table of a decision.

    Attributes:
        name: The call of the candidate, without the inner optimizer.
        bytes_sent: Bytes that a worker sends in a step; None where not computed.
        error: The largest error of a layer; None where not measured.
        layer: The name of that layer.
        seconds: Forecast duration of a step; None where not computed.
        reason: Why the candidate was left out; empty if it was not.
    """

    name: str
    bytes_sent: float | None = None
    error: float | None = None
    layer: str = ""
    seconds: float | None = None
    reason: str = ""


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
            if isinstance(value, (str, Path)):
                value = json.loads(Path(value).read_text())
            fields = {**value, "candidate": Candidate(**value["candidate"])}
            return cls(**{**fields, "rows": tuple(Row(**r) for r in value["rows"])})
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

    @property
    def moves_momentum(self) -> bool:
        """True if the method keeps the momentum of the inner optimizer."""
        return self.candidate.wrapper == "DistEFBlockSGDM"

    @property
    def row(self) -> Row:
        """The row of the choice."""
        return next(row for row in self.rows if row.name == self.candidate.name)

    def __str__(self) -> str:
        lines = [["", "method", "MB sent", "layer's error", "ms a step", "left out"]]
        for row in self.rows:
            lines.append(
                [
                    "*" if row is self.row else "",
                    row.name,
                    "" if row.bytes_sent is None else f"{row.bytes_sent / 1e6:.2f}",
                    "" if row.error is None else f"{row.error:.2f} {row.layer}",
                    "" if row.seconds is None else f"{1e3 * row.seconds:.1f}",
                    row.reason,
                ]
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(
                cell.rjust(width) if index in (2, 4) else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ).rstrip()
            for cells in lines
        ]
        head = (
            f"risk={self.risk!r}, {self.workers} workers, {self.link}, "
            f"{1e3 * self.compute_seconds:.1f} ms a step without exchange: "
            f"{self.candidate.name}"
        )
        return "\n".join([head, *table])


def decide(
    inner: keras.optimizers.Optimizer,
    shapes: Shapes,
    workers: int,
    compute_seconds: float,
    *,
    risk: str = "low",
    link: Link | None = None,
    link_name: str = "",
    profile: Profile | None = None,
    errors: Mapping[str, tuple[float, str]] | None = None,
) -> Decision:
    """Chooses the method of the shortest step among those that a risk allows.

    A method compresses only if its step is shorter than that of bfloat16 and float32 by
    a tenth, and bfloat16 is taken only if it is quicker than float32 by a tenth.

    Args:
        inner: The inner optimizer.
        shapes: The shapes of the trainable variables.
        workers: N.
        compute_seconds: Duration of a step without an exchange.
        risk: `"none"`, `"low"`, `"medium"` or `"high"`.
        link: The link of each node; None if the profile has costs.
        link_name: The link, in words.
        profile: Durations of the work on each machine.
        errors: The largest error of a layer, and the layer, by names of candidates;
            those that are not there are not limited.
    """
    return _Decider(
        inner, shapes, workers, compute_seconds, risk, link, profile or Profile()
    ).decide(errors or {}, link_name)


class _Decider:
    """Makes the forecasts and the rows of one call of `decide`."""

    def __init__(self, inner, shapes, workers, compute_seconds, risk, link, profile):
        self._options = options(inner)
        self._workers, self._compute, self._risk = workers, compute_seconds, risk
        common = {"compute_seconds": compute_seconds}
        free = profile._replace(arithmetic=no_arithmetic)
        self._bounds = Planner(shapes, None, link, free, **common)
        self._planner = Planner(shapes, None, link, profile, **common)
        self._layout = Layout.from_shapes(shapes)

    def decide(self, errors, link_name) -> Decision:
        """Returns the decision."""
        plain = [option for option in self._options if option.risk == "none"]
        rows = {option: self._row(self._planner, option) for option in plain}
        float32, bfloat16 = (rows[option].seconds for option in plain)
        base, half = plain
        if bfloat16 * MARGIN > float32:
            rows[half] = replace(rows[half], reason=_not_faster(base))
        else:
            rows[base] = replace(rows[base], reason=f"slower than {half.name}")
            base = half
        best, most = base, rows[base].seconds / MARGIN
        others = []
        for option in self._options[len(plain) :]:
            error, layer = errors.get(option.name, (None, ""))
            rows[option] = row = Row(option.name, error=error, layer=layer)
            reason = self._excluded(option, error)
            if reason:
                rows[option] = replace(row, reason=reason)
            else:
                bound = self._row(self._bounds, option)
                rows[option] = replace(bound, error=error, layer=layer)
                others.append(option)
        # What cannot win needs no measurement of its arithmetic.
        for option in sorted(others, key=lambda option: rows[option].seconds):
            reason = _not_faster(base) if best is base else f"slower than {best.name}"
            if rows[option].seconds < most:
                seconds = self._row(self._planner, option).seconds
                rows[option] = replace(rows[option], seconds=seconds)
            if rows[option].seconds >= most:
                rows[option] = replace(rows[option], reason=reason)
                continue
            if best is not base:
                slower = f"slower than {option.name}"
                rows[best] = replace(rows[best], reason=slower)
            best, most = option, rows[option].seconds
        if best is not base:
            rows[base] = replace(rows[base], reason=f"slower than {best.name}")
        return Decision(
            best.candidate,
            self._risk,
            self._workers,
            link_name,
            self._compute,
            LIMITS[self._risk],
            tuple(rows[option] for option in self._options),
        )

    def _row(self, planner: Planner, option: Option) -> Row:
        """Returns the forecast of a candidate by its quickest transport."""
        candidate, workers = option.candidate, self._workers
        if candidate.wrapper == FLOAT32:
            forecast = planner.float32(workers)
        else:
            # The others would give other bits than `transport="auto"`.
            collectives = SimulatedCollectives(workers)
            names = names_with_equal_bits(candidate.method, self._layout, collectives)
            forecast = min(
                (f for f in planner.forecasts(candidate, workers, names)),
                key=lambda forecast: forecast.step_seconds,
            )
        return Row(option.name, forecast.bytes_sent, seconds=forecast.step_seconds)

    def _excluded(self, option: Option, error: float | None) -> str:
        """Returns why a candidate may not be taken, whatever its speed."""
        if RISKS.index(option.risk) > RISKS.index(self._risk):
            return f"needs risk={option.risk!r}"
        if option.reason:
            return option.reason
        limit = LIMITS[self._risk]
        if option.has_limit and error is not None and error > limit:
            return f"an error of {error:.2g}, more than {limit:g}"
        return ""


def _not_faster(base: Option) -> str:
    return f"less than a tenth faster than {base.name}"
