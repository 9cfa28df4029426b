"""Accuracy with single steps as float32, over several seeds, on four workers.

    python examples/studies/float_steps.py
    python examples/studies/float_steps.py --quick

A LeNet learns Fashion-MNIST by three methods, each alone, with a warm-up in float32,
and with a step in float32 now and then. The workers are virtual: one process has the
bits of four. Writes examples/results/float_steps.csv and the table of
docs/float-steps.md; `--quick` takes few steps of one seed and writes nothing.
"""

import keras
import study

import tfgradcomp

import data  # isort: skip
import models  # isort: skip

WORKERS, EPOCHS = 4, 2
METHODS = {
    "TernGrad": lambda **steps: tfgradcomp.TernGrad(
        keras.optimizers.SGD(0.05, momentum=0.9), **steps
    ),
    "DistEFBlockSGDM": lambda **steps: tfgradcomp.DistEFBlockSGDM(
        keras.optimizers.SGD(0.02), **steps
    ),
    "Strom": lambda **steps: tfgradcomp.Strom(
        keras.optimizers.SGD(0.05, momentum=0.9), threshold="auto", **steps
    ),
}
WAYS = {
    "alone": {},
    "warmup_steps=50": {"warmup_steps": 50},
    "dense_every=10": {"dense_every": 10},
}


def main():
    """Run the study."""
    given = study.arguments(__doc__).parse_args()
    strategy = tfgradcomp.virtual_workers(WORKERS)
    tfgradcomp.enable_multi_worker_fit()
    source, rows = data.load(), []
    test = data.batches(source.test, 1000)
    for method, make in METHODS.items():
        for seed in [0] if given.quick else given.seeds:
            batches = data.batches(source.train, 64 * WORKERS, seed)
            if given.quick:
                batches = batches.take(60)
            for way, steps in WAYS.items():
                accuracy, _ = study.train(
                    strategy,
                    seed,
                    models.make_lenet,
                    lambda make=make, steps=steps: make(**steps),
                    (batches, test),
                    1 if given.quick else EPOCHS,
                )
                print(method, way, seed, f"{accuracy:.4f}", flush=True)
                row = {"method": method, "way": way, "seed": seed}
                rows.append({**row, "accuracy": accuracy})
    text = study.table(rows, "method", "alone")
    print(text)
    if not given.quick:
        where = f"{WORKERS} virtual workers, {EPOCHS} epochs"
        study.write("float_steps", rows, text, "float-steps.md", where)


if __name__ == "__main__":
    main()
