"""Train with Strom's method and the hybrid, their thresholds fixed or "auto".

    python benchmarks/auto_threshold.py
    python benchmarks/auto_threshold.py --learning-rates 0.02 --thresholds 0.1 auto

A network of three dense layers on Fashion-MNIST, momentum SGD with a rate that falls to
0, two workers in one process. Printed are the test accuracy, the compression ratio
(elements over those sent), and |r| / threshold of the elements that are sent: its 99th
percentile and its largest, over a tenth of the steps. Far above 1, elements are paid
back over that many steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from report import commit, processor

from tfgradcomp import compressors, ops
from tfgradcomp.core import Context, Layout
from tfgradcomp.per_example.second_moments import step_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import data  # noqa: E402

WORKERS, BATCH_SIZE = 2, 64
METHODS = {"Strom": compressors.Strom, "Hybrid": compressors.Hybrid}


def make_model(learning_rate, steps):
    """Return the network, compiled."""
    layers = [
        keras.layers.Input((28, 28, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential(layers)
    rate = keras.optimizers.schedules.CosineDecay(learning_rate, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["accuracy"])
    return model


def train(compressor, learning_rate, seed, pairs, epochs):
    """Return accuracy in percent, ratio, and two quantiles of |r| / threshold."""
    keras.utils.set_random_seed(seed)
    batches = data.batches(pairs[0], BATCH_SIZE * WORKERS, seed).repeat(epochs)
    steps = int(batches.cardinality())
    model = make_model(learning_rate, steps)
    variables = model.trainable_variables
    layout = Layout.from_sizes([int(np.prod(v.shape)) for v in variables])
    initial = compressor.init(layout) if compressor else ()
    states = [tf.nest.map_structure(tf.Variable, initial) for _ in range(WORKERS)]

    @tf.function
    def step(x, y, rate):
        total, sent, outgrown = 0.0, 0, []
        for i, state in enumerate(states):
            part = slice(i * BATCH_SIZE, (i + 1) * BATCH_SIZE)
            own = step_of(model, x[part], y[part])
            flat, moments = (
                tf.concat([tf.reshape(t, [-1]) for t in one], 0)
                for one in (own.gradients, own.moments)
            )
            if not compressor:
                total += flat
                continue
            zero = tf.constant(0, tf.int64)
            context = Context(zero, zero, i, WORKERS, rate, rate)
            context = context._replace(second_moments=moments)
            r = state["residual"] + flat
            payload, new, _ = compressor.compress(flat, state, layout, context)
            decoded = tf.convert_to_tensor(compressor.decompress(payload, layout))
            scale = compressor.scale(
                {name: value[tf.newaxis] for name, value in payload.items()}, layout
            )
            ratio = tf.abs(r) / ops.spread(scale[0], layout.row_splits)
            outgrown.append(tf.boolean_mask(ratio, decoded != 0))
            tf.nest.map_structure(lambda v, value: v.assign(value), state, new)
            total += decoded
            sent += tf.math.count_nonzero(decoded)
        mean = tf.split(total / WORKERS, layout.sizes)
        pieces = [tf.reshape(m, v.shape) for m, v in zip(mean, variables, strict=True)]
        model.optimizer.apply(pieces, variables)
        return sent, tf.concat(outgrown, 0) if outgrown else tf.zeros([0])

    count, ratios = 0, []
    for number, (x, y) in enumerate(batches):
        sent, outgrown = step(x, y, tf.constant(learning_rate))
        count += int(sent)
        if number % 10 == 0:
            ratios.append(outgrown.numpy())
    _, accuracy = model.evaluate(data.batches(pairs[1], 1000), verbose=0)
    all_ratios = np.concatenate(ratios)
    quantiles = np.quantile(all_ratios, [0.99, 1]) if all_ratios.size else [1, 1]
    ratio = steps * WORKERS * layout.size / count if count else 1
    return 100 * accuracy, ratio, *quantiles


def threshold_of(text):
    """Return a threshold of the command line."""
    return text if text == "auto" else float(text)


def main():
    """Train with each method, threshold and rate, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument(
        "--thresholds", nargs="+", type=threshold_of, default=[0.001, 0.01, 0.1, "auto"]
    )
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[0.02, 0.05])
    parser.add_argument("--images", type=int, default=12_800)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = data.load()
    pairs = found.train.take(arguments.images), found.test
    print(
        f"{found.source}, {arguments.images} images, {arguments.epochs} epochs, "
        f"{WORKERS} workers, seed {arguments.seed}; {processor()}; commit {commit()}.\n"
    )
    print("| rate | method | threshold | accuracy, % | ratio | r / t, 99 % | largest |")
    print("|---" * 7 + "|")
    for rate in arguments.learning_rates:
        named = [("float32", None, None)]
        for name in arguments.methods:
            named += [(name, t, METHODS[name](t)) for t in arguments.thresholds]
        for name, threshold, compressor in named:
            accuracy, ratio, most, largest = train(
                compressor, rate, arguments.seed, pairs, arguments.epochs
            )
            print(
                f"| {rate:g} | {name} | {threshold or ''} | {accuracy:.2f} | "
                f"{ratio:.1f} | {most:.3g} | {largest:.3g} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
