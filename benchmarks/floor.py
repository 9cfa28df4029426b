"""The least time that a step of a method can take on a machine.

    python benchmarks/floor.py                       # writes the table of README.md

A step has to touch some vectors in memory, to do some arithmetic, and to wait for its
bytes. Each of the three has a time that is measured in the same run as the step, with
all workers at once; the floor is the largest, as if each could go on beside the others.

Memory moves as fast as in a triad in place, y += x. What is stored over the step counts
when it is read and when it is written; vectors that a step could do without do not
count. Arithmetic is as fast as the package's own operations (rows of `op_rows.py`) on
vectors that stay in the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from report import write_table

TRIAD = "triad"
# Vectors that the triad reads and writes, and the most elements that each has.
TRIAD_VECTORS, TRIAD_SIZE = 3, 2**24
# Elements that a loop goes over. Where workers share a core, a shorter loop ends before
# the core turns to the next worker, and each measures a core of its own.
LOOP_SIZE = 2**26


class Needs(NamedTuple):
    """What one worker cannot do without in a step.

    Attributes:
        passes: Vectors of the gradient's length that are read or written, by reason.
        operations: Rows of `op_rows.py`, and over how many such vectors they go.
        of_part: Passes over the part of the vector that the worker is the server of.
    """

    passes: dict[str, int]
    operations: dict[str, float] = {}
    of_part: dict[str, int] = {}


GRADIENT = {"gradient read": 1}
WEIGHTS = {"weights read and written": 2}
MOMENTUM = {"momentum read and written": 2}
RESIDUAL = {"residual read and written": 2}
SERVER = {"server's residual read and written": 2}
PLAIN = Needs({**GRADIENT, **WEIGHTS})
# No block's scale is known before all of the block has been read, and blocks are larger
# than caches; TernGrad's is that of all workers.
SCALE = {"gradient read for the scales": 1}

# A server reads N payloads of a part of 1/N: one whole payload, however many workers.
VOTES = {"majority vote of 8 sign payloads": 1 / 8, "unpack base 3 to floats": 1}
SIGNS = {
    "error feedback, layers": 1,
    "server's error feedback of 4 payloads": 1 / 4,
    "unpack signs to floats": 1,
}
FEEDBACK = Needs({**GRADIENT, **RESIDUAL, **WEIGHTS}, SIGNS, SERVER)

SUM = {"their sum read for the second factor": 1}
FACTORS = {**GRADIENT, **RESIDUAL, **SUM, **WEIGHTS}

NEEDS = {
    "float32": PLAIN,
    "float16": PLAIN,
    "bfloat16": PLAIN,
    "HalfPrecision": PLAIN,
    "TernGrad": Needs(
        {**SCALE, **GRADIENT, **WEIGHTS},
        {
            "statistics of layers": 1,
            "clip, ternarise and pack": 1,
            "sum of 4 base-3 payloads to words": 1 / 4,
            "unpack base 9 to floats": 1,
        },
    ),
    "SignSGD": Needs({**GRADIENT, **WEIGHTS}, {"pack signs": 1, **VOTES}),
    "Signum": Needs(
        {**GRADIENT, **MOMENTUM, **WEIGHTS},
        {"moving average and pack signs": 1, **VOTES},
    ),
    "DistEFBlockSGD": FEEDBACK,
    "DistEFBlockSGDM": FEEDBACK._replace(passes={**FEEDBACK.passes, **MOMENTUM}),
    # Buckets of 2048 elements stay in the cache between their levels and their codes.
    "ORQ": Needs(
        {**GRADIENT, **WEIGHTS},
        {"ORQ-9 encode": 1, "mean of 4 base-9 payloads of levels": 1 / 4},
    ),
    "LinearQuantization": Needs(
        {**GRADIENT, **WEIGHTS},
        {"Linear-9 encode": 1, "mean of 4 base-9 payloads of levels": 1 / 4},
    ),
    "QSGD": Needs(
        {**GRADIENT, **WEIGHTS},
        {"QSGD-9 encode": 1, "mean of 4 base-9 payloads of levels": 1 / 4},
    ),
    "PowerSGD": Needs(
        FACTORS,
        {
            "matrices times factors of rank 4": 1,
            "transposed matrices times factors": 1,
            "products of factors of rank 4": 1,
        },
    ),
    "gloo all-reduce, one vector": Needs({"vector read and written": 2}),
    "DDP": PLAIN,
    "DDP, float16": PLAIN,
    "DDP, PowerSGD rank 1": Needs(FACTORS),
}


def loops(names: list[str]) -> list[str]:
    """Returns what has to be measured for the floors of these methods."""
    operations = [
        op for name in names if name in NEEDS for op in NEEDS[name].operations
    ]
    return [TRIAD, *dict.fromkeys(operations)]


def floor(
    name: str,
    elements: int,
    workers: int,
    received: float | None,
    rate: float | None,
    seconds: dict[str, float],
) -> dict:
    """Returns the milliseconds that a step of a method takes at the least, by part.

    Args:
        name: The method.
        elements: Of the gradient.
        workers: N.
        received: Bytes that reach a worker in a step, or None where that is unknown.
        rate: Bits a second of a worker's link; None on one machine.
        seconds: What `loops` took for one element of theirs, by name.
    """
    if name not in NEEDS:
        return {}
    needs = NEEDS[name]
    passes = sum(needs.passes.values()) + sum(needs.of_part.values()) / workers
    # What arrives is read once.
    vectors = passes * elements + (received or 0.0) / 4
    memory = vectors * seconds[TRIAD] / TRIAD_VECTORS
    arithmetic = elements * sum(
        share * seconds[operation] for operation, share in needs.operations.items()
    )
    wire = 8 * (received or 0.0) / rate if rate else 0.0
    parts = {"memory_ms": memory, "arithmetic_ms": arithmetic, "wire_ms": wire}
    parts["floor_ms"] = max(parts.values())
    return {part: 1e3 * value for part, value in parts.items()}


def table() -> list[str]:
    """Returns the lines of the table of what each method cannot do without."""
    lines = ["| method | passes | of what | arithmetic |", "|---|---|---|---|"]
    for name, needs in NEEDS.items():
        passes = str(sum(needs.passes.values()))
        reasons = [_times(*item) for item in needs.passes.items()]
        if needs.of_part:
            passes += f" + {sum(needs.of_part.values())}/N"
            reasons += [f"{_times(*item)}, of 1/N" for item in needs.of_part.items()]
        operations = [
            name if share == 1 else f"1/{1 / share:.0f} of {name}"
            for name, share in needs.operations.items()
        ]
        cells = name, passes, "; ".join(reasons), "; ".join(operations)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _times(reason, passes):
    return reason if passes == 1 else f"{reason}: {passes}"


if __name__ == "__main__":
    write_table(Path(__file__).with_name("README.md"), "floor", table())
    print("\n".join(table()))
