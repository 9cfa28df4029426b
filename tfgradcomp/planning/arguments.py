"""Command line of the planner."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from tfgradcomp.planning.network import (
    EFFICIENCY,
    LATENCY,
    SOFTWARE,
    bits_per_second,
    seconds_of,
)
from tfgradcomp.planning.shapes import MODELS

_EXAMPLES = """\
examples:
  tfgradcomp-plan resnet50 --bandwidth 1gbit --compute-ms 200
  tfgradcomp-plan my_models:build --bandwidth 10gbit --measure --batch-size 64
  tfgradcomp-plan model.keras --bandwidth 100mbit --compute-ms 50 --local-steps 8
  tfgradcomp-plan alexnet --bandwidth 1gbit --compute-ms 160 --batch-size 128 \\
      --workers 4,8,16,512 --devices-per-node 4 --plot alexnet.png

The arithmetic of every method is measured on this machine, which takes some seconds
and wants a machine that does nothing else. No cluster is started.
exit code: 0, or 2 with a sentence that says what is wrong.
"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="tfgradcomp-plan",
        description="Forecast the speed of a training on N workers, for every method "
        "and transport.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "model",
        help=f"{', '.join(MODELS)}; a saved .keras file; or module:function, which "
        "returns a built Keras model",
    )
    compute = parser.add_mutually_exclusive_group(required=True)
    compute.add_argument(
        "--compute-ms",
        type=_number(0.0, math.inf, "milliseconds, more than 0"),
        metavar="MS",
        help="of a step of one worker without an exchange",
    )
    compute.add_argument(
        "--measure",
        action="store_true",
        help="measure it here: forward and backward pass of the model",
    )
    add(
        "--bandwidth",
        type=_read(bits_per_second),
        required=True,
        help="of a node's link, each way: 100mbit, 1gbit, ...",
    )
    add(
        "--latency",
        type=_read(seconds_of),
        default=LATENCY,
        help="of a message from node to node (default: 0.1ms)",
    )
    add(
        "--workers",
        type=_counts,
        default=[1, 2, 4, 8, 16, 32],
        metavar="N,N,...",
        help="numbers of workers (default: 1,2,4,8,16,32)",
    )
    add(
        "--devices-per-node",
        type=_count,
        default=1,
        metavar="G",
        help="workers that share a node's link (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=_count,
        default=1,
        help="examples of a worker's step; throughput counts them "
        "(default: %(default)s)",
    )
    add(
        "--local-steps",
        type=_count,
        default=1,
        metavar="H",
        help="exchange after so many steps (default: %(default)s)",
    )
    add(
        "--ratio",
        type=_number(1.0, math.inf, "1 or more"),
        metavar="C",
        help="elements over those that sparse methods send, which are left out "
        "without it; optimizer.traffic.ratio says it after some steps",
    )
    add(
        "--methods",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help="wrappers to look at (default: all that need no arguments)",
    )
    add(
        "--software",
        choices=SOFTWARE,
        default="grpc",
        help="what handles the words: TensorFlow's gRPC, as fitted on two cores, or "
        "nothing that costs (default: %(default)s)",
    )
    add(
        "--link-efficiency",
        type=_number(0.01, 1.0, "0.01 to 1"),
        default=EFFICIENCY,
        metavar="PART",
        help="part of the bandwidth that carries words (default: %(default)s, as "
        "measured with TensorFlow's gRPC)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print every forecast as CSV")
    form.add_argument("--json", action="store_true", help="print all of it as JSON")
    add("--plot", metavar="FILE.png", help="draw throughput over workers")
    return parser.parse_args(argv)


def _read(function: Callable[[str], float]) -> Callable[[str], float]:
    def read(text):
        try:
            return function(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _number(least: float, most: float, wanted: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or value == 0 or math.isinf(value):
            raise argparse.ArgumentTypeError(f"give {wanted}. Received: {text!r}")
        return value

    return read


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"give 1 or more. Received: {text!r}")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]
