"""What every benchmark says of itself, and where its figures go."""

from __future__ import annotations

import contextlib
import csv
import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
# Columns of a row that say by what it was measured, and when.
RUN = ("machine", "date", "commit")
_COLOURS = {"TensorFlow": "#7f7f7f", "tfgradcomp": "#1f77b4", "PyTorch": "#dd8452"}


def processor() -> str:
    """Returns the name of the processor and the number of its cores for us."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Returns the commit of this checkout, with a plus if its code has been changed."""
    here = Path(__file__).parent

    def git(*arguments):
        done = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        name = git("describe", "--always", "--exclude=*")
        # A table that another benchmark has just written is no change.
        code = git("status", "--porcelain", ":/*.py", ":/*.cc", ":/*.cu", ":/*.h")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}+" if code else name


def run() -> dict:
    """Returns the values of `RUN` for what has just been measured here."""
    date = str(datetime.date.today())
    return {"machine": processor(), "date": date, "commit": commit()}


def head(facts: str = "", rows: Sequence[dict] = ()) -> str:
    """Returns the line above a table: machines, facts, dates and commits.

    Args:
        facts: How the rows were measured.
        rows: With the columns of `RUN`, of one run or several; none: of a run here.
    """
    rows = rows or [run()]
    machines, dates, commits = (
        list(dict.fromkeys(row[name] for row in rows)) for name in RUN
    )
    when = " to ".join(sorted({min(dates), max(dates)}))
    of_code = f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
    parts = [" and ".join(machines), facts, f"{when}, {of_code}"]
    return "; ".join(filter(None, parts)) + "."


def write_csv(path: Path, columns: Iterable[str], rows: list[dict]) -> None:
    """Writes rows; what a row lacks stays empty."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def kept_rows(path: Path, key: Iterable[str], rows: list[dict]) -> list[dict]:
    """Returns the rows of an earlier CSV, those replaced that are measured anew.

    Args:
        path: Of the CSV; where there is none, nothing is kept.
        key: The columns that tell rows apart.
        rows: What has been measured; new keys come last.
    """
    earlier: list[dict] = []
    if path.exists():
        with open(path, newline="") as file:
            earlier = [
                {n: text if n in RUN else _value(text) for n, text in row.items()}
                for row in csv.DictReader(file)
            ]
    found = {tuple(row[name] for name in key): row for row in (*earlier, *rows)}
    return list(found.values())


def _value(text):
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text or None


def write_table(readme: Path, name: str, lines: list[str]) -> None:
    """Puts lines between `<!-- name: begin -->` and `<!-- name: end -->`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = readme.read_text()
    if not 0 <= text.find(begin) < text.find(end):
        raise ValueError(
            f"{readme} should hold the lines {begin} and {end}, in this order, where "
            "the table goes; put them back."
        )
    before, after = text.partition(begin)[0], text.partition(end)[2]
    readme.write_text("\n".join([before + begin, *lines, end + after]))


def csv_of(output: Path | None, name: str) -> Path:
    """Returns the path of a table's rows.

    Args:
        output: A folder; None: that of all results.
        name: Of the table; that of the file has underscores.
    """
    file = name.replace(" ", "_").replace("-", "_")
    return (output or HERE / "results") / f"{file}.csv"


