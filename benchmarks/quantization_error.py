"""Compare what quantizers lose of a gradient, and how they use their levels.

    python benchmarks/quantization_error.py

The error is E||Q(v) - v||^2 / ||v||^2 over buckets of 2048 elements, in closed form:
rounded at random to the levels around it, v between b_k and b_{k+1} contributes
(v - b_k)(b_{k+1} - v), and what lies outside the levels the square of its distance
besides. Utilisation is the entropy of the expected frequencies of the s codes over
log2(s): 1 where all levels are used equally often.

Vectors are drawn, or gradients of the two networks of `examples/` on Fashion-MNIST: at
the first step, after a hundred, and at the end of the training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from report import head, plot_histograms, write_csv, write_table

from tfgradcomp import compressors, ops
from tfgradcomp.core import Context, Layout

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))
import data  # noqa: E402
import models  # noqa: E402

BUCKET_SIZE = 2048
BATCH_SIZE, EARLY = 128, 100
SWEEPS = 20
NETWORKS = {"CNN": models.make_lenet, "ResNet": models.make_resnet}
DRAWN = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "Laplace": lambda rng, size: rng.laplace(size=size),
    "Student t(3)": lambda rng, size: rng.standard_t(3, size),
}
COLUMNS = ("source", "method", "levels", "error", "utilisation", "elements", "buckets")


class Method(NamedTuple):
    """A quantizer.

    Attributes:
        compressor: Of a payload with the field `codes`.
        levels: s.
        is_random: Whether v is rounded at random to one of the levels around it.
    """

    compressor: compressors.Compressor
    levels: int
    is_random: bool = True


class Source(NamedTuple):
    """Vectors, one after the other: float32 `[size]`, in buckets."""

    values: np.ndarray
    layout: Layout

    @classmethod
    def of(cls, vectors: list[np.ndarray]) -> Source:
        """Cuts each vector into buckets, the last of which may be short."""
        splits, end = [0], 0
        for vector in vectors:
            splits += range(end + BUCKET_SIZE, end + vector.size, BUCKET_SIZE)
            end += vector.size
            splits.append(end)
        values = np.concatenate(vectors).astype(np.float32)
        return cls(values, Layout(tuple(splits)))


class Measured(NamedTuple):
    """What a method does to a source.

    Attributes:
        errors: E||Q(v) - v||^2 of each bucket, float64 `[num_blocks]`.
        frequencies: Expected frequencies of the codes, float64 `[s]`.
    """

    errors: np.ndarray
    frequencies: np.ndarray

    @property
    def utilisation(self) -> float:
        """Entropy of the frequencies over that of equal ones."""
        used = self.frequencies[self.frequencies > 0]
        return float(-(used * np.log2(used)).sum() / np.log2(len(self.frequencies)))


def methods() -> dict[str, Method]:
    """Returns all methods, by the names of the table."""
    ternary = compressors.Ternary()
    found = {f"ORQ-{s}": Method(compressors.ORQ(s), s) for s in (3, 5, 9, 17)}
    for s in (5, 9):
        found[f"ORQ-{s}, refined"] = Method(compressors.ORQ(s, refine=SWEEPS), s)
    for norm in ("max", "l2"):
        for s in (3, 5, 9):
            found[f"QSGD-{s}, {norm}"] = Method(compressors.QSGD(s, norm), s)
    for s in (3, 5, 9):
        found[f"Linear-{s}"] = Method(compressors.LinearQuantization(s), s)
    return found | {
        "TernGrad": Method(compressors.Clip(ternary, 2.5), 3),
        "TernGrad, not clipped": Method(ternary, 3),
        "BinGrad-pb": Method(compressors.BinGrad("pb"), 2),
        "BinGrad-b": Method(compressors.BinGrad("b"), 2, is_random=False),
        "scaled sign": Method(compressors.ScaledSign(), 2, is_random=False),
    }


def claims() -> list[tuple[str, str, float]]:
    """Returns (method, other method, c): the error of one is at most c of the other."""
    levels = (3, 5, 9)
    return [
        *((f"ORQ-{s}", f"QSGD-{s}, max", 1.0) for s in levels),
        *((f"ORQ-{s}", f"Linear-{s}", 1.0) for s in levels),
        *((f"ORQ-{s}", f"ORQ-{s}, refined", 1.02) for s in levels[1:]),
        ("BinGrad-b", "scaled sign", 1.0),
        ("BinGrad-b", "BinGrad-pb", 1.0),
        ("BinGrad-b", "ORQ-3", 1.0),
    ]


def measure(method: Method, source: Source) -> Measured:
    """Returns errors and frequencies, computed from what the codes stand for."""
    payload = _payload(method, source)
    levels = _decoded_levels(method, payload, source.layout)
    v = source.values.astype(np.float64)
    if method.is_random:
        low, up, errors = _rounded(v, levels)
    else:
        words = payload["codes"]
        low = ops.unpack_codes(words, method.levels, v.size).numpy()
        up = np.zeros_like(v)
        errors = (v - _at(levels, low)) ** 2
    counts = np.bincount(low, 1 - up, method.levels)
    counts += np.bincount(np.minimum(low + 1, method.levels - 1), up, method.levels)
    errors = np.add.reduceat(errors, source.layout.row_splits[:-1])
    return Measured(errors, counts / v.size)


def quantized(method: Method, source: Source) -> np.ndarray:
    """Returns one Q(v)."""
    return _of(method, _payload(method, source), source.layout)


def _payload(method, source):
    zero, one = tf.constant(0, tf.int64), tf.constant(1.0)
    context = Context(zero, zero, 0, 1, one, one)
    compressor, layout = method.compressor, source.layout
    x = tf.constant(source.values)
    return compressor.compress(x, compressor.init(layout), layout, context).payload


def _of(method, payload, layout):
    return method.compressor.decompress(payload, layout).numpy()


def _decoded_levels(method, payload, layout):
    """What each code stands for at each element, float64 `[size, s]`."""
    decoded = []
    for code in range(method.levels):
        codes = tf.fill([layout.size], code)
        words = ops.pack_codes(codes, method.levels)
        decoded.append(_of(method, {**payload, "codes": words}, layout))
    return np.stack(decoded, 1).astype(np.float64)


def _rounded(v, levels):
    """The code below, the probability of the next one, and the expected error."""
    below = (levels[:, 1:-1] <= v[:, np.newaxis]).sum(1)
    low, high = _at(levels, below), _at(levels, below + 1)
    inside = np.clip(v, low, high)
    up = np.divide(inside - low, high - low, np.zeros_like(v), where=high > low)
    return below, up, (inside - low) * (high - inside) + (v - inside) ** 2


def _at(levels, codes):
    return np.take_along_axis(levels, codes[:, np.newaxis], 1)[:, 0]


def sources(elements: int, images: int, epochs: int) -> dict[str, Source]:
    """Returns the drawn vectors and the gradients, by name.

    Args:
        elements: Size of a drawn vector.
        images: The first ones of Fashion-MNIST, on which networks are trained.
        epochs: How often.
    """
    rng = np.random.default_rng(0)
    found = {name: Source.of([draw(rng, elements)]) for name, draw in DRAWN.items()}
    x, y = data.arrays(data.load().train, images)
    pairs = tf.data.Dataset.from_tensor_slices((x, y))
    for name, make_model in NETWORKS.items():
        keras.utils.set_random_seed(0)
        model = make_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
        batches = data.batches(pairs, BATCH_SIZE, shuffle_seed=0).repeat(epochs)
        steps = int(batches.cardinality())
        done = 0
        for when, step in (("start", 0), ("early", min(EARLY, steps)), ("end", steps)):
            if step > done:
                part = batches.skip(done).take(step - done)
                model.fit(part, verbose=0, shuffle=False)
                done = step
            found[f"{name}, {when}"] = Source.of(gradients(model, loss, batches))
    return found


def gradients(model, loss, batches: tf.data.Dataset) -> list[np.ndarray]:
    """Returns the flat gradients of the first eight batches."""

    @tf.function
    def gradient(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        found = tape.gradient(value, model.trainable_variables)
        return tf.concat([tf.reshape(g, [-1]) for g in found], 0)

    # Batch normalisation moves its averages, which no gradient depends on.
    return [gradient(x, y).numpy() for x, y in batches.take(8)]


def tables(found: dict[str, Source], measured: dict) -> list[str]:
    """Returns the lines of the three tables."""
    energy = {name: _energy(source) for name, source in found.items()}

    def table(cell):
        head = f"| method | {' | '.join(found)} |"
        rows = [
            f"| {name} | {' | '.join(cell(name, source) for source in found)} |"
            for name in methods()
        ]
        return [head, "|---" * (1 + len(found)) + "|", *rows]

    def error(method, source):
        return f"{measured[source][method].errors.sum() / energy[source]:.3f}"

    def utilisation(method, source):
        return f"{measured[source][method].utilisation:.2f}"

    lines = ["Expected square error, relative to the square of the norm:", ""]
    lines += [*table(error), "", "Utilisation of the levels:", ""]
    lines += [*table(utilisation), "", "Claims that hold, by the same errors:", ""]
    lines += ["| error of | at most | holds for | holds in buckets | largest ratio |"]
    lines += ["|---" * 5 + "|"]
    for name, other, factor in claims():
        pairs = {s: (m[name].errors, m[other].errors) for s, m in measured.items()}
        ratios = {s: a.sum() / b.sum() for s, (a, b) in pairs.items()}
        # Equal levels, added up in another order.
        holds = [s for s, ratio in ratios.items() if ratio <= factor * (1 + 1e-9)]
        ours, theirs = (
            np.concatenate(part) for part in zip(*pairs.values(), strict=True)
        )
        share = np.mean(ours <= factor * (1 + 1e-9) * theirs)
        worst = max(ratios, key=ratios.get)
        bound = other if factor == 1 else f"{factor:g} × {other}"
        lines.append(
            f"| {name} | {bound} | {len(holds)} of {len(found)} | "
            f"{100 * share:.2f} % of {ours.size} | {ratios[worst]:.3f}, {worst} |"
        )
    return lines


def _energy(source):
    return (source.values.astype(np.float64) ** 2).sum()


def _rows(found, measured):
    for name, source in found.items():
        for method, result in measured[name].items():
            yield {
                "source": name,
                "method": method,
                "levels": methods()[method].levels,
                "error": result.errors.sum() / _energy(source),
                "utilisation": result.utilisation,
                "elements": source.layout.size,
                "buckets": source.layout.num_blocks,
            }


def main() -> None:
    """Measures, and writes tables, CSV and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--elements", type=int, default=2**20, help="drawn of each")
    parser.add_argument("--images", type=int, default=12_800, help="to train on")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder; default: results, README")
    arguments = parser.parse_args()
    found = sources(arguments.elements, arguments.images, arguments.epochs)
    measured = {
        name: {key: measure(method, source) for key, method in methods().items()}
        for name, source in found.items()
    }
    lines = [
        head(
            f"{arguments.elements} elements drawn of each distribution, "
            f"gradients of 8 batches of {BATCH_SIZE}, networks trained on "
            f"{arguments.images} images for {arguments.epochs} epochs; buckets of "
            f"{BUCKET_SIZE}"
        ),
        "",
        *tables(found, measured),
    ]
    folder = arguments.output or HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(_rows(found, measured))
    write_csv(folder / "quantization_error.csv", COLUMNS, rows)
    shown = found["ResNet, early"]
    panels = {"full precision": shown.values}
    for name in ("QSGD-9, max", "Linear-9", "ORQ-9", "BinGrad-pb", "BinGrad-b"):
        panels[name] = quantized(methods()[name], shown)
    plot_histograms(folder / "quantization_error.png", panels)
    if arguments.output is None:
        write_table(HERE / "README.md", "quantization error", lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
