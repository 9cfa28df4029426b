"""Count what each method puts on the wire and write README.md's table.

    python benchmarks/wire_size.py

The model is ResNet-50's list of variables: 25.6 million parameters, most of them in
convolutions, and small vectors of biases and normalisation between them. The figures
come from `optimizer.traffic`, which tests compare with what the collectives
are given; nothing is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import keras
import wrappers
from report import write_table
from workloads import resnet_50, sizes

from tfgradcomp import optimizers
from tfgradcomp.core import Layout
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


def methods() -> dict[str, Callable]:
    """Returns functions of a transport, by what they build.

    They build every wrapper that needs nothing but an inner optimizer and whose
    messages have one length, in the order of the README's table of methods.
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


def row(method: str, make) -> str:
    """Returns the table's row of one method."""
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
        ring = 2 * (workers - 1) / workers * 4 * sum(SIZES)
        received = traffic.bytes_received
        cells.append(f"{received / 1e6:.1f} MB ({ring / received:.1f}×), {name}")
        traffic = moved["all_gather"]
        bits = (
            f"{traffic.bits_per_element_up:.2f} | {traffic.bits_per_element_reply:.2f}"
        )
    return f"| `{method}` | {bits} | {' | '.join(cells)} |"


if __name__ == "__main__":
    variables = [keras.Variable(keras.ops.zeros([n])) for n in SIZES]
    head = " | ".join(f"received, N = {workers}" for workers in WORKERS)
    table = [
        f"| method | bits up | bits in the reply, N = {WORKERS[-1]} | {head} |",
        "|---" * (3 + len(WORKERS)) + "|",
        *(row(name, make) for name, make in methods().items()),
    ]
    write_table(Path(__file__).with_name("README.md"), "wire size", table)
    print("\n".join(table))
