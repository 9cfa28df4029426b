"""Count what each method puts on the wire and write README.md's table.

    python benchmarks/wire_size.py

The model is ResNet-50's list of variables: 25.6 million parameters, most of them in
convolutions, and small vectors of biases and normalisation between them. The figures
come from `optimizer.traffic`, which tests compare with what the collectives
are given; nothing is timed.

How many elements sparse methods send depends on the training, so that their table is of
messages with one element in 100 and in 1000, at random places.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import wrappers
from report import write_table
from workloads import resnet_50, sizes

from tfgradcomp import optimizers
from tfgradcomp.collectives import padded_size
from tfgradcomp.compressors.index_coding import CODINGS
from tfgradcomp.core import Layout
from tfgradcomp.planning.forecasts import required_arguments
from tfgradcomp.transports import Loopback
from tfgradcomp.transports.auto import BY_NAME
from tfgradcomp.transports.messages import has_variable_length

SIZES = sizes(resnet_50())
WORKERS = (2, 4, 8)
SGD = keras.optimizers.SGD
# Beside the defaults of each wrapper.
VARIANTS = {
    "ORQ": [{"levels": 5}, {"levels": 3}, {"reply": "requantize"}],
}

# Arguments of sparse methods that have no default; no message depends on them.
REQUIRED = {"threshold": 0.01}
# All elements over those that are sent.
RATIOS = (100, 1000)


def methods() -> dict[str, Callable]:
    """Returns functions of a transport, by what they build.

    They build every wrapper that needs nothing but an inner optimizer and whose
    messages have one length, in the order of the table of all methods.
    """
    found = {}
    for name in wrappers.needing_no_arguments():
        kind = getattr(optimizers, name)
        fields = kind(SGD()).method.compressor.fields(Layout((0, 1)))
        if has_variable_length(fields):
            continue
        for arguments in ({}, *VARIANTS.get(name, ())):
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            label = f"{name}({given})" if given else name
            found[label] = functools.partial(_make, kind, arguments)
    return found


def _make(kind, arguments, transport):
    return kind(SGD(), **arguments, transport=transport)


def row(method: str, make: Callable, every: int = 1) -> str:
    """Returns the table's row of one method, with an exchange every so many steps."""
    cells = []
    for workers in WORKERS:
        collectives = Loopback(workers).collectives(0)
        moved = {}
        for name, transport in BY_NAME.items():
            optimizer = make(transport=transport(collectives))
            try:
                optimizer.build(variables)
            except ValueError:  # What it sends cannot be added up.
                continue
            moved[name] = optimizer.traffic
        name, traffic = min(moved.items(), key=lambda item: item[1].bytes_received)
        received = of_ring(traffic.bytes_received / every, workers)
        cells.append(f"{received}, {name}")
        traffic = moved["all_gather"]
        bits = (
            f"{traffic.bits_per_element_up:.2f} | {traffic.bits_per_element_reply:.2f}"
        )
    return f"| `{method}` | {bits} | {' | '.join(cells)} |"


def local_rows() -> list[str]:
    """Returns the rows of local steps, by their exchange and the steps between two."""
    return [
        row(f"LocalSteps(..., {name}(...), every={every})", methods()[name], every)
        for name in ("DistEFBlockSGDM", "ScalarCodebook", "ChunkedTopK")
        for every in (16, 30)
    ]


def of_ring(received: float, workers: int) -> str:
    """Returns bytes, and how many times more a float32 ring moves."""
    ring = 2 * (workers - 1) / workers * 4 * sum(SIZES)
    digits = 1 if received > 1e6 else 2 if received > 1e5 else 3
    return f"{received / 1e6:.{digits}f} MB ({ring / received:.1f}×)"


def sparse_rows() -> list[str]:
    """Returns the rows of the methods that send some elements only."""
    rng = np.random.default_rng(0)
    rows = []
    for name in sorted(wrappers.taking("index_coding"), key=wrappers.position):
        required = {key: REQUIRED[key] for key in required_arguments(name)}
        optimizer = getattr(optimizers, name)(SGD(), **required)
        optimizer.build(variables)
        count = optimizer.traffic.elements_compressed
        for ratio, coding in itertools.product(RATIOS, CODINGS):
            sent = np.sort(
                rng.choice(count, count // ratio, replace=False, shuffle=False)
            )
            compressor = replace(optimizer.method.compressor, index_coding=coding)
            words = tf.size(compressor.message(tf.constant(sent, tf.int32)))
            bits = 32 * int(words) / len(sent)
            cells = [f"`{name}`", coding, f"{ratio}", f"{bits:.1f}"]
            for workers in WORKERS:
                plain = 2 / workers * optimizer.traffic.elements_plain
                received = 4 * (workers - 1) * (int(padded_size(words)) + plain)
                cells.append(of_ring(received, workers))
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def write(name: str, titles: list[str], rows: list[str]) -> None:
    """Writes and prints a table of the page beside this file."""
    titles = [*titles, *(f"received, N = {workers}" for workers in WORKERS)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows]
    write_table(Path(__file__).with_name("README.md"), name, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    variables = [keras.Variable(keras.ops.zeros(shape)) for shape in resnet_50()]
    titles = ["method", "bits up", f"bits in the reply, N = {WORKERS[-1]}"]
    write("wire size", titles, [row(name, make) for name, make in methods().items()])
    write("wire size, local steps", titles, local_rows())
    titles = ["method", "indices", "elements / sent", "bits of one that is sent"]
    write("wire size, sparse", titles, sparse_rows())
