"""Accuracy with local steps, next to float32 in each step, over several seeds.

    python examples/studies/local_steps.py
    python examples/studies/local_steps.py --quick

Four workers train LeNet and ResNet-8 on Fashion-MNIST for equally many epochs. Writes
examples/results/local_steps.csv and the table of docs/local-steps.md; `--quick` takes
a few steps of LeNet and writes nothing.
"""

import argparse
import csv
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from compare_methods import conditions, parse, replace_table  # noqa: E402

RESULTS = ROOT / "examples" / "results" / "local_steps.csv"
PAGE = ROOT / "docs" / "local-steps.md"
COLUMNS = ("model", "every", "seed", "epochs", "accuracy", "received", "ratio")
WORKERS = 4


def run(model: str, every: int, seed: int, options: list[str]) -> dict:
    """Return the row of a training."""
    command = [sys.executable, "-m", "tfgradcomp.launch", "--workers", str(WORKERS)]
    command += ["examples/local_steps.py", "--model", model, "--every", str(every)]
    command += ["--seed", str(seed), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    found = parse(done.stdout + done.stderr, WORKERS)
    values = {name: float(found[name]) for name in ("accuracy", "received", "ratio")}
    print(model, every, seed, values, flush=True)
    return {"model": model, "every": every, "seed": seed, **values}


def table(rows: list[dict]) -> str:
    """Return the table, a row for each model and number of local steps."""
    titles = ["model", "exchange", "accuracy, mean", "less float32, by seeds", "ratio"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        plain = {row["seed"]: row["accuracy"] for row in of_model if not row["every"]}
        for every in dict.fromkeys(row["every"] for row in of_model):
            own = [row for row in of_model if row["every"] == every]
            mean = statistics.mean(row["accuracy"] for row in own)
            less = [f"{100 * (r['accuracy'] - plain[r['seed']]):+.2f}" for r in own]
            exchange = f"every {every} steps, 1 bit" if every else "float32, each step"
            cells = [model, exchange, f"{100 * mean:.2f} %"]
            cells += [", ".join(less) if every else "", f"{own[0]['ratio']:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    models, seeds, options = ["lenet", "resnet"], given.seeds, []
    options = ["--epochs", str(given.epochs)]
    if given.quick:
        models, seeds = ["lenet"], [0]
        options = ["--epochs", "1", "--steps-per-epoch", "32"]
    rows = [
        run(model, every, seed, options)
        for model in models
        for seed in seeds
        for every in (0, 16)
    ]
    text = table(rows)
    print(text)
    if given.quick:
        return
    with open(RESULTS, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**row, "epochs": given.epochs} for row in rows)
    note = conditions(f"{WORKERS} workers", "1") + f"; {given.epochs} epochs."
    PAGE.write_text(replace_table(PAGE.read_text(), f"{note}\n\n{text}", "accuracy"))


if __name__ == "__main__":
    main()
