"""Time training steps with `LocalSteps` on links of a given rate.

    sudo python benchmarks/local_steps.py
    sudo python benchmarks/local_steps.py --rate 1gbit --workers 4 --output /tmp/local

Workers in network namespaces (`cluster.py`) train dense layers of 10 million parameters
with Adam, forward and backward pass included. A round is `--every` steps of each way in
turn: nothing exchanged, local steps, and float32 in each step, of which a round has
one. The time of the slowest worker counts; medians over the rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cluster
import measuring
import virtual_cluster
from processes import exit_on_signals
from report import head, write_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "local-steps.md"
WAYS = ("nothing exchanged", "LocalSteps", "LocalSteps, stagger=True")


def ways_of(delay: int) -> list[str]:
    """Returns the names of all ways; one has this `delay`."""
    return [*WAYS, f"LocalSteps, delay={delay}", "float32"]


def table(answers: list[dict]) -> list[str]:
    """Returns the lines of the table."""
    seconds = {
        way: measuring.slowest([answer["seconds"] for answer in answers], way)
        for way in answers[0]["declared"]
    }
    nothing = seconds[WAYS[0]]
    declared = answers[0]["declared"]
    return measuring.markdown(
        ["exchange", "a step, ms", "of nothing exchanged", "MB received a step"],
        [
            [way, 1e3 * taken, f"{taken / nothing:.3f}", f"{declared[way] / 1e6:.3f}"]
            for way, taken in seconds.items()
        ],
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=int, default=2, help="one for each core")
    add("--rate", type=virtual_cluster.rate_of, default="100mbit", help="of each link")
    add("--every", type=int, default=16, help="local steps")
    add("--delay", type=int, default=1, help="of one way: steps that it sends later")
    add("--batch-size", type=int, default=512, help="of each worker")
    add("--rounds", type=int, default=5, help="each way is timed so often")
    add("--timeout", type=float, default=1200, help="seconds that the run may take")
    add("--output", type=Path, help="folder; default: the page in docs")
    args = parser.parse_args()
    exit_on_signals()
    task = {"every": args.every, "batch_size": args.batch_size}
    task |= {"ways": ways_of(args.delay), "rounds": args.rounds, "delay": args.delay}
    threads = measuring.threads(None, args.workers)
    with cluster.virtual_cluster(args.workers, args.rate) as hosts:
        commands = virtual_cluster.commands(hosts)
        script = "local_steps_worker.py"
        answers = measuring.run(script, task, commands, threads, args.timeout)
    lines = [
        head(
            f"{args.workers} workers with links of {args.rate}; "
            f"{answers[0]['parameters']:,} parameters, {args.batch_size} examples "
            f"a worker; an exchange every {args.every} steps; {args.rounds} rounds"
        ),
        "",
        *table(answers),
    ]
    print("\n".join(lines))
    if args.output is None:
        write_table(PAGE, "steps", lines)
    else:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "local_steps.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
