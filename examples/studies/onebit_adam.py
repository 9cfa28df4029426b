"""Accuracy of 1-bit and 0/1 Adam next to Adam, over several seeds, on four workers.

    python examples/studies/onebit_adam.py
    python examples/studies/onebit_adam.py --quick

A LeNet learns Fashion-MNIST, and a small transformer the next character of a synthetic
text. The workers are virtual: one process has the bits of four. Writes
examples/results/onebit_adam.csv and the table of docs/onebit-adam.md; `--quick` takes
few steps of one seed and writes nothing.
"""

import keras
import study

import tfgradcomp

import data  # isort: skip
import models  # isort: skip
import texts  # isort: skip

WORKERS = 4
# Adam by its name, and what is around it, of the number of all steps.
OPTIMIZERS = {
    "Adam": lambda adam, steps: adam,
    "OneBitAdam": lambda adam, steps: tfgradcomp.OneBitAdam(adam, steps // 5),
    "OneBitAdam, refresh=16": lambda adam, steps: tfgradcomp.OneBitAdam(
        adam, steps // 5, refresh=16
    ),
    # Rounds of 1, 2, 4 and 8 steps, each for an eighth of the training, then of 16.
    "ZeroOneAdam": lambda adam, steps: tfgradcomp.ZeroOneAdam(
        adam, steps // 5, double_every=steps // 8
    ),
}


def task_of(name, seed):
    """Return what makes the model, its rate, the epochs that it needs, and datasets."""
    if name == "LeNet":
        source = data.load()
        train = data.batches(source.train, 64 * WORKERS, seed)
        return models.make_lenet, 1e-3, 3, train, data.batches(source.test, 1000)
    train = texts.letter_batches(20_000, 32 * WORKERS, 1 + seed)
    test = texts.letter_batches(2_000, 500, 0)
    return models.make_transformer, 3e-3, 10, train, test


def run(strategy, task, optimizer, seed, is_quick):
    """Return the row of a training."""
    make_model, rate, epochs, train, test = task_of(task, seed)
    if is_quick:
        epochs, train = 1, train.take(60)
    steps = epochs * len(train)

    def make_optimizer():
        schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
        return OPTIMIZERS[optimizer](keras.optimizers.Adam(schedule), steps)

    accuracy, _ = study.train(
        strategy, seed, make_model, make_optimizer, (train, test), epochs
    )
    print(task, optimizer, seed, f"{accuracy:.4f}", flush=True)
    row = {"task": task, "way": optimizer, "seed": seed, "steps": steps}
    return {**row, "accuracy": accuracy}


def main():
    """Run the study."""
    given = study.arguments(__doc__).parse_args()
    strategy = tfgradcomp.virtual_workers(WORKERS)
    tfgradcomp.enable_multi_worker_fit()
    rows = [
        run(strategy, task, optimizer, seed, given.quick)
        for task in ("LeNet", "transformer")
        for seed in ([0] if given.quick else given.seeds)
        for optimizer in OPTIMIZERS
    ]
    text = study.table(rows, "task", "Adam", ["steps"])
    print(text)
    if not given.quick:
        study.write(
            "onebit_adam", rows, text, "onebit-adam.md", f"{WORKERS} virtual workers"
        )


if __name__ == "__main__":
    main()
