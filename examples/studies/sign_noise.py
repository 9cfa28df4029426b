"""Measure densities and noise of gradients, and wrong votes of their signs.

    python examples/studies/sign_noise.py
    python examples/studies/sign_noise.py --quick

Repeats the measurements of the signSGD paper's figures 1 and 2 on a small LeNet that
learns Fashion-MNIST by SGD, Signum and Adam, on one worker with 128 examples a step. At
fixed weights, passes over 4,096 images give the exact gradient g, the deviation of each
of its elements in small batches, and then the noise of single weights. Writes
examples/results/sign_density.csv, sign_noise.csv and sign_histograms.csv, and tables
and a figure of docs/studies/signsgd.md; `--quick` takes few steps and draws and writes
nothing.
"""

import statistics

import numpy as np
import signsgd
import study

import repeated  # isort: skip

# dist_ef.py chose SGD's and Signum's rates for as many examples.
RATES = {"Signum": 3e-3, "SGD": 0.05, "Adam": 3e-3}
WAYS = tuple(RATES)
EXAMPLES, BATCH, STEPS, AT_ONCE = 10_240, 128, 160, 20
POOL, PASS_BATCH = 4_096, 32
BATCHES, DRAWS = (8, 32, 128), 200
VOTERS = (1, 3, 4, 7, 8)
COINS = ("shared", "own", "abstain")
NOISE_SHARES = ("silent", "zeros", "skewed", "worse", "above_gauss")
VOTES = (
    *(f"{coin}_{voters}" for coin in COINS for voters in VOTERS),
    *("tie_4", "tie_8"),
)
NOISE = ("skewness", *NOISE_SHARES, *VOTES)
BINS = np.linspace(-4, 4, 33)
COLUMNS = [f"bin_{number}" for number in range(len(BINS) - 1)]
SHOWN_BATCH, SHOWN_SEED = 128, 0


def density(vector):
    """Return the paper's density of a vector: 1 if all magnitudes are equal."""
    return float(np.abs(vector).sum() ** 2 / (vector.size * (vector**2).sum()))


