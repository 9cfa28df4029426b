"""Measure the arithmetic of Auto's candidates, for `planning.arithmetic`.

    python benchmarks/arithmetic.py

Prints nanoseconds an element for two workers, and for each further worker where every
worker decodes the payloads of all. Run nothing else meanwhile.
"""

import keras

from tfgradcomp.core import Layout
from tfgradcomp.planning.arithmetic import key_of, measured_arithmetic
from tfgradcomp.planning.candidates import options
from tfgradcomp.transports import AllGather, AllReduce, Sharded

# A matrix of four million elements, as `measured_arithmetic` takes.
SHAPE = 1 << 13, 1 << 9
INNER = (keras.optimizers.SGD(), keras.optimizers.SGD(momentum=0.9), "adam")


def main():
    """Print the table."""
    found = {}
    for inner in map(keras.optimizers.get, INNER):
        for option in options(inner):
            method = option.candidate.method
            if not option.reason and key_of(method) not in found:
                found[key_of(method)] = method
    for key, method in found.items():
        layout = Layout.from_shapes([SHAPE], method.block_size)
        for kind in (AllGather, Sharded, AllReduce):
            try:
                few, many = (
                    1e9 * measured_arithmetic(kind, method, layout, n) / layout.size
                    for n in (2, 3)
                )
            except ValueError:  # The transport cannot carry the method's payload.
                continue
            print(f"{key} {kind.__name__}: {few:.2f}, {many - few:.2f}", flush=True)


if __name__ == "__main__":
    main()
