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
from tfgradcomp.planning.risks import RISKS
from tfgradcomp.planning.shapes import MODELS

OPTIMIZERS = ("SGD", "momentum", "Adam")

_EXAMPLES = """\
examples:
  tfgradcomp-plan resnet50 --bandwidth 1gbit --compute-ms 200
  tfgradcomp-plan my_models:build --bandwidth 10gbit --measure --batch-size 64
  tfgradcomp-plan model.keras --bandwidth 100mbit --compute-ms 50 --local-steps 8
  tfgradcomp-plan alexnet --bandwidth 1gbit --compute-ms 160 --batch-size 128 \\
      --workers 4,8,16,512 --devices-per-node 4 --plot alexnet.png

The arithmetic of every method is measured on this machine. This takes up to a minute,
during which the machine should be idle otherwise. No cluster is started.
exit code: 0, or 2 with an error message.
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
    models = f"{', '.join(MODELS)}; a saved .keras file; or module:function, a "
    add("model", help=models + "function that returns a built Keras model")
    compute = parser.add_mutually_exclusive_group(required=True)
    compute.add_argument(
        "--compute-ms",
        type=_number(0.0, math.inf, "milliseconds, more than 0"),
        metavar="MS",
        help="duration of one worker's step without an exchange",
    )
    compute.add_argument(
        "--measure",
        action="store_true",
        help="measure that step here: forward and backward pass of the model",
    )
    add(
        "--bandwidth",
        type=_unit(bits_per_second),
        required=True,
        help="rate of a node's link, each way: 100mbit, 1gbit, ...",
    )
    latency = "time of a message between two nodes (default: 0.1ms)"
    add("--latency", type=_unit(seconds_of), default=LATENCY, help=latency)
    add(
        "--workers",
        type=lambda text: [_count(part) for part in text.split(",")],
        default=[1, 2, 4, 8, 16, 32],
        metavar="N,N,...",
        help="numbers of workers (default: 1,2,4,8,16,32)",
    )

    def add_count(name, text, metavar=None):
        text = f"{text} (default: %(default)s)"
        add(name, type=_count, default=1, metavar=metavar, help=text)

    add_count("--devices-per-node", "workers that share a node's link", "G")
    add_count("--batch-size", "examples per step and worker, for the throughput")
    add_count("--local-steps", "steps from one exchange to the next", "H")
    delay = "steps from local steps to their exchange, which then travels beside a step"
    add("--delay", type=_count, default=0, metavar="D", help=delay + " (default: 0)")
    add(
        "--risk",
        choices=RISKS,
        help="print what Auto would choose with this risk, for the largest N; errors "
        "of layers are not known here",
    )
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="momentum",
        help="the inner optimizer of --risk (default: momentum)",
    )
    add(
        "--ratio",
        type=_number(1.0, math.inf, "1 or more"),
        metavar="C",
        help="all elements over the elements that sparse methods send, as "
        "optimizer.traffic.ratio reports it; without it sparse methods are left out",
    )
    add(
        "--methods",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help="wrappers to compare, beside HalfPrecision (default: all)",
    )
    add(
        "--software",
        choices=SOFTWARE,
        default="tcp",
        help="software around the link: methods' messages travel by TCP or by "
        "TensorFlow's gRPC, float32 by gRPC, as fitted on two cores; or it takes no "
        "time (default: %(default)s)",
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
    form.add_argument("--csv", action="store_true", help="print all forecasts as CSV")
    form.add_argument("--json", action="store_true", help="print all results as JSON")
    add("--plot", metavar="FILE.png", help="draw throughput over workers")
    return parser.parse_args(argv)


def _unit(function: Callable[[str], float]) -> Callable[[str], float]:
    """Returns an argument type whose error message is that of the function."""

    def read(text):
        try:
            return function(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _number(least: float, most: float, wanted: str) -> Callable[[str], float]:
    """Returns an argument type for finite, nonzero numbers in a range."""

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
