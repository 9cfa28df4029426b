"""Compare error feedback by blocks with float32 and with signs, as batches shrink.

    python examples/studies/dist_ef.py
    python examples/studies/dist_ef.py --quick

A small LeNet learns Fashion-MNIST on four virtual workers with 8, 16 and 32 examples
each, all with the same total of examples: SGD with Nesterov momentum in
float32, DistEFBlockSGDM with the same learning rate, and Signum with its best rate.
Rates are chosen on held-out examples. Writes
examples/results/dist_ef.csv, dist_ef_rates.csv and dist_ef_blocks.csv, and the tables
and the figure of docs/studies/dist_ef.md; `--quick` takes few steps of one seed and
writes nothing.
"""

import statistics

import keras
import numpy as np
import study

import tfgradcomp

import repeated  # isort: skip

WORKERS, MOMENTUM = 4, 0.9
BATCHES = (8, 16, 32)
# Of all workers together, in a training: 2,560, 1,280 and 640 steps.
EXAMPLES, AT_ONCE = 81_920, 20
FLOAT, FEEDBACK = "float32, Nesterov", "DistEFBlockSGDM"
WAYS = {
    FLOAT: lambda: keras.optimizers.SGD(0.1, momentum=MOMENTUM, nesterov=True),
    FEEDBACK: lambda: tfgradcomp.DistEFBlockSGDM(
        keras.optimizers.SGD(0.1), MOMENTUM, min_size=0
    ),
    "Signum": lambda: tfgradcomp.Signum(
        keras.optimizers.SGD(0.1), MOMENTUM, min_size=0
    ),
}
# As in the paper, error feedback uses float32's rates.
RATES = {
    FLOAT: (0.01, 0.02, 0.05, 0.1),
    "Signum": (3e-4, 1e-3, 3e-3, 1e-2),
}
RATES_SEED = 100
LOSSES = [f"loss_{part}" for part in range(1, repeated.PARTS + 1)]
# Vectors of the blocks' table, examples a worker, and batches a point.
VECTORS, BLOCKS_BATCH, SAMPLES = ("g", "p"), 16, 10
BLOCKS = ("variation", "whole", "bound", "blocks")
BLOCKS_TITLES = ("deviation over mean", "δ, one scale", "δ, bound by blocks")
BLOCKS_TITLES += ("δ, by blocks",)


class Study:
    """The trainings; each runs once.

    Args:
        strategy: The virtual workers.
        examples: Of all workers together, in a training.
    """

    def __init__(self, strategy, examples):
        self._strategy, self._examples = strategy, examples
        self._trainers, self._blocks = {}, {}
        self._train, self._held_out, self._test = repeated.load(EXAMPLES)
        self._gradients = repeated.Gradients(self._train)
        self.chosen = {}

    def _trainer(self, way):
        if way not in self._trainers:
            # In float32 four workers take the step of one with all examples.
            scope = None if way == FLOAT else self._strategy.scope()
            self._trainers[way] = repeated.Trainer(scope, WAYS[way], AT_ONCE)
        return self._trainers[way]

    def _run(self, way, batch, seed, rate, between=None):
        trainer, together = self._trainer(way), batch * WORKERS
        losses = trainer.train(
            self._train,
            seed,
            together,
            self._examples // together,
            repeated.dropped(rate),
            between,
        )
        return trainer, losses

    def rate(self, key):
        """Return the accuracy of a learning rate on held-out examples."""
        way, batch, rate = key["way"], key["batch"], key["rate"]
        trainer, _ = self._run(way, batch, RATES_SEED, rate)
        return {"accuracy": trainer.accuracy(self._held_out)}

    def choose(self, rows):
        """Take the best rate of each way and batch."""
        self.chosen = repeated.best_rates(rows, ["way", "batch"])
        for batch in BATCHES:
            self.chosen[FEEDBACK, batch] = self.chosen[FLOAT, batch]

    def accuracy(self, key):
        """Return the row of a training."""
        way, batch, seed = key["way"], key["batch"], key["seed"]
        rate = self.chosen[way, batch]
        trainer, losses = self._run(way, batch, seed, rate)
        row = {"rate": rate, "accuracy": trainer.accuracy(self._test)}
        return row | dict(zip(LOSSES, losses, strict=True))

    def _blocks_of(self, seed):
        if seed in self._blocks:
            return self._blocks[seed]
        trainer = self._trainer(FEEDBACK)
        found = self._blocks[seed] = []

        def between(part):
            found.append(self._blocks_at(trainer.model, [seed, part]))

        rate = self.chosen[FEEDBACK, BLOCKS_BATCH]
        self._run(FEEDBACK, BLOCKS_BATCH, seed, rate, between)
        return found

    def _blocks_at(self, model, seed):
        """Return the figures of a worker's compressed vectors, at some step."""
        (bucket,) = model.optimizer.stepper.buckets
        momentum, residual = (
            _tensors(bucket, state)
            for state in (
                bucket.state.worker["momentum"],
                bucket.state.worker["inner"]["residual"],
            )
        )
        rng, sums = np.random.default_rng(seed), {}
        self._gradients.set_weights(model.get_weights())
        for _ in range(SAMPLES):
            g = self._gradients.of(rng.integers(len(self._train[1]), size=BLOCKS_BATCH))
            p = [
                MOMENTUM * (MOMENTUM * m + own) + own + e
                for m, own, e in zip(momentum, map(np.ravel, g), residual, strict=True)
            ]
            for name, vector in zip(VECTORS, (g, p), strict=True):
                sums.setdefault(name, []).append(block_figures(vector))
        return {
            name: dict(zip(BLOCKS, np.mean(values, axis=0).tolist(), strict=True))
            for name, values in sums.items()
        }

    def blocks(self, key):
        """Return the row of the blocks' table."""
        return self._blocks_of(key["seed"])[key["part"]][key["vector"]]


