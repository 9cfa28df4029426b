"""The settings of the study of local steps on a language model, and their tables."""

import math
import statistics
from typing import NamedTuple

import outers
import study

# Both are divisible by all numbers of local steps: the end of a part, which makes an
# exchange, adds none.
STEPS, PART = 3072, 512
DRIFT_STEPS = 1024
# Of the inner optimizer; for the baseline, the smaller of the best two.
RATE = 2e-3
EVERY = (16, 32, 64)
# float16 differences of weights, also after each step.
WEIGHTS = "float16, weights"
# 0/1 Adam: one bit, float32 in a warm-up, then rounds that grow up to `every` steps.
ZERO_ONE = "0/1 Adam"
EXCHANGES = ("float16", "1 bit", "2 bits", "4 bits", "top-k", "top-k, decay 1")


class Row(NamedTuple):
    """A setting.

    Attributes:
        exchange: Name of a method of `outers.py`.
        every: Number of steps between two exchanges; 1: gradients are exchanged, or
            with `WEIGHTS` the weights.
        momentum: Where the outer momentum is, one of `outers.MOMENTA`.
        inner: The inner optimizer.
        steps: Number of steps.
        rate: Learning rate of the inner optimizer.
    """

    exchange: str
    every: int
    momentum: str = "none"
    inner: str = "Adam"
    steps: int = STEPS
    rate: float = RATE

    @property
    def name(self) -> str:
        """The setting in words."""
        steps = "each step" if self.every == 1 else f"{self.every} steps"
        parts = [steps, self.exchange]
        if self.momentum != "none":
            parts.append(f"momentum {self.momentum}")
        if self.inner != "Adam":
            parts.append(self.inner)
        if self.steps != STEPS:
            parts.append(f"{self.steps} in all")
        if self.rate != RATE:
            parts.append(f"rate {self.rate:g}")
        return ", ".join(parts)


BASELINE = Row("bfloat16", 1)

# Momentum of 0.9, as in DiLoCo.
LARGE_MOMENTUM = [
    Row("float16", 16, "behind"),
    Row("float16", 32, "behind"),
    Row("2 bits", 32, "in front"),
    Row("2 bits", 32, "behind"),
    Row("top-k", 32, "in front"),
]

# Top-k sends so little that more exchanges still take a thousandth of float32's bytes.
OFTEN = [Row("top-k", 8), Row("top-k", 8, "0.5 in front")]

# Four times as many steps: does the distance shrink? The last five send a thousandth
# of float32's bytes, or less.
LONGER = [
    Row(exchange, every, steps=4 * STEPS)
    for exchange, every in (
        ("bfloat16", 1),
        ("float16", 16),
        ("1 bit", 16),
        (ZERO_ONE, 16),
        (ZERO_ONE, 64),
        ("1 bit", 32),
        ("2 bits", 64),
        ("top-k", 16),
    )
] + [row._replace(steps=4 * STEPS) for row in OFTEN[1:]]

# Sixteen times as many.
LONGEST = [row._replace(steps=16 * STEPS) for row in (BASELINE, OFTEN[1])]


def drift() -> list[Row]:
    """Return the rows with few steps between two exchanges, and none."""
    rows = [BASELINE, Row(WEIGHTS, 1), *(Row("float16", n) for n in (4, 16))]
    rows += [row._replace(rate=2 * RATE) for row in (*rows[:2], rows[-1])]
    return [row._replace(steps=DRIFT_STEPS) for row in rows]


def plain(every: int) -> list[Row]:
    """Return the rows without outer momentum."""
    return [Row(exchange, every) for exchange in EXCHANGES]


def with_momentum(every: int) -> list[Row]:
    """Return the rows with an outer momentum of 0.5."""
    # Without residuals the momentum is nowhere in front.
    places = {name: "0.5 in front" for name in EXCHANGES} | {"float16": "0.5 behind"}
    return [Row(exchange, every, place) for exchange, place in places.items()]


def inner_rows() -> list[Row]:
    """Return the rows with other inner optimizers, and their own baselines."""
    both = (
        ("bfloat16", 1, "none"),
        ("float16", 32, "none"),
        ("float16", 32, "behind"),
        ("2 bits", 32, "none"),
        ("2 bits", 32, "in front"),
    )
    return [
        *(Row(*way, inner) for inner in ("AdamW", "Muon") for way in both),
        Row("float16", 32, "0.5 behind", "Muon"),
        Row("2 bits", 32, "0.5 in front", "Muon"),
        Row("2 bits", 64, inner="Muon"),
        Row("top-k", 8, inner="Muon"),
    ]


