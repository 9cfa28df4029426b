"""Count what each method puts on the wire and write the README's table.

    python benchmarks/wire_size.py

The model is ResNet-50's list of layers in outline: 25.5 million parameters, most of
them in convolutions, and small vectors of biases and normalisation between them. The
figures come from `optimizer.traffic`, which tests compare with what the collectives
are given; nothing is timed.
"""

from __future__ import annotations

from pathlib import Path

import keras

import tfgradcomp
from tfgradcomp.transports import AllGather, Loopback
from tfgradcomp.transports.loopback import LoopbackCollectives

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- wire size: begin -->", "<!-- wire size: end -->"
WORKERS = (2, 4, 8)
SGD = keras.optimizers.SGD
METHODS = {
    "TernGrad": lambda **kw: tfgradcomp.TernGrad(SGD(), **kw),
    "SignSGD": lambda **kw: tfgradcomp.SignSGD(SGD(), **kw),
    "Signum": lambda **kw: tfgradcomp.Signum(SGD(), **kw),
    "DistEFSGD": lambda **kw: tfgradcomp.DistEFSGD(SGD(), **kw),
    "DistEFBlockSGD": lambda **kw: tfgradcomp.DistEFBlockSGD(SGD(), **kw),
    "DistEFBlockSGDM": lambda **kw: tfgradcomp.DistEFBlockSGDM(SGD(), **kw),
    "HalfPrecision": lambda **kw: tfgradcomp.HalfPrecision(SGD(), **kw),
}


def resnet_50_sizes() -> list[int]:
    """Returns the sizes of ResNet-50's parameter tensors."""
    sizes = [7 * 7 * 3 * 64, 64, 64]
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            sizes += [inputs * width, width, width]
            sizes += [9 * width * width, width, width]
            sizes += [width * 4 * width, 4 * width, 4 * width]
            if block == 0:
                sizes += [inputs * 4 * width, 4 * width, 4 * width]
            inputs = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def row(name: str, make) -> str:
    """Returns the table's row of one method."""
    cells = []
    for workers in WORKERS:
        collectives = LoopbackCollectives(Loopback(workers), rank=0)
        # Whoever adds up numbers takes the all-reduce that "auto" would take.
        transport = AllGather(collectives)
        if name == "HalfPrecision":
            transport = tfgradcomp.transports.AllReduce(collectives)
        optimizer = make(transport=transport)
        optimizer.build(variables)
        traffic = optimizer.traffic
        ring = 2 * (workers - 1) / workers * 4 * sum(resnet_50_sizes())
        received = traffic.bytes_received
        cells.append(f"{received / 1e6:.1f} MB ({ring / received:.1f}×)")
        bits = (
            f"{traffic.bits_per_element_up:.2f} | {traffic.bits_per_element_reply:.2f}"
        )
    return f"| `{name}` | {bits} | {' | '.join(cells)} |"


if __name__ == "__main__":
    variables = [keras.Variable(keras.ops.zeros([n])) for n in resnet_50_sizes()]
    head = " | ".join(f"received, N = {workers}" for workers in WORKERS)
    table = [
        f"| method | bits up | bits in the reply, N = {WORKERS[-1]} | {head} |",
        "|---" * (3 + len(WORKERS)) + "|",
        *(row(name, make) for name, make in METHODS.items()),
    ]
    text = README.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    README.write_text("\n".join([before + BEGIN, *table, END + after]))
    print("\n".join(table))