def _tensors(bucket, state):
    """Return worker 0's state of each variable, in the model's order."""
    pieces = bucket.split(state.local_values()[0])
    return [
        value.numpy() for _, value in sorted(pieces.items(), key=lambda one: one[0])
    ]


def block_figures(blocks):
    """Return the figures of Figure 1 of the paper, and another figure.

    Args:
        blocks: The compressed vector v, an array a block.

    Returns:
        The deviation of the magnitudes over their mean, as a mean over blocks. Then the
        largest delta with |C(v) - v|² <= (1 - delta)·|v|²: of one scale for all, the
        bound of Proposition 1 for one scale a block, and the delta of that compressor.
    """
    magnitudes = [np.abs(np.ravel(block)).astype(np.float64) for block in blocks]
    variations = [m.std() / m.mean() for m in magnitudes if m.size > 1 and m.any()]
    whole = np.concatenate(magnitudes)
    squares = (whole**2).sum()
    kept = [m.sum() ** 2 / m.size for m in magnitudes]
    densities = [
        own / (m**2).sum() for own, m in zip(kept, magnitudes, strict=True) if m.any()
    ]
    return (
        np.mean(variations),
        whole.sum() ** 2 / whole.size / squares,
        min(densities),
        sum(kept) / squares,
    )


def accuracy_table(rows):
    """Return the accuracies, and their differences from float32, with intervals."""
    titles = ["examples a worker", "way", "rate", "accuracy", "less float32, same seed"]
    titles.append("training loss, last eighth")
    lines = []
    for batch, way in dict.fromkeys((row["batch"], row["way"]) for row in rows):
        own = {r["seed"]: r for r in rows if (r["batch"], r["way"]) == (batch, way)}
        base = {r["seed"]: r for r in rows if (r["batch"], r["way"]) == (batch, FLOAT)}
        accuracy = study.interval_text([100 * r["accuracy"] for r in own.values()])
        less = [100 * (own[s]["accuracy"] - base[s]["accuracy"]) for s in own]
        loss = statistics.mean(row[LOSSES[-1]] for row in own.values())
        rate = next(iter(own.values()))["rate"]
        difference = "" if way == FLOAT else study.interval_text(less, "+")
        cells = [str(batch), way, f"{rate:g}", f"{accuracy} %", difference]
        lines.append([*cells, f"{loss:.3f}"])
    return study.markdown(titles, lines)


def blocks_table(rows):
    """Return the figures of blocks over a training, means over the seeds."""
    lines, titles = [], ["of the training", "vector", *BLOCKS_TITLES]
    for part in range(0, repeated.PARTS + 1, 2):
        for vector in VECTORS:
            own = [r for r in rows if (r["part"], r["vector"]) == (part, vector)]
            means = [statistics.mean(row[name] for row in own) for name in BLOCKS]
            cells = [f"{mean:.3f}" for mean in means]
            lines.append([f"{part}/{repeated.PARTS}", vector, *cells])
    return study.markdown(titles, lines)


