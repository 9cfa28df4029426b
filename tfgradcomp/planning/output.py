"""The forms that a plan is shown in: a table with sentences, CSV, JSON and a plot."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from tfgradcomp.planning.forecasts import Forecast, Plan
    from tfgradcomp.planning.measured import NamedModel

COLUMNS = (
    *("method", "transport", "workers", "step_ms", "throughput", "speedup"),
    *("speedup_over_float32", "efficiency", "bytes_sent", "compute_ms"),
    *("arithmetic_ms", "software_ms", "waiting_ms", "link_ms", "break_even_bits"),
)
_PREFIXES = (("G", 1e9), ("M", 1e6), ("k", 1e3))
# So many lines of a plot have colours that can be told apart.
_LINES = 6


def row(plan: Plan, one: Forecast) -> dict:
    """Returns a forecast by the names in `COLUMNS`: milliseconds and bytes a step."""
    parts = {
        f"{name}_ms": 1e3 * getattr(one, f"{name}_seconds") / one.local_steps
        for name in ("arithmetic", "software", "waiting", "link")
    }
    return {
        "method": one.method,
        "transport": one.transport,
        "workers": one.workers,
        "step_ms": 1e3 * one.step_seconds,
        "throughput": one.throughput,
        "speedup": one.speedup,
        "speedup_over_float32": plan.over_float32(one),
        "efficiency": one.efficiency,
        "bytes_sent": one.bytes_per_step,
        "compute_ms": 1e3 * one.compute_seconds,
        **parts,
        "break_even_bits": plan.break_even(one),
    }


def write_csv(file: TextIO, plan: Plan) -> None:
    """Writes every forecast as a line."""
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    writer.writerows(row(plan, one) for one in plan.forecasts)


def write_json(file: TextIO, plan: Plan) -> None:
    """Writes the link, every forecast, and the sentences."""
    content = {
        "link": plan.link._asdict(),
        "forecasts": [row(plan, one) for one in plan.forecasts],
        "best": {count: asdict(plan.best(count)) for count in plan.workers},
        "sentences": sentences(plan),
    }
    json.dump(content, file, indent=2)
    file.write("\n")


def head(plan: Plan, model: NamedModel) -> str:
    """Returns the line above the table: what is planned."""
    first, link = plan.forecasts[0], plan.link
    elements = sum(math.prod(shape) for shape in model.shapes)
    every = f", an exchange every {first.local_steps} steps"
    devices = f", {link.devices_per_node} workers a node"
    return (
        f"{model.name}: {elements:,} parameters; "
        f"{1e3 * first.compute_seconds:.4g} ms a step without exchange; "
        f"links of {_rate(link.bandwidth)}, {1e3 * link.latency:g} ms"
        + (devices if link.devices_per_node > 1 else "")
        + (every if first.local_steps > 1 else "")
    )


def table(plan: Plan) -> list[str]:
    """Returns a line for each method: its speed-up by its quickest transport."""
    counts, most = plan.workers, max(plan.workers)
    found = {
        (one.method, count): one for count in counts for one in plan.quickest(count)
    }
    ordered = plan.quickest(most)
    lines = [["method", f"transport, N={most}", "MB sent", "ms a step"]]
    lines[0] += ["of float32", "examples/s", *(f"N={count}" for count in counts)]
    for one in ordered:
        cells = [one.method, one.transport, f"{one.bytes_per_step / 1e6:.2f}"]
        cells += [f"{1e3 * one.step_seconds:.0f}", f"{plan.over_float32(one):.2f}"]
        cells.append(f"{one.throughput:.4g}")
        for count in counts:
            own = found.get((one.method, count))
            cells.append("" if own is None else f"{own.speedup:.2f}")
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    ] + [f"N=...: speed-up over one worker; the other columns are of N={most}."]


def sentences(plan: Plan) -> list[str]:
    """Returns what follows for the largest number of workers, in sentences."""
    most = max(plan.workers)
    best = plan.best(most)
    if most == 1:
        return ["One worker exchanges nothing. Give --workers 2 or more."]
    what = f"{best.method} by {best.transport}"
    if best.method == "float32":
        lines = [
            f"Best on {most} workers: float32, without compression, {best.speedup:.1f} "
            f"times as fast as one worker (efficiency {best.efficiency:.0%})."
        ]
        best = next(iter(plan.quickest(most)[1:]), best)
        what = f"{best.method} by {best.transport}"
    else:
        lines = [
            f"Best on {most} workers: {what}, {best.speedup:.1f} times as fast as one "
            f"worker (efficiency {best.efficiency:.0%}) and "
            f"{plan.over_float32(best):.1f} times as fast as float32; a worker sends "
            f"{best.bytes_per_step / 1e6:.1f} MB a step."
        ]
    if best.method != "float32":
        lines.append(_break_even(plan, best, what))
    if plan.ratio is not None:
        lines.append("The arithmetic of sparse methods is not counted.")
    warning = plan.warning()
    return [*lines, warning] if warning else lines


def plot(path: str, plan: Plan, name: str) -> None:
    """Draws the throughput over the workers, a group of bars for each number of them.

    Args:
        path: Of the picture.
        plan: The plan.
        name: Of the model.

    Raises:
        ValueError: If there is no matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--plot draws with matplotlib, which is not installed: pip install "
            f"matplotlib, or leave it out. Received: plot={path!r}"
        )
    # Without pyplot: nothing asks for a display.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 4))
    axes = figure.subplots()
    counts = plan.workers
    names = [one.method for one in plan.quickest(max(counts))[: 1 + _LINES]]
    width = 0.8 / len(names)
    for index, method in enumerate(names):
        values = []
        for count in counts:
            own = [one for one in plan.quickest(count) if one.method == method]
            values.append(own[0].throughput if own else math.nan)
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(counts))]
        axes.bar(places, values, width, label=method)
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel("workers")
    axes.set_ylabel("examples a second")
    axes.set_yscale("log", base=2)
    axes.set_title(f"{name}, links of {_rate(plan.link.bandwidth)}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, bbox_inches="tight", dpi=120)


def _break_even(plan, best, what):
    rate = plan.break_even(best)
    if rate is not None:
        return (
            f"Break-even: on links of {_rate(rate)} float32 would be as quick as "
            f"{what}; on quicker ones, quicker."
        )
    quicker = "quicker" if plan.over_float32(best) > 1 else "slower"
    return f"Break-even: none; {what} is {quicker} than float32 on links of any rate."


def _rate(bits):
    for prefix, unit in _PREFIXES:
        if bits >= unit:
            return f"{bits / unit:.3g} {prefix}bit/s"
    return f"{bits:.3g} bit/s"