class Observer:
    """Figures of gradients at fixed weights, over the first images.

    Args:
        pool: Number of images, which represent all images.
        draws: Number of small batches for measuring noise.
    """

    def __init__(self, pool=POOL, draws=DRAWS):
        self.pool, self._draws = pool, draws
        examples, _, _ = repeated.load(EXAMPLES)
        self.examples = examples
        self._gradients = repeated.Gradients(examples)

    def _of(self, indices):
        parts = self._gradients.of(indices)
        return np.concatenate([np.ravel(part) for part in parts])

    def moments(self, weights):
        """Return the exact gradient, and its deviations with `PASS_BATCH` examples.

        By Welford's algorithm, in one pass.
        """
        self._gradients.set_weights(weights)
        mean, squares = 0.0, 0.0
        order = np.random.default_rng(0).permutation(self.pool)
        for number, own in enumerate(order.reshape(-1, PASS_BATCH), 1):
            gradient = self._of(own).astype(np.float64)
            change = gradient - mean
            mean = mean + change / number
            squares = squares + change * (gradient - mean)
        return mean, np.sqrt(squares / (self.pool // PASS_BATCH - 1))

    def draws(self, weights, batch):
        """Return gradients of small batches, float32 `[draws, elements]`."""
        self._gradients.set_weights(weights)
        chosen = np.random.default_rng(1).integers(self.pool, size=[self._draws, batch])
        return np.stack([self._of(own) for own in chosen])


def noise_figures(drawn, exact):
    """Return the figures of the noise, over all elements that are not silent.

    `silent` is the share of elements that are 0 in every draw, `zeros` the share of
    zeros in the other elements. `worse` is the share of other elements whose sign is
    wrong in more than half of the draws. `above_gauss` is the share that is wrong more
    often than the paper's Lemma D.1 allows for unimodal, symmetric noise. Both count
    elements beyond three deviations of the estimate. Then follow shares of wrong votes,
    for workers that draw a shared coin for their zeros, draw separate coins, or
    abstain.
    """
    speaks = drawn.any(axis=0)
    signs, drawn, exact = np.sign(drawn[:, speaks]), drawn[:, speaks], exact[speaks]
    truth = np.sign(exact)
    deviation = drawn.std(axis=0)
    unit = (drawn - drawn.mean(axis=0)) / deviation
    skewness = np.abs((unit**3).mean(axis=0))
    wrong = ((signs == -truth) + (signs == 0) / 2).mean(axis=0)
    ratio = np.abs(exact) / deviation
    # One-sided Gauss' inequality.
    bound = np.where(
        ratio > 2 / 3**0.5, 2 / 9 / np.maximum(ratio, 1) ** 2, 0.5 - ratio / 12**0.5
    )
    margin = 3 * np.sqrt(np.maximum(bound * (1 - bound), 1e-9) / len(drawn))
    figures = {
        "silent": 1 - speaks.mean(),
        "zeros": (signs == 0).mean(),
        "skewness": np.median(skewness),
        "skewed": (skewness > 1).mean(),
        "worse": (wrong > 0.5 + 1.5 / len(drawn) ** 0.5).mean(),
        "above_gauss": (wrong > bound + margin).mean(),
    }
    rng = np.random.default_rng(2)
    for voters in VOTERS:
        groups = signs[: len(signs) // voters * voters].astype(np.int8)
        groups = groups.reshape(-1, voters, groups.shape[1])
        for coin in COINS:
            net = _votes(groups, coin, rng)
            is_wrong = (np.sign(net) == -truth) + (net == 0) / 2
            figures[f"{coin}_{voters}"] = is_wrong.mean()
            if coin == "shared" and voters % 2 == 0:
                figures[f"tie_{voters}"] = (net == 0).mean()
    return {name: float(value) for name, value in figures.items()}


def _votes(groups, coin, rng):
    """Return the net votes of groups of workers, `[groups, elements]`."""
    if coin == "abstain":
        return groups.sum(axis=1)
    shape = list(groups.shape)
    if coin == "shared":
        shape[1] = 1
    coins = rng.integers(2, size=shape, dtype=np.int8) * np.int8(2) - np.int8(1)
    return np.where(groups == 0, coins, groups).sum(axis=1)


def histogram(values):
    """Return a histogram of a weight's noise in deviations, and its figures."""
    unit = (values - values.mean()) / values.std()
    counts, _ = np.histogram(np.clip(unit, BINS[0], BINS[-1]), BINS)
    shares = (counts / len(values)).tolist()
    figures = {
        "skewness": float((unit**3).mean()),
        "zeros": float((values == 0).mean()),
    }
    return figures | dict(zip(COLUMNS, shares, strict=True))


class Trainings:
    """Trainings by one worker, with measurements in between; each runs once."""

    def __init__(self, observer, steps=STEPS):
        self._observer, self._steps = observer, steps
        self._trainers, self._found = {}, {}

    def found(self, way, seed):
        """Return the densities by parts, the noise by batches, and the histograms."""
        if (way, seed) not in self._found:
            self._found[way, seed] = self._measure(way, seed)
        return self._found[way, seed]

    def _measure(self, way, seed):
        if way not in self._trainers:
            make = signsgd.MAKERS[way]
            self._trainers[way] = repeated.Trainer(None, make, AT_ONCE)
        trainer, densities, last = self._trainers[way], [], {}

        def between(part):
            weights = trainer.model.get_weights()
            mean, deviation = self._observer.moments(weights)
            last.update(mean=mean, weights=weights)
            densities.append({"gradient": density(mean), "noise": density(deviation)})

        rate = repeated.dropped(RATES[way])
        examples = self._observer.examples
        trainer.train(examples, seed, BATCH, self._steps, rate, between)
        noise, histograms = {}, []
        for batch in BATCHES:
            drawn = self._observer.draws(last["weights"], batch)
            noise[batch] = noise_figures(drawn, last["mean"])
            if batch == SHOWN_BATCH and seed == SHOWN_SEED:
                histograms = _histograms(drawn, trainer.model)
        return densities, noise, histograms


def _histograms(drawn, model):
    """Return a histogram of a random weight of each kernel."""
    rng, begin, found = np.random.default_rng(3), 0, []
    for variable in model.trainable_variables:
        size = int(np.prod(variable.shape))
        if len(variable.shape) > 1:
            # A weight that is silent has no noise.
            own = next(
                values
                for place in rng.permutation(size)
                if (values := drawn[:, begin + place].astype(np.float64)).any()
            )
            found.append(histogram(own))
        begin += size
    return found


def density_table(rows):
    """Return the densities over the trainings, and their ratio."""
    titles = ["way", "of the training", "gradient", "noise", "R₂, noise over gradient"]
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        for part in (0, 1, 2, 4, 6, 8):
            own = [r for r in rows if (r["way"], r["part"]) == (way, part)]
            g, n = (statistics.mean(r[c] for r in own) for c in ("gradient", "noise"))
            share = f"{part}/{repeated.PARTS}"
            lines.append([way, share, f"{g:.3f}", f"{n:.3f}", f"{n / g:.2f}"])
    return study.markdown(titles, lines)


def by_batch(rows):
    """Return rows by way and batch, those of all seeds together."""
    groups = {}
    for row in rows:
        groups.setdefault((row["way"], row["batch"]), []).append(row)
    return groups


def mean_rows(rows):
    """Return the means of rows over the seeds."""
    return [
        {"way": way, "batch": batch}
        | {name: statistics.mean(row[name] for row in own) for name in NOISE}
        for (way, batch), own in by_batch(rows).items()
    ]


def widest_text(rows, names):
    """Return the largest width of the shares' 95 % intervals over the seeds."""
    widths = [
        study.interval([100 * row[name] for row in own])[1]
        for own in by_batch(rows).values()
        for name in names
    ]
    return f"95 % intervals of at most ± {max(widths):.1f} points"


def noise_table(rows):
    """Return the figures of the noise, by ways and batches."""
    titles = ["way", "batch", "silent", "zeros of the others", "median skewness"]
    titles += ["beyond 1", "wrong in over half", "beyond Gauss' bound"]
    lines = []
    for row in rows:
        shares = [f"{100 * row[name]:.2f} %" for name in ("silent", "zeros")]
        shares.append(f"{row['skewness']:.2f}")
        names = ("skewed", "worse", "above_gauss")
        shares += [f"{100 * row[name]:.2f} %" for name in names]
        lines.append([row["way"], str(row["batch"]), *shares])
    return study.markdown(titles, lines)


def votes_table(rows):
    """Return how often votes are wrong, by the number of voters."""
    titles = ["way", "batch", "a zero", *(f"N = {voters}" for voters in VOTERS)]
    titles.append("ties, N = 4, 8")
    lines, names = (
        [],
        {
            "shared": "draws a shared coin",
            "own": "draws its own",
            "abstain": "abstains",
        },
    )
    for row in rows:
        for coin in COINS:
            wrong = [f"{100 * row[f'{coin}_{n}']:.1f} %" for n in VOTERS]
            ties = ", ".join(f"{100 * row[f'tie_{n}']:.1f} %" for n in (4, 8))
            cells = [row["way"], str(row["batch"]), names[coin], *wrong]
            cells.append(ties if coin == "shared" else "")
            lines.append(cells)
    return study.markdown(titles, lines)


def draw(densities, noise, histograms):
    """Draw the densities, the wrong votes and the histograms."""
    made = study.figure("studies/sign_noise", 3)
    if made is None:
        return
    (left, middle, right), save = made
    parts = range(repeated.PARTS + 1)
    for number, way in enumerate(dict.fromkeys(row["way"] for row in densities)):
        for column, style in (("gradient", "-"), ("noise", "--")):
            means = [
                statistics.mean(
                    r[column] for r in densities if (r["way"], r["part"]) == (way, part)
                )
                for part in parts
            ]
            left.plot(parts, means, style, color=f"C{number}", label=f"{way}, {column}")
    left.set_xlabel("eighths of the training")
    left.set_ylabel("density φ")
    left.set_ylim(0, 0.46)
    left.legend(frameon=False, fontsize="small")
    styles = dict(zip(COINS, ("-", "--", ":"), strict=True))
    for number, batch in enumerate(BATCHES):
        row = next(r for r in noise if (r["way"], r["batch"]) == ("Signum", batch))
        for coin, style in styles.items():
            wrong = [100 * row[f"{coin}_{voters}"] for voters in VOTERS]
            label = f"{batch} examples" if style == "-" else None
            color = f"C{number}"
            middle.plot(VOTERS, wrong, style, color=color, marker=".", label=label)
    for coin, style in styles.items():
        middle.plot([], [], style, color="0.4", label=f"zeros: {coin}")
    middle.set_ylim(36, 50)
    middle.set_xlabel("voters; weights of Signum")
    middle.set_ylabel("wrong votes, %")
    middle.set_xticks(VOTERS)
    middle.legend(frameon=False, fontsize="small", loc="lower left", ncols=2)
    centres = (BINS[1:] + BINS[:-1]) / 2
    for row in histograms:
        values = [100 * row[column] for column in COLUMNS]
        color = f"C{WAYS.index(row['way'])}"
        label = row["way"] if row["kernel"] == 0 else None
        right.step(centres, values, where="mid", color=color, label=label, lw=0.9)
    right.set_xlabel(f"noise in deviations, {SHOWN_BATCH} examples")
    right.set_ylabel("share of the draws, %")
    right.legend(frameon=False)
    save()


def main():
    """Run the measurements."""
    given = study.arguments(__doc__, range(5)).parse_args()
    if given.quick:
        trainings = Trainings(Observer(1_024, 48), 40)
        densities, noise, _ = trainings.found("Signum", 0)
        rows = [{"way": "Signum", "part": p} | d for p, d in enumerate(densities)]
        print(density_table(rows), noise, sep="\n")
        return
    trainings = Trainings(Observer())
    # Complete results of few ways come first, then of all ways, then of more seeds.
    whole = [(number, 1) for number in range(1, len(WAYS) + 1)]
    whole += [(len(WAYS), number) for number in range(2, len(given.seeds) + 1)]
    for ways, seeds in whole:
        write(trainings, WAYS[:ways], given.seeds[:seeds])


def write(trainings, ways, seeds):
    """Measure some ways and seeds, and write tables and figure."""
    noise = study.complete(
        "sign_noise",
        [
            {"way": way, "batch": batch, "seed": seed}
            for seed in seeds
            for way in ways
            for batch in BATCHES
        ],
        lambda key: trainings.found(key["way"], key["seed"])[1][key["batch"]],
        NOISE,
    )
    histograms = study.complete(
        "sign_histograms",
        [{"way": way, "kernel": kernel} for way in ways for kernel in range(4)],
        lambda key: trainings.found(key["way"], SHOWN_SEED)[2][key["kernel"]],
        ["skewness", "zeros", *COLUMNS],
    )
    densities = study.complete(
        "sign_density",
        [
            {"way": way, "seed": seed, "part": part}
            for seed in seeds
            for way in ways
            for part in range(repeated.PARTS + 1)
        ],
        lambda key: trainings.found(key["way"], key["seed"])[0][key["part"]],
        ["gradient", "noise"],
    )
    page, worker = "studies/signsgd.md", f"1 worker of {BATCH} examples, {STEPS} steps"
    number = f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
    study.write_page(page, density_table(densities), f"{worker}, {number}", "density")
    means = mean_rows(noise)
    for name, table, columns in (
        ("noise", noise_table, NOISE_SHARES),
        ("votes", votes_table, VOTES),
    ):
        where = f"{worker}, {DRAWS} draws, {number}"
        if len(seeds) > 1:
            where += f": means, {widest_text(noise, columns)}"
        study.write_page(page, table(means), where, name)
    draw(densities, means, histograms)


if __name__ == "__main__":
    main()