def draw(rows, blocks):
    """Draw the accuracies by batches, the losses, and the figures of blocks."""
    made = study.figure("studies/dist_ef", 3)
    if made is None:
        return
    (left, middle, right), save = made
    for way in WAYS:
        found = [
            study.interval(
                [
                    100 * row["accuracy"]
                    for row in rows
                    if (row["batch"], row["way"]) == (batch, way)
                ]
            )
            for batch in BATCHES
        ]
        means, widths = zip(*found, strict=True)
        left.errorbar(BATCHES, means, widths, marker="o", capsize=3, label=way)
        own = [r for r in rows if (r["batch"], r["way"]) == (BATCHES[0], way)]
        losses = [statistics.mean(row[name] for row in own) for name in LOSSES]
        middle.plot(range(1, repeated.PARTS + 1), losses, marker=".", label=way)
    left.set_xscale("log", base=2)
    left.set_xticks(BATCHES, BATCHES)
    left.set_xlabel("examples a worker")
    left.set_ylabel("test accuracy, %")
    left.legend(frameon=False)
    middle.set_xlabel(f"eighths of the training, {BATCHES[0]} examples a worker")
    middle.set_ylabel("training loss")
    parts = range(repeated.PARTS + 1)
    for name, label in zip(BLOCKS, BLOCKS_TITLES, strict=True):
        for vector, style in zip(VECTORS, ("--", "-"), strict=True):
            means = [
                statistics.mean(
                    row[name]
                    for row in blocks
                    if (row["part"], row["vector"]) == (part, vector)
                )
                for part in parts
            ]
            color = f"C{BLOCKS.index(name)}"
            own = f"{label}, p" if vector == "p" else None
            right.plot(parts, means, style, color=color, label=own)
    right.set_yscale("log")
    right.set_xlabel("eighths of the training; dashed: gradient g")
    right.legend(frameon=False, fontsize="small")
    save()


def main():
    """Run the study."""
    given = study.arguments(__doc__, range(5)).parse_args()
    strategy = tfgradcomp.virtual_workers(WORKERS)
    if given.quick:
        quick(Study(strategy, EXAMPLES // 32))
        return
    all_of = Study(strategy, EXAMPLES)
    rates = study.complete(
        "dist_ef_rates",
        [
            {"way": way, "batch": batch, "rate": rate}
            for batch in BATCHES
            for way, own in RATES.items()
            for rate in own
        ],
        all_of.rate,
        ["accuracy"],
    )
    all_of.choose(rates)
    blocks = []
    for number in range(1, len(given.seeds) + 1):
        seeds = given.seeds[:number]
        rows = study.complete(
            "dist_ef",
            [
                {"batch": batch, "way": way, "seed": seed}
                for seed in seeds
                for batch in BATCHES
                for way in WAYS
            ],
            all_of.accuracy,
            ["rate", "accuracy", *LOSSES],
        )
        if number <= 3:
            blocks = study.complete(
                "dist_ef_blocks",
                [
                    {"seed": seed, "part": part, "vector": vector}
                    for seed in seeds
                    for part in range(repeated.PARTS + 1)
                    for vector in VECTORS
                ],
                all_of.blocks,
                BLOCKS,
            )
        workers, page = f"{WORKERS} virtual workers", "studies/dist_ef.md"
        seeds_text = f"{number} seed{'s' * (number > 1)}"
        where = f"{workers}, {EXAMPLES:,} examples, {seeds_text}"
        study.write_page(page, accuracy_table(rows), where)
        text = repeated.rates_table(rates, ["way", "batch"])
        study.write_page(page, text, f"{workers}, {EXAMPLES:,} examples", "rates")
        where = f"{workers}, {BLOCKS_BATCH} examples each"
        study.write_page(page, blocks_table(blocks), where, "blocks")
        draw(rows, blocks)


def quick(all_of):
    """Run a part of the study that takes a minute, and write nothing."""
    all_of.choose(
        [
            {"way": way, "batch": batch, "rate": own[1], "accuracy": 0.0}
            for way, own in RATES.items()
            for batch in BATCHES
        ]
    )
    keys = [{"way": way, "batch": BLOCKS_BATCH, "seed": 0} for way in WAYS]
    print(accuracy_table([key | all_of.accuracy(key) for key in keys]))
    for vector in VECTORS:
        key = {"seed": 0, "part": repeated.PARTS, "vector": vector}
        print(vector, all_of.blocks(key))


if __name__ == "__main__":
    main()
