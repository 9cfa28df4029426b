"""Runs every program in every way, on two and three workers; writes the docs' table.

python -m tests.programs                     all of them; takes a quarter of an hour
python -m tests.programs transformer u_net   some, printed only
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.report import write_table
from tests.pool import Pools
from tests.programs import workers
from tests.programs.kinds import KINDS
from tests.programs.test_programs import RULES, run_with

PAGE = Path(__file__).resolve().parents[2] / "docs" / "foreign-programs.md"


def main(names: list[str]) -> int:
    """Prints a line for each program; returns the number of failures."""
    pools, lines, failures = Pools(), [], 0
    try:
        for kind in names or KINDS:
            cells = []
            for count in (2, 3):
                for rules in RULES.values():
                    cells.append(_result(pools(count), kind, rules))
                if count == 2:
                    cells.append(_distance(pools(count), kind))
            failures += sum(cell.startswith("fails") for cell in cells)
            about = KINDS[kind].__doc__.strip().rstrip(".")
            name = kind.replace("_", " ")
            lines.append(f"| {name} | {about} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    finally:
        pools.close()
    if not names:
        ways = [*RULES, "identity and stock", *(f"{way}, 3" for way in RULES)]
        titles = ["program", "what is in it", *ways]
        rule = "|" + "---|" * len(titles)
        write_table(PAGE, "programs", [f"| {' | '.join(titles)} |", rule, *lines])
    return failures


def _result(pool, kind, rules):
    """The first and the last loss, if all workers end with the same bits."""
    try:
        first, *others = pool.run(run_with, kind, rules).answers
    except AssertionError as error:
        return f"fails: {str(error).splitlines()[-1]}"
    if any(other["digest"] != first["digest"] for other in others):
        return "fails: weights differ"
    return f"{first['losses'][0]:.3f} → {first['losses'][-1]:.3f}"


def _distance(pool, kind):
    """The largest difference between the weights of the identity and of stock Keras."""
    try:
        stock, identity = (
            pool.run(workers.run, kind, wrapper).answers[0]["weights"]
            for wrapper in ("stock", "identity")
        )
    except AssertionError as error:
        return f"fails: {str(error).splitlines()[-1]}"
    pairs = zip(stock, identity, strict=True)
    return f"{max(np.abs(one - other).max() for one, other in pairs):.0e}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