def grid() -> dict[str, list[Row]]:
    """Return the rows by parts, the parts that tell most first."""
    return {
        "few": [BASELINE, Row("float32", 1), *plain(16), *plain(32)],
        "often": OFTEN,
        "zero_one": [Row(ZERO_ONE, n) for n in EVERY],
        "longer": LONGER,
        "longest": LONGEST,
        "drift": drift(),
        "momentum": [*with_momentum(32), *with_momentum(16)],
        "large_momentum": LARGE_MOMENTUM,
        "causes": [Row(name, 16) for name in outers.one_bit_changes(STEPS // 16)],
        "many": [*plain(64), *with_momentum(64)],
        "inner": inner_rows(),
    }


class Rows:
    """The rows that were measured, by their settings and seeds.

    Args:
        rows: Rows of the file.
    """

    def __init__(self, rows: list[dict]):
        self._found: dict[Row, dict[int, dict]] = {}
        for row in rows:
            setting = Row(*(row[name] for name in Row._fields))
            self._found.setdefault(setting, {})[row["seed"]] = row

    def loss(self, row: Row) -> float:
        """Return a row's mean loss."""
        return statistics.mean(own["loss"] for own in self._found[row].values())

    def bytes(self, row: Row) -> float:
        """Return the bytes that a worker sends in a step."""
        if row.exchange in outers.partly_exact(1):
            return math.nan
        if row.exchange in outers.SIGNS:
            row = row._replace(exchange="1 bit")
        rows = self._found.get(row, {})
        return statistics.mean([own["bytes"] for own in rows.values()] or [math.nan])

    def more(self, row: Row, base: Row) -> list[float]:
        """Return by how many percent of the baseline's loss a row's is larger."""
        own, plain = self._found[row], self._found.get(base, {})
        return [
            100 * (own[seed]["loss"] / plain[seed]["loss"] - 1)
            for seed in own
            if seed in plain
        ]

    def table(self, rows: list[Row]) -> str:
        """Return the table of those of some rows that were measured."""
        titles = ["inner", "steps", "exchange", "outer momentum", "loss"]
        titles += ["more than bfloat16's, %", "by seeds", "seeds", "bytes", "fewer"]
        lines = []
        ring = self.bytes(Row("float32", 1))
        for row in rows:
            if row not in self._found:
                continue
            base = BASELINE._replace(inner=row.inner, steps=row.steps)
            inner = row.inner if row.rate == RATE else f"{row.inner}, {row.rate:g}"
            more = self.more(row, base) if row != base else []
            more = [one for one in more if math.isfinite(one)]
            loss, size = self.loss(row), self.bytes(row)
            lines.append(
                [
                    inner,
                    str(row.every),
                    row.exchange,
                    row.momentum if row.momentum != "none" else "",
                    f"{loss:.4f}" if math.isfinite(loss) else "diverged",
                    study.interval_text(more, "+") if more else "",
                    ", ".join(f"{one:+.2f}" for one in more),
                    ", ".join(str(seed) for seed in sorted(self._found[row])),
                    f"{size:,.0f}" if math.isfinite(size) else "",
                    f"{ring / size:,.0f}" if math.isfinite(ring / size) else "",
                ]
            )
        return study.markdown(titles, lines, right=2)

    def draw(self):
        """Draw loss over bytes: a line for a method, a point for a number of steps."""
        made = study.figure("studies/local-language", 2, sharex=True, sharey=True)
        if made is None or BASELINE not in self._found:
            return
        axes, save = made
        base = self.loss(BASELINE)
        alone = [row for n in EVERY for row in (*plain(n), Row(ZERO_ONE, n))]
        panels = {
            "no outer momentum": [OFTEN[0], *alone],
            "outer momentum 0.5": [
                OFTEN[1],
                *(row for n in EVERY for row in with_momentum(n)),
            ],
        }
        for axis, (title, wanted) in zip(axes, panels.items(), strict=True):
            axis.axhline(base, color="0.5", linewidth=0.8)
            axis.set(
                xscale="log",
                xlabel="bytes that a worker sends in a step",
                ylim=(0.97 * base, 1.6 * base),
                title=title,
            )
            for number, exchange in enumerate((*EXCHANGES, ZERO_ONE)):
                rows = [
                    row
                    for row in wanted
                    if row.exchange == exchange and row in self._found
                ]
                # A loss beyond the figure stands at its upper edge.
                axis.plot(
                    [self.bytes(row) for row in rows],
                    [min(self.loss(row), 1.59 * base) for row in rows],
                    marker="o",
                    color=f"C{number}",
                    label=exchange,
                )
        axes[0].set_ylabel("held-out loss, nats a character")
        # In the panel with room; its first line is the baseline's.
        axes[0].legend(
            handles=axes[0].lines[1:],
            fontsize="small",
            title="16, 32, 64 steps from the right;\ntop-k also 8",
            title_fontsize="small",
            loc="upper right",
        )
        save()
