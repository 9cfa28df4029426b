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
import time

import keras
import numpy as np
import outers
import study
import tensorflow as tf
from language_rows import (
    BASELINE,
    EVERY,
    EXCHANGES,
    OFTEN,
    PART,
    WEIGHTS,
    ZERO_ONE,
    Row,
    Rows,
    grid,
)

import tfgradcomp

import bible  # isort: skip
import models  # isort: skip

WORKERS, EACH, AT_ONCE = 4, 2, 16
WARMUP = 100
# Of all steps: the warm-up of 0/1 Adam, and the steps until a round doubles.
PART_OF_ROUNDS = 20
# Of the baseline (`--parts rates`).
RATES, RATE_STEPS = (1e-3, 2e-3, 4e-3, 8e-3), 512
PAGE = "studies/local-language.md"
COLUMNS, WORDS = ("loss", "bytes", "seconds"), ("curve", "date")


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


def make_optimizer(row: Row):
    """Return the optimizer of a row."""
    inner = make_inner(row.inner, row.rate, row.steps)
    if row.exchange == ZERO_ONE:
        part = row.steps // PART_OF_ROUNDS
        return tfgradcomp.ZeroOneAdam(
            inner,
            part,
            refresh=None,
            local_steps=row.every,
            double_every=part,
            transport="sharded",
        )
    changes = outers.one_bit_changes(row.steps // row.every)
    weights = {WEIGHTS: outers.METHODS["float16"]}
    method = (outers.METHODS | weights | changes)[row.exchange]
    if row.every == 1 and row.exchange != WEIGHTS:
        return tfgradcomp.CompressedOptimizer(inner, method, sparse="dense")
    transport = "all_gather" if row.exchange in changes else "sharded"
    outer = outers.outer(method, row.momentum, transport=transport)
    return tfgradcomp.LocalSteps(inner, outer, every=row.every)


def bytes_of(row: Row, optimizer, elements: int) -> float:
    """Return the bytes that a worker sends in a step, as a mean of the training."""
    sent = optimizer.traffic.bytes_sent
    if row.exchange != ZERO_ONE:
        return sent
    steps = tf.range(optimizer.warmup_steps, row.steps, dtype=tf.int64)
    ends = tf.math.count_nonzero(optimizer.uncompressed_steps.end_round(steps))
    floats = optimizer.warmup_steps * study.ring_bytes(WORKERS, elements)
    return (floats + float(ends) * row.every * sent) / row.steps


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


def train(row: Row, seed: int) -> dict:
    """Return held-out losses, in nats a character, a worker's bytes, and seconds.

    Bytes are those that a worker sends in a step; seconds are those of all cores.
    A training that ends in NaN has the loss NaN.

    Args:
        row: The setting.
        seed: Of the weights and of the order of texts.
    """
    steps = row.steps
    strategy, started = study.strategy_of(WORKERS), time.process_time()
    first, _, alphabet = bible.characters()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = models.make_decoder(len(alphabet), bible.LENGTH)
        optimizer = make_optimizer(row)
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
    seconds = time.process_time() - started
    size = bytes_of(row, optimizer, model.count_params())
    keras.backend.clear_session()
    return {
        "loss": curve[-1],
        "bytes": size,
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
    row = BASELINE._replace(steps=RATE_STEPS, rate=key["rate"])
    return train(row, key["seed"])


def write(rows: list[dict], rates: list[dict]):
    """Write the page's tables and its figure from all rows that there are."""
    found, parts = Rows(rows), grid()
    workers = f"{WORKERS} virtual workers"
    where = f"{study.trainings(rows)}; {workers}"
    names = {
        "grid": [
            BASELINE,
            Row("float32", 1),
            *OFTEN,
            *(
                Row(exchange, every, momentum)
                for every in EVERY
                for exchange in (*EXCHANGES, ZERO_ONE)
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
        "longest": parts["longest"],
        "drift": parts["drift"],
    }
    for name, own in names.items():
        text = found.table(own)
        print("", name, "", text, sep="\n", flush=True)
        study.write_page(PAGE, text, where, name, rows)
    cells = [[f"{row['rate']:g}", f"{row['loss']:.4f}"] for row in rates]
    text = study.markdown(["rate", "loss"], cells)
    where = f"Adam, bfloat16 in each step, {RATE_STEPS} steps; "
    where += f"{study.trainings(rates)}; {workers}"
    study.write_page(PAGE, text, where, "rates", rates)
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
    processes = study.one_thread_each()
    measure = None if given.tables else train_rate
    keys = [{"rate": rate, "seed": 9} for rate in RATES]
    complete = functools.partial(
        study.complete,
        columns=COLUMNS,
        processes=processes,
        words=WORDS,
        most=given.most,
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
