"""Breaks trainings on purpose; writes the docs' table.

python -m tests.faults              every fault; takes ten minutes
python -m tests.faults save trace   those of some phases, printed only
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from benchmarks.report import write_table
from tests.faults import runs
from tests.faults.program import PHASES
from tests.faults.test_faults import SIGNALS, check

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
ROLES = {0: "worker 0, which leads", 1: "worker 1"}
TITLES = "fault", "role", "phase", "what is said", "after, s", "done after, s", "lost"


def main(phases: list[str]) -> int:
    """Prints a line for each fault; returns the number of failures."""
    lines = [f"| {' | '.join(TITLES)} |", "|" + "---|" * len(TITLES)]
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = runs.run(Path(folder, "whole"))
        for phase in phases or PHASES:
            for name in SIGNALS:
                for rank, role in ROLES.items():
                    own = Path(folder, f"{phase}-{name}-{rank}")
                    try:
                        run = runs.run(own, name, phase, rank)
                        check(run, whole, phase)
                        found = [*_said(run), f"{run.seconds:.0f}", "nothing"]
                    except AssertionError as error:
                        failures += 1
                        found = [f"fails: {error}", "", "", ""]
                    lines.append(f"| {' | '.join([name, role, phase, *found])} |")
                    print(lines[-1], flush=True)
    if not phases:
        write_table(PAGE, "workers", lines)
    return failures


def _said(run):
    """The sentence without what differs from run to run, and its seconds."""
    line, seconds = run.said
    own = r"^(\[\d\] tfgradcomp|tfgradcomp.launch): | \(pid \d+\)"
    return re.sub(own, "", line), f"{seconds:.1f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
