"""Write the table of the CUDA kernels' speed from the figures of `make gpu`.

    python benchmarks/gpu_table.py

A machine with a GPU may have neither NumPy nor this package; so `gpu.py` leaves
results/gpu.csv, and this script writes README.md's table from its largest size.
"""

from __future__ import annotations

import csv

from measuring import markdown
from report import HERE, write_table

AIM = 0.8  # Of the bandwidth of a copy.
# What each method does most.
CALLS = (
    "AddScaled",
    "PackCodes base=3",
    "UnpackCodes base=3",
    "SumCodes base=3",
    "PackTernary",
    "SumLevels base=3",
    "PackSigns stream=0",
    "MajorityVote stream=0 base=2 reply_base=2 quorum=0",
    "MajorityVote stream=0 base=3 reply_base=3 quorum=0",
    "PackMomentumSigns stream=0 warming_up=0",
    "MeanOfSigns",
    "BlockStatistics",
    "SignErrorFeedback moving=0 momentum=1",
    "MeanSignErrorFeedback moving=0",
    "FindLevels optimal count=9 sweeps=0",
    "PackLevels count=9 stream=0",
    "MeanOfLevels count=9",
    "PackUnambiguous alpha < 1=0 > 2=1",
    "PackOverThreshold variance=1 large=1",
    "MeanOfSparse one in=100",
    "MultiplyMatrices rank=4",
    "MultiplyTransposed rank=4",
    "MultiplyFactors rank=4",
    "Orthonormalize rank=4",
)


def main() -> None:
    """Writes the table."""
    with open(HERE / "results" / "gpu.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    most = max(int(row["elements"]) for row in rows)
    rows = [row for row in rows if int(row["elements"]) == most]
    found = {(row["call"], row["blocks"]): row for row in rows}
    cells = []
    for call in CALLS:
        cells.append([f"`{call}`"])
        for blocks in ("one block", "buckets"):
            row = found.get((call, blocks), {})
            cells[-1] += [row.get(name, "") for name in ("microseconds", "of copy")]
    quick = sum(float(row["of copy"]) >= AIM for row in rows)
    one = rows[0]
    head = (
        f"{one['device']}; driver {one['driver']}; CUDA {one['CUDA']}; "
        f"{most} elements; {one['date']}, commit {one['commit']}. "
        f"{quick} of {len(rows)} calls reach {AIM} of a copy's bandwidth."
    )
    titles = ["call", "one block, µs", "of copy", "buckets, µs", "of copy"]
    readme = HERE / "README.md"
    write_table(readme, "gpu", [head, "", *markdown(titles, cells)])


if __name__ == "__main__":
    main()
