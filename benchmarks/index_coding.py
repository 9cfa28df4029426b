"""Count the bits of sparse methods' messages, with indices and with gaps.

    python benchmarks/index_coding.py

LeNet of `examples/` is trained on Fashion-MNIST by one worker with each method, twice:
with `index_coding="fixed"` and `"delta"`, which send the same elements. The figures are
means over all steps, from `optimizer.traffic`; nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import keras
import wrappers
from report import commit, publish

import tfgradcomp
from tfgradcomp.planning.forecasts import required_arguments

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))
import data  # noqa: E402
import models  # noqa: E402

BATCH_SIZE = 64
CODINGS = ("fixed", "delta")
# Where there is no default.
REQUIRED = {"threshold": 0.01}
VARIANTS = {"VarianceBased": [{"alpha": 1.0}, {"alpha": 2.0}]}


def methods() -> dict[str, tuple[str, dict]]:
    """Returns wrapper and arguments of all that code indices, by the table's names."""
    found = {}
    for name in wrappers.taking("index_coding"):
        required = {key: REQUIRED[key] for key in required_arguments(name)}
        for arguments in (required, *VARIANTS.get(name, ())):
            given = ", ".join(f"{key}={value}" for key, value in arguments.items())
            found[f"{name}({given})"] = name, arguments
    return found


def traffic_of(name: str, arguments: dict, coding: str, batches):
    """Returns what training moved."""
    keras.utils.set_random_seed(0)
    model = models.make_lenet()
    optimizer = getattr(tfgradcomp, name)(
        keras.optimizers.Adam(), index_coding=coding, **arguments
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    model.fit(batches, verbose=0, shuffle=False)
    return optimizer.traffic


def row(method: str, name: str, arguments: dict, batches) -> dict:
    """Returns the figures of one method."""
    figures = {"method": method}
    for coding in CODINGS:
        traffic = traffic_of(name, arguments, coding, batches)
        bits = traffic.bits_per_element_up * traffic.elements_compressed
        figures |= {"ratio": traffic.ratio, coding: bits / traffic.elements_sent}
    return figures


def main() -> None:
    """Trains, and writes table and CSV."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path, help="folder; default: results, README")
    arguments = parser.parse_args()
    batches = data.batches(data.load().train, BATCH_SIZE, shuffle_seed=0)
    batches = batches.take(arguments.steps).cache()
    rows = [row(method, *what, batches) for method, what in methods().items()]
    lines = [
        f"{arguments.steps} steps of {BATCH_SIZE} images; commit {commit()}.",
        "",
        "| method | elements / sent | bits each, fixed | bits each, delta |",
        "|---|---|---|---|",
        *(
            f"| `{r['method']}` | {r['ratio']:.1f} | {r['fixed']:.1f} "
            f"| {r['delta']:.1f} |"
            for r in rows
        ),
    ]
    publish(arguments.output, "index_coding", rows[0], rows, lines)


if __name__ == "__main__":
    main()
