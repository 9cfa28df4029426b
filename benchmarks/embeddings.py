"""Count the bytes of an embedding's gradient on the links between hosts.

    sudo python benchmarks/embeddings.py
    sudo python benchmarks/embeddings.py --rows 20000 --steps 5 --output /tmp/embeddings

Each worker, in a network namespace of its own (`cluster.py`), touches rows of a table
as a batch of sequences does: others in each step and on each worker. The gradient
travels as rows that are compressed, as a dense one that is compressed, and as the float
rows that TensorFlow gathers. The interfaces count the bytes. The run fails where the
tables of workers differ, or where compressed rows take more than `LIMIT` times their
indices and codes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import cluster
import embeddings_worker
import numpy as np
from measuring import markdown
from processes import Processes, exit_on_signals
from report import head, publish
from virtual_cluster import commands, rate_of

HERE = Path(__file__).resolve().parent
LIMIT = 1.2
DIGITS = 20  # Ternary codes in a word.


def needed(task: dict, workers: int) -> float:
    """Returns the bytes of indices and codes that a worker sends in a step, a mean."""
    data = [embeddings_worker.batches(task, rank) for rank in range(workers)]
    words = []
    for batches in list(zip(*data, strict=True))[embeddings_worker.WARM_UP :]:
        own = [np.unique(indices) for indices, _ in batches]
        union = np.unique(np.concatenate(own))
        codes = -(-len(union) * task["width"] // DIGITS)
        words.append(np.mean([len(one) for one in own]) + codes)
    return float(4 * (workers - 1) * np.mean(words))


def run(task: dict, hosts: list[cluster.Host], timeout: float) -> list[dict]:
    """Runs the workers; returns the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "task.json").write_text(json.dumps(task))
        script = str(HERE / "embeddings_worker.py")
        with Processes(path) as processes:
            for command in commands(hosts)(script, folder):
                processes.start(command)
            processes.wait(timeout)
        answers = [
            json.loads((path / f"answer-{rank}.json").read_text())
            for rank in range(len(hosts))
        ]
    least = needed(task, len(hosts))
    rows = []
    for name in embeddings_worker.VARIANTS:
        own = [answer[name] for answer in answers]
        if len({one["digest"] for one in own}) > 1:
            raise RuntimeError(f"the workers' tables differ after {name}")
        sent = max(one["sent"] for one in own)
        rows.append(
            {
                "variant": name,
                "step_ms": 1e3 * max(one["seconds"] for one in own),
                "sent": sent,
                "received": max(one["received"] for one in own),
                "of_indices_and_codes": sent / least,
            }
        )
    if rows[0]["of_indices_and_codes"] > LIMIT:
        raise RuntimeError(
            f"compressed rows take {rows[0]['sent']:.0f} bytes a step, more than "
            f"{LIMIT} times their {least:.0f} of indices and codes"
        )
    return rows


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rows", type=int, default=200_000, help="of the table")
    add("--width", type=int, default=32, help="elements of a row")
    add("--batch", type=int, default=32, help="sequences of a worker in a step")
    add("--length", type=int, default=20, help="rows that a sequence touches")
    add("--workers", type=int, default=2)
    add("--steps", type=int, default=20)
    add("--rate", type=rate_of, default="1gbit", help="of each link, each direction")
    add("--timeout", type=float, default=600, help="seconds")
    add("--output", type=Path, help="a folder, instead of this one")
    args = parser.parse_args()
    exit_on_signals()
    names = ("rows", "width", "batch", "length", "steps")
    task = {name: getattr(args, name) for name in names}
    task["interface"] = cluster.INTERFACE
    try:
        with cluster.virtual_cluster(args.workers, args.rate) as hosts:
            rows = run(task, hosts, args.timeout)
    except RuntimeError as error:
        sys.exit(f"embeddings.py: {error}")
    touched = f"{args.batch} x {args.length} rows"
    first = (
        f"{head()} A table of "
        f"{args.rows} x {args.width}; {args.workers} workers touch {touched} each in a "
        f"step; links of {args.rate}; {args.steps} steps."
    )
    titles = ["gradient", "step, ms", "kB sent", "kB received"]
    titles += ["sent, of indices and codes"]
    cells = [
        [
            row["variant"],
            row["step_ms"],
            *(f"{row[name] / 1e3:.1f}" for name in ("sent", "received")),
            f"{row['of_indices_and_codes']:.2f}",
        ]
        for row in rows
    ]
    lines = [first, "", *markdown(titles, cells)]
    publish(args.output, "embeddings", tuple(rows[0]), rows, lines)


if __name__ == "__main__":
    main()
