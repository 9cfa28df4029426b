"""Count what each method puts on the wire and write the README's table.

    python benchmarks/wire_size.py

The model is ResNet-50's list of variables: 25.6 million parameters, most of them in
convolutions, and small vectors of biases and normalisation between them. The figures
come from `optimizer.traffic`, which tests compare with what the collectives
are given; nothing is timed.
"""

from __future__ import annotations

from pathlib import Path

import keras
from report import write_table
from workloads import resnet_50, sizes

import tfgradcomp
from tfgradcomp.transports import AllGather, AllReduce, Loopback, Sharded

README = Path(__file__).resolve().parents[1] / "README.md"
SIZES = sizes(resnet_50())
WORKERS = (2, 4, 8)
TRANSPORTS = {"all_gather": AllGather, "all_reduce": AllReduce, "sharded": Sharded}
SGD = keras.optimizers.SGD
METHODS = {
    "TernGrad": lambda **kw: tfgradcomp.TernGrad(SGD(), **kw),
    "SignSGD": lambda **kw: tfgradcomp.SignSGD(SGD(), **kw),
    "Signum": lambda **kw: tfgradcomp.Signum(SGD(), **kw),
    "DistEFSGD": lambda **kw: tfgradcomp.DistEFSGD(SGD(), **kw),
    "DistEFBlockSGD": lambda **kw: tfgradcomp.DistEFBlockSGD(SGD(), **kw),
    "DistEFBlockSGDM": lambda **kw: tfgradcomp.DistEFBlockSGDM(SGD(), **kw),
    "ORQ": lambda **kw: tfgradcomp.ORQ(SGD(), **kw),
    "ORQ(levels=5)": lambda **kw: tfgradcomp.ORQ(SGD(), levels=5, **kw),
    "ORQ(levels=3)": lambda **kw: tfgradcomp.ORQ(SGD(), levels=3, **kw),
    "ORQ(reply='requantize')": lambda **kw: tfgradcomp.ORQ(
        SGD(), reply="requantize", **kw
    ),
    "BinGrad": lambda **kw: tfgradcomp.BinGrad(SGD(), **kw),
    "QSGD": lambda **kw: tfgradcomp.QSGD(SGD(), **kw),
    "LinearQuantization": lambda **kw: tfgradcomp.LinearQuantization(SGD(), **kw),
    "ScaledSign": lambda **kw: tfgradcomp.ScaledSign(SGD(), **kw),
    "HalfPrecision": lambda **kw: tfgradcomp.HalfPrecision(SGD(), **kw),
}


def row(method: str, make) -> str:
    """Returns the table's row of one method."""
    cells = []
    for workers in WORKERS:
        collectives = Loopback(workers).collectives(0)
        moved = {}
        for name, transport in TRANSPORTS.items():
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
        *(row(name, make) for name, make in METHODS.items()),
    ]
    write_table(README, "wire size", table)
    print("\n".join(table))
