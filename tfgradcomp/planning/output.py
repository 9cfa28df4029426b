"""Forms in which a plan is shown: a table with sentences, CSV, JSON and a plot."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from tfgradcomp.planning.network import GRPC, NO_SOFTWARE, TCP
from tfgradcomp.planning.shapes import Shapes, sizes

if TYPE_CHECKING:
    from tfgradcomp.planning.training_plan import Forecast, TrainingPlan

EMBEDDINGS = (
    "Embeddings are counted as dense; in training only the rows that a batch touches "
    "travel."
)
_PREFIXES = (("G", 1e9), ("M", 1e6), ("k", 1e3))
# Largest number of methods whose colours in a plot can be told apart.
_PLOTTED_METHODS = 6


def row(plan: TrainingPlan, forecast: Forecast) -> dict:
    """Returns a forecast as a row of the CSV, in milliseconds and bytes per step."""
    parts = {
        f"{name}_ms": 1e3 * getattr(forecast, f"{name}_seconds") / forecast.local_steps
        for name in ("arithmetic", "software", "waiting", "link")
    }
    return {
        "method": forecast.method,
        "transport": forecast.transport,
        "workers": forecast.workers,
        "step_ms": 1e3 * forecast.step_seconds,
        "throughput": forecast.throughput,
        "speedup": forecast.speedup,
        "speedup_over_float32": plan.over_float32(forecast),
        "efficiency": forecast.efficiency,
        "bytes_sent": forecast.bytes_per_step,
        "compute_ms": 1e3 * forecast.compute_seconds,
        **parts,
        "break_even_bits": plan.break_even(forecast),
    }


def write_csv(file: TextIO, plan: TrainingPlan) -> None:
    """Writes a row for every forecast."""
    rows = [row(plan, forecast) for forecast in plan.forecasts]
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)


def write_json(file: TextIO, plan: TrainingPlan) -> None:
    """Writes the link, every forecast, and the sentences."""
    content = {
        "link": plan.link._asdict(),
        "forecasts": [row(plan, forecast) for forecast in plan.forecasts],
        "best": {count: asdict(plan.best(count)) for count in plan.workers},
        "sentences": sentences(plan),
    }
    json.dump(content, file, indent=2)
    file.write("\n")


def head(plan: TrainingPlan, name: str, shapes: Shapes) -> str:
    """Returns the line above the table: the model, its step and the link."""
    first, link = plan.forecasts[0], plan.link
    text = (
        f"{name}: {sum(sizes(shapes)):,} parameters; "
        f"{number(1e3 * first.compute_seconds)} ms a step without exchange; "
        f"links of {rate(link.bandwidth)}, {1e3 * link.latency:g} ms"
    )
    if link.devices_per_node > 1:
        text += f", {link.devices_per_node} workers a node"
    if first.local_steps > 1:
        text += f", an exchange every {first.local_steps} steps"
    if first.delay:
        text += f", applied {first.delay} later"
    return text


def table(plan: TrainingPlan) -> list[str]:
    """Returns a line for each method, by its quickest transport."""
    counts, most = plan.workers, max(plan.workers)
    speedups = {(f.method, n): f.speedup for n in counts for f in plan.quickest(n)}
    lines = [["method", f"transport, N={most}", "MB sent", "ms a step"]]
    lines[0] += ["of float32", "examples/s", *(f"N={count}" for count in counts)]
    for best in plan.quickest(most):
        cells = [best.method, best.transport, f"{best.bytes_per_step / 1e6:.2f}"]
        cells += [f"{1e3 * best.step_seconds:.0f}", f"{plan.over_float32(best):.2f}"]
        cells.append(number(best.throughput))
        for count in counts:
            speedup = speedups.get((best.method, count))
            cells.append("" if speedup is None else f"{speedup:.2f}")
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    ] + [f"N=...: speed-up over one worker; the other columns are of N={most}."]


def sentences(plan: TrainingPlan) -> list[str]:
    """Returns the conclusions for the largest number of workers, in sentences."""
    most = max(plan.workers)
    if most == 1:
        return ["One worker exchanges nothing. Give --workers 2 or more."]
    best, (float32, *methods) = plan.best(most), plan.quickest(most)
    gain = (
        f"{best.speedup:.1f} times as fast as one worker (efficiency "
        f"{best.efficiency:.0%})"
    )
    if best is float32:
        lines = [f"Best on {most} workers: float32, without compression, {gain}."]
    else:
        lines = [
            f"Best on {most} workers: {_way(best)}, {gain} and "
            f"{plan.over_float32(best):.1f} times as fast as float32; a worker sends "
            f"{best.bytes_per_step / 1e6:.1f} MB a step."
        ]
    lines += [_break_even(plan, method) for method in methods[:1]]
    if plan.ratio is not None:
        lines.append("The arithmetic of sparse methods is not counted.")
    lines += [plan.warning() or "", _assumption(plan), *_left_out(plan)]
    return [line for line in lines if line]


def plot(path: str, plan: TrainingPlan, name: str) -> None:
    """Draws the throughput over the workers, a group of bars for each number of them.

    Args:
        path: Path of the picture.
        plan: The plan.
        name: Name of the model.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--plot draws with matplotlib, which is not installed: pip install "
            f"matplotlib, or leave it out. Received: plot={path!r}"
        )
    # pyplot would need a display.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 4))
    axes = figure.subplots()
    counts = plan.workers
    methods = [f.method for f in plan.quickest(max(counts))[: 1 + _PLOTTED_METHODS]]
    found = {(f.method, n): f.throughput for n in counts for f in plan.quickest(n)}
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        values = [found.get((method, count), math.nan) for count in counts]
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(counts))]
        axes.bar(places, values, width, label=method)
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel("workers")
    axes.set_ylabel("examples a second")
    axes.set_yscale("log")
    ticker = importlib.import_module("matplotlib.ticker")
    axes.yaxis.set_major_locator(ticker.LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.set_title(f"{name}, links of {rate(plan.link.bandwidth)}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, bbox_inches="tight", dpi=120)


def _way(forecast):
    return f"{forecast.method} by {forecast.transport}"


def _assumption(plan):
    """Returns what a plan assumes of the software, and what is not known."""
    by = {GRPC: "TensorFlow's gRPC", TCP: "TCP, float32 by TensorFlow's gRPC"}
    if plan.software in by:
        return (
            f"Assumed: messages on CPUs travel by {by[plan.software]}, as fitted on "
            "two cores. How quick float32 is with NCCL on GPUs is not known. Compare "
            "HalfPrecision, too."
        )
    if plan.software == NO_SOFTWARE:
        return "Assumed: the software around the link takes no time."
    return "Assumed: the software around the link takes the measured time."


def _left_out(plan):
    reasons: dict[str, list[str]] = {}
    for method, reason in plan.left_out.items():
        reasons.setdefault(reason, []).append(method)
    return [f"Left out: {', '.join(of)} ({why})." for why, of in reasons.items()]


def _break_even(plan, forecast):
    bits = plan.break_even(forecast)
    if bits is not None:
        return (
            f"Break-even: on links of {rate(bits)} float32 would be as quick as "
            f"{_way(forecast)}; on quicker ones, quicker."
        )
    quicker = "quicker" if plan.over_float32(forecast) > 1 else "slower"
    return (
        f"Break-even: none; {_way(forecast)} is {quicker} than float32 on links of any "
        "rate, with this software."
    )


def number(value: float) -> str:
    """Returns a number for people: three digits, or all of a large whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate(bits: float) -> str:
    """Returns bits per second, for people."""
    for prefix, unit in _PREFIXES:
        if bits >= unit:
            return f"{bits / unit:.3g} {prefix}bit/s"
    return f"{bits:.3g} bit/s"
