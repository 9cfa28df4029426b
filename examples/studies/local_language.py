"""Measure local steps on a language model: loss over bytes.

    python examples/studies/local_language.py
    python examples/studies/local_language.py --rows "32 steps, 2 bits" --seeds 0 1
    python examples/studies/local_language.py --tables
    python examples/studies/local_language.py --quick

A decoder of 1.1 million parameters learns the characters of the King James Bible
(Debian's bible-kjv and bible-kjv-text) on four virtual workers; the books from Hebrews
on are held out. The baseline exchanges bfloat16 in each step. Writes
examples/results/local_language.csv (an interrupted run resumes), tables and a figure
of docs/studies/local-language.md; `--quick` takes few steps and writes nothing.
"""

import datetime
import functools
import math
import statistics
import time
from typing import NamedTuple

import keras
import numpy as np
import outers
import study
import tensorflow as tf

import tfgradcomp

import bible  # isort: skip
import models  # isort: skip

WORKERS, EACH = 4, 2
# Both are divisible by all numbers of local steps: the end of a part, which makes an
# exchange, adds none.
STEPS, PART, AT_ONCE = 3072, 512, 16
WARMUP = 100
# For the baseline, the smaller of the best two of `RATES` (`--parts rates`).
RATE, RATES, RATE_STEPS = 2e-3, (1e-3, 2e-3, 4e-3, 8e-3), 512
PAGE = "studies/local-language.md"
COLUMNS, WORDS = ("loss", "bytes", "seconds"), ("curve", "date")
EVERY = (16, 32, 64)
EXCHANGES = ("float16", "1 bit", "2 bits", "4 bits", "top-k", "top-k, decay 1")


class Row(NamedTuple):
    """A setting.

    Attributes:
        exchange: Name of a method of `outers.py`.
        every: Number of steps between two exchanges; 1: gradients are exchanged.
        momentum: Where the outer momentum is, one of `outers.MOMENTA`.
        inner: The inner optimizer.
        steps: Number of steps.
    """

    exchange: str
    every: int
    momentum: str = "none"
    inner: str = "Adam"
    steps: int = STEPS

    @property
    def name(self) -> str:
        """The setting in words."""
        steps = "each step" if self.every == 1 else f"{self.every} steps"
        parts = [steps, self.exchange]
        if self.momentum != "none":
            parts.append(f"momentum {self.momentum}")
        if self.inner != "Adam":
            parts.append(self.inner)
        if self.steps != STEPS:
            parts.append(f"{self.steps} in all")
        return ", ".join(parts)


BASELINE = Row("bfloat16", 1)


# Four times as many steps: does the distance shrink?
LONGER = [row._replace(steps=4 * STEPS) for row in (BASELINE, Row("float16", 16))]


def with_momentum(every: int) -> list[Row]:
    """Return the rows with outer momentum, both forms of a method together."""
    return [
        Row(exchange, every, momentum)
        for exchange in EXCHANGES
        for momentum in ("in front", "behind")
        # Without residuals the momentum is nowhere in front.
        if (exchange, momentum) != ("float16", "in front")
    ]


def inner_rows() -> list[Row]:
    """Return the rows with other inner optimizers, and their own baselines."""
    return [
        Row(exchange, every, momentum, inner)
        for inner in ("AdamW", "Muon")
        for exchange, every, momentum in (
            ("bfloat16", 1, "none"),
            ("float16", 32, "none"),
            ("float16", 32, "behind"),
            ("2 bits", 32, "none"),
            ("2 bits", 32, "in front"),
        )
    ]


