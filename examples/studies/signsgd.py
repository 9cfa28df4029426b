"""Compare majority votes of signs with SGD and Adam, by the number of workers.

    python examples/studies/signsgd.py
    python examples/studies/signsgd.py --quick

A small LeNet learns Fashion-MNIST with 1, 3, 4, 7 and 8 workers of 8 examples each, all
with the same number of steps: SignSGD and Signum on virtual workers, where ties move
nothing or draw a coin, and SGD and Adam with the mean gradient of as many examples.
Writes examples/results/signsgd.csv and signsgd_rates.csv, and tables and a figure of
docs/studies/signsgd.md; sign_noise.py writes the others. `--quick` takes few steps of
one seed and writes nothing.
"""

import subprocess
import sys

import keras
import study

import tfgradcomp

import repeated  # isort: skip

WORKERS, EACH, STEPS, AT_ONCE = (1, 3, 4, 7, 8), 8, 160, 20
EXAMPLES = 10_240
# Only exact zeros are below this threshold.
ZEROS_ABSTAIN = {"abstain_below": 1e-6}


def _signs(method, **arguments):
    return lambda: method(keras.optimizers.SGD(0.1), min_size=0, **arguments)


FLOAT = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1),
}
SIGNS = {
    "SignSGD": _signs(tfgradcomp.SignSGD),
    "Signum": _signs(tfgradcomp.Signum),
}
COINS = {
    'SignSGD, tie="random"': _signs(tfgradcomp.SignSGD, tie="random"),
    'Signum, tie="random"': _signs(tfgradcomp.Signum, tie="random"),
}
ABSTAINING = {"SignSGD, zeros abstain": _signs(tfgradcomp.SignSGD, **ZEROS_ABSTAIN)}
MAKERS = FLOAT | SIGNS | COINS | ABSTAINING
# The rates are chosen with as many workers, and a seed that is not in the study.
RATES_WORKERS, RATES_SEED = 4, 100
RATES = {
    "SGD": (0.02, 0.05, 0.1),
    "Adam": (1e-3, 3e-3, 1e-2),
    "SignSGD": (3e-4, 1e-3, 3e-3, 1e-2),
    "Signum": (1e-3, 3e-3, 1e-2),
}


def ways_of(workers):
    """Return the ways to train with a number of workers."""
    ways = FLOAT | SIGNS
    if workers > 1:
        ways |= ABSTAINING
    if workers % 2 == 0:
        ways |= COINS
    return list(ways)


class Trainings:
    """Trainings in one process, with a fixed number of workers."""

    def __init__(self, workers, steps=STEPS):
        self._workers, self._steps = workers, steps
        self._strategy = tfgradcomp.virtual_workers(workers) if workers > 1 else None
        self._trainers = {}
        self._train, self._held_out, self._test = repeated.load(EXAMPLES)

    def _run(self, way, seed, rate):
        if way not in self._trainers:
            # Without compression N workers take the step of one with all examples.
            alone = self._strategy is None or way in FLOAT
            scope = None if alone else self._strategy.scope()
            self._trainers[way] = repeated.Trainer(scope, MAKERS[way], AT_ONCE)
        trainer, together = self._trainers[way], EACH * self._workers
        rates = repeated.dropped(rate)
        losses = trainer.train(self._train, seed, together, self._steps, rates)
        return trainer, losses

    def rate(self, key):
        """Return the accuracy of a learning rate on held-out examples."""
        trainer, _ = self._run(key["way"], RATES_SEED, key["rate"])
        return {"accuracy": trainer.accuracy(self._held_out)}

    def accuracy(self, key, rates):
        """Return the row of a training."""
        rate = rates[key["way"].partition(",")[0],]
        trainer, losses = self._run(key["way"], key["seed"], rate)
        accuracy = trainer.accuracy(self._test)
        return {"rate": rate, "accuracy": accuracy, "loss": losses[-1]}


def rates_rows(measure):
    """Return the rows of the learning rates."""
    keys = [{"way": way, "rate": rate} for way, own in RATES.items() for rate in own]
    return study.complete("signsgd_rates", keys, measure, ["accuracy"])


def accuracy_rows(numbers, seeds, measure):
    """Return the rows of the trainings with some numbers of workers."""
    keys = [
        {"workers": workers, "way": way, "seed": seed}
        for seed in seeds
        for workers in numbers
        for way in ways_of(workers)
    ]
    return study.complete("signsgd", keys, measure, ["rate", "accuracy", "loss"])


def _missing(key):
    raise KeyError(f"No row of the study. Received: key={key}")


