"""The small tables of docs/speed.md: whole steps beside those of the baselines."""

from __future__ import annotations

from pathlib import Path

from measuring import FLOAT32, markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "speed.md"
# The baselines, as the tables call them.
BASELINES = {
    "float32": "TensorFlow's float32",
    "bfloat16": "bfloat16, `HalfPrecision`",
    "DDP": "PyTorch's DDP",
    "DDP, float16": "PyTorch's DDP, float16",
}


def summary(rows: list[dict]) -> list[str]:
    """Returns the lines of a small table: the baselines, and each method at its best.

    Whole steps come first; an exchange alone says too little.
    """
    best = {}
    for row in sorted(rows, key=lambda row: row["exchange_ms"]):
        if row["framework"] == "tfgradcomp":
            best.setdefault(row["variant"], row)
    baselines = [row for row in rows if row["variant"] in BASELINES]
    shown = (*baselines, *sorted(best.values(), key=rows.index))
    float32 = next(row["step_ms"] for row in rows if row["variant"] == FLOAT32)
    return markdown(
        ["gradients travel by", "step, ms", "times as fast", "exchange in it, ms"],
        [
            [
                BASELINES.get(row["variant"], f"`{row['variant']}`"),
                row["step_ms"],
                float32 / row["step_ms"],
                row["exchange_ms"],
            ]
            for row in shown
        ],
    )
