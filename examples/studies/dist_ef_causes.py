"""Compare error feedback with float32, with one thing changed at a time.

    python examples/studies/dist_ef_causes.py
    python examples/studies/dist_ef_causes.py --quick

The trainings of `dist_ef.py` with 16 examples a worker, whose rates it takes from
examples/results/dist_ef_rates.csv. Writes examples/results/dist_ef_causes.csv and a
table of docs/studies/dist_ef.md; `--quick` takes few steps of one seed and writes
nothing.
"""

import functools
import statistics
from collections.abc import Callable
from typing import NamedTuple

import dist_ef
import keras
import repeated
import study

import tfgradcomp

BATCH = dist_ef.BLOCKS_BATCH
BLOCK_SIZE = 256
FLOAT, FEEDBACK = dist_ef.FLOAT, dist_ef.FEEDBACK


class Case(NamedTuple):
    """A change of the setting.

    Attributes:
        factor: Factor of float32's rate in `dist_ef.py`.
        rate_of: Function of a rate that returns the rates of the training's parts.
        block_size: Of error feedback; None: a block a tensor.
        normalized: Whether the network has batch normalization.
    """

    factor: float = 1.0
    rate_of: Callable = repeated.dropped
    block_size: int | None = None
    normalized: bool = False


def kept(rate):
    """Return a constant learning rate, by parts."""
    return lambda part: rate


CASES = {
    "nothing": Case(),
    "half the rate": Case(factor=0.5),
    "a fifth of the rate": Case(factor=0.2),
    "the rate is kept": Case(rate_of=kept),
    "a fifth of the rate, kept": Case(factor=0.2, rate_of=kept),
    f"blocks of {BLOCK_SIZE}": Case(block_size=BLOCK_SIZE),
    "batch normalization": Case(normalized=True),
}


class Causes:
    """The trainings.

    Args:
        strategy: The virtual workers.
        rate: Float32's rate in `dist_ef.py`.
        examples: Of all workers together, in a training.
    """

    def __init__(self, strategy, rate, examples):
        self._strategy, self._rate, self._examples = strategy, rate, examples
        self._train, _, self._test = repeated.load(dist_ef.EXAMPLES)

    @functools.cache  # noqa: B019  (as long as the program runs)
    def _trainer(self, way, block_size, normalized):
        def feedback():
            sgd = keras.optimizers.SGD(0.1)
            more = {"block_size": block_size, "min_size": 0}
            return tfgradcomp.DistEFBlockSGDM(sgd, dist_ef.MOMENTUM, **more)

        # Batches are normalized worker by worker, with float32 as well. There Keras
        # cannot take several steps at once.
        alone = way == FLOAT and not normalized
        return repeated.Trainer(
            None if alone else self._strategy.scope(),
            dist_ef.WAYS[FLOAT] if way == FLOAT else feedback,
            1 if way == FLOAT and normalized else dist_ef.AT_ONCE,
            functools.partial(repeated.make_network, normalized),
        )

    def accuracy(self, key):
        """Return accuracy and losses of a training."""
        case = CASES[key["changed"]]
        block_size = case.block_size if key["way"] == FEEDBACK else None
        trainer = self._trainer(key["way"], block_size, case.normalized)
        together = BATCH * dist_ef.WORKERS
        losses = trainer.train(
            self._train,
            key["seed"],
            together,
            self._examples // together,
            case.rate_of(case.factor * self._rate),
        )
        row = {"accuracy": trainer.accuracy(self._test)}
        return row | dict(zip(dist_ef.LOSSES, losses, strict=True))


def table(rows):
    """Return accuracies and their differences from float32, with intervals."""
    titles = ["changed", FLOAT, FEEDBACK, "less float32, same seed"]
    titles.append("training loss less float32's, first, fourth and last eighth")
    lines, losses = [], [dist_ef.LOSSES[part] for part in (0, 3, -1)]
    for changed in dict.fromkeys(row["changed"] for row in rows):
        plain, own = (
            [r for r in rows if (r["changed"], r["way"]) == (changed, way)]
            for way in (FLOAT, FEEDBACK)
        )
        cells = [
            study.interval_text([100 * row["accuracy"] for row in of_way]) + " %"
            for of_way in (plain, own)
        ]
        pairs = [*zip(own, plain, strict=True)]
        less = [100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs]
        of_losses = [statistics.mean(a[n] - b[n] for a, b in pairs) for n in losses]
        cells += [study.interval_text(less, "+")]
        lines.append([changed, *cells, ", ".join(f"{x:+.3f}" for x in of_losses)])
    return study.markdown(titles, lines)


def keys(seeds):
    """Return the keys of all rows."""
    return [
        {"changed": changed, "way": way, "seed": seed}
        for seed in seeds
        for changed in CASES
        for way in (FLOAT, FEEDBACK)
    ]


def main():
    """Run the study."""
    given = study.arguments(__doc__, range(5)).parse_args()
    strategy = tfgradcomp.virtual_workers(dist_ef.WORKERS)
    tfgradcomp.enable_multi_worker_fit()
    if given.quick:
        causes = Causes(strategy, 0.05, dist_ef.EXAMPLES // 32)
        print(table([key | causes.accuracy(key) for key in keys([0])]))
        return
    rates = [
        {"way": FLOAT, "batch": BATCH, "rate": rate} for rate in dist_ef.RATES[FLOAT]
    ]
    rates = study.complete("dist_ef_rates", rates, None, ["accuracy"])
    (rate,) = repeated.best_rates(rates, ["way"]).values()
    causes = Causes(strategy, rate, dist_ef.EXAMPLES)
    for number in range(1, len(given.seeds) + 1):
        rows = study.complete(
            "dist_ef_causes",
            keys(given.seeds[:number]),
            causes.accuracy,
            ["accuracy", *dist_ef.LOSSES],
        )
        where = f"{dist_ef.WORKERS} virtual workers, {BATCH} examples each, "
        where += f"{dist_ef.EXAMPLES:,} in all, {number} seed{'s' * (number > 1)}"
        study.write_page("studies/dist_ef.md", table(rows), where, "causes")


if __name__ == "__main__":
    main()