def child(workers, seeds):
    """Train with one number of workers."""
    trainings = Trainings(workers)
    rates = repeated.best_rates(rates_rows(trainings.rate), ["way"])
    accuracy_rows([workers], seeds, lambda key: trainings.accuracy(key, rates))


def accuracy_table(rows):
    """Return the accuracies by ways and numbers of workers."""
    titles = ["way", "rate", *(f"N = {workers}" for workers in WORKERS)]
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = []
        for workers in WORKERS:
            own = of_way(rows, workers, way)
            percent = study.interval_text([100 * value for value in own]) if own else ""
            cells.append(percent and f"{percent} %")
        rate = next(row["rate"] for row in rows if row["way"] == way)
        lines.append([way, f"{rate:g}", *cells])
    return study.markdown(titles, lines)


def of_way(rows, workers, way, column="accuracy"):
    """Return a column of a way's rows with some workers, in the order of seeds."""
    return [r[column] for r in rows if (r["workers"], r["way"]) == (workers, way)]


def pairs_table(rows):
    """Return the table of differences, taken seed by seed."""
    pairs = [
        ("Signum", "Adam", WORKERS),
        ("Signum", "SGD", WORKERS),
        ("SignSGD", "SGD", WORKERS),
        ("SignSGD, zeros abstain", "SignSGD", WORKERS[1:]),
        ('SignSGD, tie="random"', "SignSGD", (4, 8)),
        ('Signum, tie="random"', "Signum", (4, 8)),
    ]
    titles = ["difference", *(f"N = {workers}" for workers in WORKERS)]
    lines = []
    for way, base, numbers in pairs:
        cells = []
        for workers in WORKERS:
            if workers not in numbers:
                cells.append("")
                continue
            both = (of_way(rows, workers, way), of_way(rows, workers, base))
            less = [100 * (own - other) for own, other in zip(*both, strict=True)]
            cells.append(study.interval_text(less, "+"))
        lines.append([f"{way}, less {base}", *cells])
    return study.markdown(titles, lines)


def draw(rows):
    """Draw accuracy and loss by the number of workers."""
    made = study.figure("studies/signsgd", 2)
    if made is None:
        return
    axes, save = made
    columns = {"accuracy": "test accuracy, %", "loss": "training loss, last eighth"}
    for axis, (column, label) in zip(axes, columns.items(), strict=True):
        factor = 100 if column == "accuracy" else 1
        for way in MAKERS:
            numbers = [workers for workers in WORKERS if way in ways_of(workers)]
            found = [
                study.interval([factor * v for v in of_way(rows, n, way, column)])
                for n in numbers
            ]
            means, widths = zip(*found, strict=True)
            style = "--" if way in FLOAT else ":" if way in COINS else "-"
            axis.errorbar(
                numbers, means, widths, ls=style, marker=".", capsize=3, label=way
            )
        axis.set_xlabel("workers")
        axis.set_xticks(WORKERS)
        axis.set_ylabel(label)
    axes[0].legend(frameon=False, fontsize="small")
    save()


def main():
    """Run the study."""
    parser = study.arguments(__doc__, range(5))
    parser.add_argument("--workers", type=int, help="train only with this number")
    given = parser.parse_args()
    if given.quick:
        trainings = Trainings(RATES_WORKERS, steps=40)
        rates = {(way,): own[1] for way, own in RATES.items()}
        rows = [
            {"way": way, "seed": 0, "workers": RATES_WORKERS}
            for way in ways_of(RATES_WORKERS)
        ]
        rows = [key | trainings.accuracy(key, rates) for key in rows]
        print(accuracy_table(rows))
        return
    if given.workers:
        child(given.workers, given.seeds)
        return
    # The rates come first, then a complete result of three seeds, then more seeds.
    for number in sorted({min(3, len(given.seeds)), len(given.seeds)}):
        seeds = given.seeds[:number]
        for workers in sorted(WORKERS, key=lambda n: n != RATES_WORKERS):
            command = [sys.executable, __file__, "--workers", str(workers), "--seeds"]
            subprocess.run([*command, *map(str, seeds)], check=True)
        rows = accuracy_rows(WORKERS, seeds, _missing)
        where = f"up to 8 virtual workers of {EACH} examples, {STEPS} steps, "
        where += f"{number} seeds" if number > 1 else "1 seed"
        page = "studies/signsgd.md"
        study.write_page(page, accuracy_table(rows), where)
        study.write_page(page, pairs_table(rows), where, "pairs")
        rates = repeated.rates_table(rates_rows(_missing), ["way"])
        where = f"{RATES_WORKERS} virtual workers, 1 seed"
        study.write_page(page, rates, where, "rates")
        draw(rows)


if __name__ == "__main__":
    main()