def publish(
    output: Path | None,
    name: str,
    columns: Iterable[str],
    rows: list[dict],
    lines: list[str],
    page: Path = HERE / "README.md",
) -> None:
    """Prints a table, and writes it into a page and its rows beside the others.

    Args:
        output: As for `csv_of`; where it is given, the page is left alone.
        name: Of the table in the page, and as for `csv_of`.
        columns: Of the file.
        rows: What the table is of.
        lines: The table.
        page: Where it goes.
    """
    print("\n".join(lines))
    path = csv_of(output, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(path, columns, rows)
    if output is None:
        write_table(page, name, lines)


def plot_bars(path: Path, rows: list[dict], label: Callable) -> None:
    """Draws the milliseconds of each row's exchange, if matplotlib is there."""
    axes = _axes(9, 1 + 0.3 * len(rows))
    if axes is None:
        return
    names = [label(row) for row in rows]
    values = [row["exchange_ms"] for row in rows]
    colours = [_COLOURS[row["framework"]] for row in rows]
    bars = axes.barh(names, values, color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1)
    axes.set_xlabel("exchange, ms")
    axes.set_title(f"{rows[0]['workload']}, {rows[0]['workers']} workers")
    axes.figure.savefig(path, bbox_inches="tight", dpi=120)


def plot_lines(path: Path, rows: list[dict], label: Callable) -> None:
    """Draws each variant's exchange over the workers, if matplotlib is there."""
    axes = _axes(9, 5)
    if axes is None:
        return
    styles = {"TensorFlow": "--", "tfgradcomp": "-", "PyTorch": ":"}
    for name in dict.fromkeys(label(row) for row in rows):
        own = [row for row in rows if label(row) == name]
        axes.plot(
            [row["workers"] for row in own],
            [row["exchange_ms"] for row in own],
            styles[own[0]["framework"]],
            marker="o",
            label=name,
        )
    axes.spines[["top", "right"]].set_visible(False)
    # Next to nothing on one worker, where noise may be negative.
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xticks(sorted({row["workers"] for row in rows}))
    axes.set_xlabel("workers")
    axes.set_ylabel("exchange, ms")
    axes.set_title(rows[0]["workload"])
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.figure.savefig(path, bbox_inches="tight", dpi=120)


def plot_histograms(path: Path, panels: dict) -> None:
    """Draws how values are distributed, one panel each, if matplotlib is there.

    Args:
        path: Of the picture.
        panels: Arrays, by title. The first one is clipped to 2.5 deviations, which
            is what all panels show; bins are relative to the fullest.
    """
    row = _axes(2.6 * len(panels), 2.4, columns=len(panels))
    if row is None:
        return
    limit = 2.5 * next(iter(panels.values())).std()
    for axes, (title, values) in zip(row, panels.items(), strict=True):
        counts, edges = np.histogram(values.clip(-limit, limit), 101, (-limit, limit))
        axes.stairs(counts / counts.max(), edges, fill=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title)
    row[0].figure.savefig(path, bbox_inches="tight", dpi=120)


def plot_accuracies(path: Path, looks: list[dict], links: list[dict], target: float):
    """Draws accuracies over seconds, a panel for each rate, if matplotlib is there.

    Args:
        path: Of the picture.
        looks: Rows of `way`, `seed`, `step` and `accuracy`; the first seed is drawn.
        links: Rows of `way`, `rate` and `step_ms`.
        target: An accuracy that is marked.
    """
    rates = list(dict.fromkeys(row["rate"] for row in links))
    if not looks or not rates:
        return
    panels = _axes(6 * len(rates), 4, columns=len(rates))
    if panels is None:
        return
    for axes, rate in zip(np.atleast_1d(panels), rates, strict=True):
        for link in (row for row in links if row["rate"] == rate):
            own = [row for row in looks if row["way"] == link["way"]]
            own = [row for row in own if row["seed"] == own[0]["seed"]]
            seconds = [row["step"] * link["step_ms"] / 1e3 for row in own]
            accuracies = [row["accuracy"] for row in own]
            axes.plot(seconds, accuracies, marker=".", label=link["way"])
        axes.axhline(target, color="grey", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xscale("log")
        axes.set_xlabel("seconds")
        axes.set_title(f"accuracy, links of {rate}")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.figure.savefig(path, bbox_inches="tight", dpi=120)


def _axes(width, height, columns=1):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no matplotlib here, so no plot: pip install matplotlib", file=sys.stderr)
        return None
    return Figure(figsize=(width, height)).subplots(
        1, columns, sharex=True, sharey=True
    )