def grid() -> dict[str, list[Row]]:
    """Return the rows by parts, the parts that tell most first."""
    plain = {n: [Row(exchange, n) for exchange in EXCHANGES] for n in EVERY}
    return {
        "few": [BASELINE, Row("float32", 1), *plain[16], *plain[32]],
        "longer": LONGER,
        "momentum": [*with_momentum(32), *with_momentum(16)],
        "causes": [Row(name, 16) for name in outers.one_bit_changes(STEPS // 16)],
        "many": [*plain[64], *with_momentum(64)],
        "inner": inner_rows(),
    }


def schedule(rate: float, steps: int):
    """Return a learning rate that rises for some steps, then falls along a cosine."""
    rises = min(WARMUP, steps // 4)
    return keras.optimizers.schedules.CosineDecay(
        0.0, steps - rises, warmup_target=rate, warmup_steps=rises
    )


def make_inner(name: str, rate: float, steps: int):
    """Return an optimizer for the local steps."""
    rates = schedule(rate, steps)
    if name == "Muon":
        # As in its paper, Adam trains the embeddings and the last layer.
        decays = {"weight_decay": 0.1, "adam_weight_decay": 0.1}
        return keras.optimizers.Muon(rates, exclude_layers=["last"], **decays)
    if name == "AdamW":
        return keras.optimizers.AdamW(rates, weight_decay=0.1)
    return keras.optimizers.Adam(rates)


def make_optimizer(row: Row, rate: float, steps: int):
    """Return the optimizer of a row."""
    inner = make_inner(row.inner, rate, steps)
    changes = outers.one_bit_changes(steps // row.every)
    method = (outers.METHODS | changes)[row.exchange]
    if row.every == 1:
        return tfgradcomp.CompressedOptimizer(inner, method, sparse="dense")
    transport = "all_gather" if row.exchange in changes else "sharded"
    outer = outers.outer(method, row.momentum, transport=transport)
    return tfgradcomp.LocalSteps(inner, outer, every=row.every)


def loss_of(model, batch):
    """Return the mean loss of texts, in nats a character."""
    logits = model(batch[:, :-1], training=True)
    losses = keras.losses.sparse_categorical_crossentropy(
        batch[:, 1:], logits, from_logits=True
    )
    return tf.reduce_mean(losses)


def make_steps(strategy, model, optimizer, text: np.ndarray, seed: int):
    """Return a function of a step's number that takes this step and 15 more.

    A step draws its texts by its number and the seed. (`fit` would read a dataset,
    whose iterators took up to a minute to end on virtual workers.)
    """
    text = tf.constant(text)

    def step(number):
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        starts = tf.random.stateless_uniform(
            [WORKERS, EACH, 1], [seed, number], 0, len(text) - bible.LENGTH, tf.int32
        )
        batch = tf.gather(text, starts[rank] + tf.range(bible.LENGTH + 1))
        with tf.GradientTape() as tape:
            # Optimizers add up the gradients of all replicas.
            loss = loss_of(model, tf.cast(batch, tf.int32)) / WORKERS
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    @tf.function
    def steps(first):
        for number in tf.range(first, first + AT_ONCE):
            strategy.run(step, (number,))

    return steps


def train(row: Row, seed: int, rate: float = RATE) -> dict:
    """Return held-out losses, in nats a character, a worker's bytes, and seconds.

    Bytes are those that a worker sends in a step; seconds are those of all cores.
    A training that ends in NaN has the loss NaN.

    Args:
        row: The setting.
        seed: Of the weights and of the order of texts.
        rate: Learning rate of the inner optimizer.
    """
    steps = row.steps
    strategy, started = study.strategy_of(WORKERS), time.process_time()
    first, _, alphabet = bible.characters()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = models.make_decoder(len(alphabet), bible.LENGTH)
        optimizer = make_optimizer(row, rate, steps)
        optimizer.build(model.trainable_variables)
    take_steps = make_steps(strategy, model, optimizer, first, seed)
    held = tf.constant(bible.held_out())
    loss_of_part = tf.function(lambda batch: loss_of(model, batch))
    curve = []
    for begin in range(0, steps, AT_ONCE):
        take_steps(tf.constant(begin))
        if (begin + AT_ONCE) % min(PART, steps):
            continue
        try:
            if row.every > 1:
                optimizer.synchronize()
        except FloatingPointError:
            curve.append(math.nan)
            break
        losses = [loss_of_part(part).numpy() for part in tf.split(held, 4)]
        curve.append(float(np.mean(losses)))
    traffic, seconds = optimizer.traffic, time.process_time() - started
    keras.backend.clear_session()
    return {
        "loss": curve[-1],
        "bytes": traffic.bytes_sent,
        "seconds": round(seconds),
        "curve": " ".join(f"{loss:.4f}" for loss in curve),
        "date": str(datetime.date.today()),
    }


def train_key(key: dict) -> dict:
    """Return what `train` does, for a key of the table of rows."""
    values = {name: key[name] for name in Row._fields}
    return train(Row(**values), key["seed"])


def train_rate(key: dict) -> dict:
    """Return the same after a short training at a rate."""
    return train(BASELINE._replace(steps=RATE_STEPS), key["seed"], key["rate"])


class Rows:
    """The rows that were measured, by their settings and seeds.

    Args:
        rows: Rows of the file.
    """

    def __init__(self, rows: list[dict]):
        self.rows = rows
        self._found: dict[Row, dict[int, dict]] = {}
        for row in rows:
            setting = Row(*(row[name] for name in Row._fields))
            self._found.setdefault(setting, {})[row["seed"]] = row

    def loss(self, row: Row) -> float:
        """Return a row's mean loss."""
        return statistics.mean(own["loss"] for own in self._found[row].values())

    def bytes(self, row: Row) -> float:
        """Return the bytes that a worker sends in a step."""
        # A simulated exchange counts as one bit.
        row = row._replace(exchange="1 bit") if "1 bit," in row.exchange else row
        rows = self._found.get(row, {})
        return statistics.mean([own["bytes"] for own in rows.values()] or [math.nan])

    def more(self, row: Row, base: Row) -> list[float]:
        """Return by how many percent of the baseline's loss a row's is larger."""
        own, plain = self._found[row], self._found.get(base, {})
        return [
            100 * (own[seed]["loss"] / plain[seed]["loss"] - 1)
            for seed in own
            if seed in plain
        ]

    def table(self, rows: list[Row]) -> str:
        """Return the table of those of some rows that were measured."""
        titles = ["inner", "steps", "exchange", "outer momentum", "loss"]
        titles += ["more than bfloat16's, %", "by seeds", "seeds", "bytes", "fewer"]
        lines = []
        ring = self.bytes(Row("float32", 1))
        for row in rows:
            if row not in self._found:
                continue
            base = BASELINE._replace(inner=row.inner, steps=row.steps)
            more = self.more(row, base) if row != base else []
            more = [one for one in more if math.isfinite(one)]
            loss, size = self.loss(row), self.bytes(row)
            lines.append(
                [
                    row.inner,
                    str(row.every),
                    row.exchange,
                    row.momentum if row.momentum != "none" else "",
                    f"{loss:.4f}" if math.isfinite(loss) else "diverged",
                    study.interval_text(more, "+") if more else "",
                    ", ".join(f"{one:+.2f}" for one in more),
                    ", ".join(str(seed) for seed in sorted(self._found[row])),
                    f"{size:,.0f}",
                    f"{ring / size:,.0f}" if math.isfinite(ring) else "",
                ]
            )
        return study.markdown(titles, lines, right=2)

    def draw(self):
        """Draw loss over bytes: a line for a method, a point for a number of steps."""
        made = study.figure("studies/local-language", 2, sharey=True)
        if made is None or BASELINE not in self._found:
            return
        axes, save = made
        base = self.loss(BASELINE)
        for axis, forms in zip(axes, (("none",), ("in front", "behind")), strict=True):
            axis.axhline(base, color="0.5", linewidth=0.8)
            axis.set(
                xscale="log",
                xlabel="bytes that a worker sends in a step",
                ylim=(0.97 * base, 1.25 * base),
                title="no outer momentum" if forms == ("none",) else "outer momentum",
            )
            for number, exchange in enumerate(EXCHANGES):
                for form in forms:
                    rows = [Row(exchange, every, form) for every in EVERY]
                    rows = [row for row in rows if row in self._found]
                    # A loss beyond the figure stands at its upper edge.
                    axis.plot(
                        [self.bytes(row) for row in rows],
                        [min(self.loss(row), 1.245 * base) for row in rows],
                        marker="o" if form != "behind" else "x",
                        linestyle="-" if form != "behind" else ":",
                        color=f"C{number}",
                        label=exchange if form == forms[-1] else None,
                    )
        axes[0].set_ylabel("held-out loss, nats a character")
        axes[0].legend(fontsize="small", title="16, 32, 64 steps from the right")
        save()


def write(rows: list[dict], rates: list[dict]):
    """Write the page's tables and its figure from all rows that there are."""
    found, parts = Rows(rows), grid()
    dates = sorted({row["date"] for row in rows}) or ["never"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    where = (
        f"{len(rows)} trainings, measured from {dates[0]} to "
        f"{dates[-1]}, at commits {commits}; {WORKERS} virtual workers"
    )
    names = {
        "grid": [
            BASELINE,
            Row("float32", 1),
            *(
                Row(exchange, every, momentum)
                for every in EVERY
                for exchange in EXCHANGES
                for momentum in outers.MOMENTA
            ),
        ],
        "causes": [
            BASELINE,
            *(Row(name, 16) for name in ("float16", "1 bit")),
            *parts["causes"],
        ],
        "inner": parts["inner"],
        "longer": parts["longer"],
    }
    for name, own in names.items():
        text = found.table(own)
        print("", name, "", text, sep="\n", flush=True)
        study.write_page(PAGE, text, where, name)
    cells = [[f"{row['rate']:g}", f"{row['loss']:.4f}"] for row in rates]
    text = study.markdown(["rate", "loss"], cells)
    where = (
        f"Adam, bfloat16 in each step, {RATE_STEPS} steps; {WORKERS} virtual workers"
    )
    study.write_page(PAGE, text, where, "rates")
    found.draw()


def quick():
    """Take a few steps with some rows."""
    rows = []
    for row in (BASELINE, Row("float32", 1), Row("top-k", 16, "behind")):
        row = row._replace(steps=32)
        key = {**row._asdict(), "seed": 0}
        rows.append(key | train(row, 0) | {"commit": ""})
    print(Rows(rows).table([Row("top-k", 16, "behind", steps=32)]), flush=True)


def main():
    """Run the study."""
    parts = ("rates", *grid())
    parser = study.arguments(__doc__, (0,), parts)
    add = parser.add_argument
    add(
        "--rows",
        nargs="+",
        default=[],
        help="parts of rows' names; others are left out",
    )
    add("--most", type=int, help="the most rows to train")
    given = parser.parse_args()
    if given.quick:
        quick()
        return
    study.one_thread_each()
    measure = None if given.tables else train_rate
    keys = [{"rate": rate, "seed": 9} for rate in RATES]
    complete = functools.partial(
        study.complete, columns=COLUMNS, words=WORDS, most=given.most
    )
    rates = complete(
        "local_language_rates", keys, measure if "rates" in given.parts else None
    )
    wanted = [
        {**row._asdict(), "seed": seed}
        for seed in given.seeds
        for part in given.parts
        for row in grid().get(part, ())
        if not given.rows or any(name in row.name for name in given.rows)
    ]
    if wanted:
        complete("local_language", wanted, None if given.tables else train_key)
    every_key = [
        {**row._asdict(), "seed": seed}
        for seed in range(10)
        for rows in grid().values()
        for row in rows
    ]
    write(complete("local_language", every_key, None), rates)


if __name__ == "__main__":
    main()
