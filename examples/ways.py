"""Settings of all methods and of float32 for the leaderboard."""

from collections.abc import Callable
from typing import NamedTuple

import keras

import tfgradcomp
from tfgradcomp.compressors import ErrorFeedback, TopK
from tfgradcomp.servers import Mean


class Way(NamedTuple):
    """A method around an optimizer.

    Attributes:
        baseline: The float32 optimizer for comparison.
        wrap: Function of an optimizer, of the number of all steps, and of arguments
            that every `CompressedOptimizer` takes.
        planned: The wrapper for the forecast by `planning.plan`: this wrapper, or one
            with the same messages. Empty: float32.
        inner: The inner optimizer, if not the baseline, whose momentum the method has.
        rate: Name of the model's learning rate, if not the baseline's.
        factor: Factor of that rate.
        local_steps: Steps between two exchanges.
        delay: Steps from local steps to their exchange.
        whole_tables: Whether embedding tables travel with all rows.
    """

    baseline: str
    wrap: Callable
    planned: str = ""
    inner: str = ""
    rate: str = ""
    factor: float = 1.0
    local_steps: int = 1
    delay: int = 0
    whole_tables: bool = False

    @property
    def title(self) -> str:
        """Name of the inner optimizer in the table."""
        name = self.inner or self.baseline
        return "SGD, momentum" if name == "momentum" else name


def wrapped(name: str, baseline="momentum", planned="", arguments=None, **more) -> Way:
    """Return the way of a wrapper with the given arguments."""

    def wrap(optimizer, steps, **common):
        return getattr(tfgradcomp, name)(optimizer, **(arguments or {}), **common)

    return Way(baseline, wrap, planned or name, **more)


def top_k(optimizer, steps, **common):
    """Return top-k of one element in a hundred, with error feedback."""
    return tfgradcomp.CompressedOptimizer(
        optimizer, ErrorFeedback(TopK(0.01)), Mean(TopK(0.01)), **common
    )


def dgc(optimizer, steps, **common):
    """Return DGC whose density falls to one element in a hundred in a tenth."""
    return tfgradcomp.DGC(optimizer, 0.01, density_steps=steps // 30, **common)


def local_steps(name="DistEFBlockSGD", delay=0, **arguments):
    """Return the way of 16 local steps whose sums are exchanged by a wrapper."""

    def wrap(optimizer, steps, **common):
        kind = getattr(tfgradcomp, name)
        outer = kind(keras.optimizers.SGD(1.0), **arguments, **common)
        return tfgradcomp.LocalSteps(optimizer, outer, every=16, delay=delay)

    more = {"local_steps": 16, "delay": delay, "whole_tables": True}
    return Way("momentum", wrap, name, **more)


def onebit_adam(optimizer, steps, **common):
    """Return 1-bit Adam with a fifth of all steps for its squares to settle."""
    return tfgradcomp.OneBitAdam(optimizer, steps // 5, **common)


def onebit_lamb(optimizer, steps, **common):
    """Return 1-bit LAMB with a fifth of all steps as warm-up."""
    return tfgradcomp.OneBitLAMB(optimizer, steps // 5, **common)


def zero_one_adam(optimizer, steps, **common):
    """Return 0/1 Adam that reaches its 16 local steps early."""
    return tfgradcomp.ZeroOneAdam(
        optimizer, steps // 5, double_every=steps // 8, **common
    )


def unwrapped(optimizer, steps, **common):
    """Return the optimizer."""
    return optimizer


AUTO = {"threshold": "auto"}
WAYS = {
    "momentum": Way("momentum", unwrapped),
    "SGD": Way("SGD", unwrapped),
    "Adam": Way("Adam", unwrapped),
    "LAMB": Way("LAMB", unwrapped),
    "TernGrad": wrapped("TernGrad"),
    "SignSGD": wrapped("SignSGD", rate="sign", factor=0.2),
    "Signum": wrapped("Signum", inner="SGD", rate="sign"),
    "DistEFSGD": wrapped("DistEFSGD", "SGD"),
    "DistEFBlockSGD": wrapped("DistEFBlockSGD", "SGD"),
    "DistEFBlockSGDM": wrapped("DistEFBlockSGDM", inner="SGD"),
    "OneBitSGD": wrapped("OneBitSGD", "SGD"),
    "DGC": Way("momentum", dgc, "VarianceBased", inner="SGD"),
    "ChunkedTopK": wrapped("ChunkedTopK", "SGD"),
    "RandomK": wrapped("RandomK", "SGD", arguments={"ratio": 0.1}),
    "PowerSGD": wrapped("PowerSGD"),
    "OneBitAdam": Way("Adam", onebit_adam, "DistEFBlockSGD", whole_tables=True),
    "OneBitLAMB": Way("LAMB", onebit_lamb, "DistEFBlockSGD", whole_tables=True),
    "ZeroOneAdam": Way(
        "Adam", zero_one_adam, "DistEFBlockSGD", local_steps=16, whole_tables=True
    ),
    "ORQ": wrapped("ORQ"),
    "BinGrad": wrapped("BinGrad"),
    "QSGD": wrapped("QSGD"),
    "Int8": wrapped("Int8"),
    "Int4": wrapped("Int4"),
    "LinearQuantization": wrapped("LinearQuantization"),
    "NaturalCompression": wrapped("NaturalCompression"),
    "ScalarCodebook": wrapped("ScalarCodebook", "SGD"),
    "ScaledSign": wrapped("ScaledSign"),
    "HalfPrecision": wrapped("HalfPrecision"),
    "VarianceBased": wrapped("VarianceBased", "SGD"),
    "Strom": wrapped("Strom", "SGD", "VarianceBased", arguments=AUTO),
    "Hybrid": wrapped("Hybrid", "SGD", "VarianceBased", arguments=AUTO),
    "CompressedOptimizer": Way("SGD", top_k, "VarianceBased"),
    "LocalSteps": local_steps(),
    "LocalSteps, delay": local_steps(delay=1),
    "LocalSteps, ScalarCodebook": local_steps("ScalarCodebook"),
    "LocalSteps, ChunkedTopK": local_steps("ChunkedTopK"),
}
# As the table has them.
TITLES = {
    **{name: "float32" for name, way in WAYS.items() if not way.planned},
    "CompressedOptimizer": "`TopK(0.01)` with error feedback",
    "LocalSteps": "`LocalSteps`, every 16",
    "LocalSteps, delay": "`LocalSteps`, every 16, applied a step later",
    "LocalSteps, ScalarCodebook": "`LocalSteps`, every 16, with `ScalarCodebook`",
    "LocalSteps, ChunkedTopK": "`LocalSteps`, every 16, with `ChunkedTopK`",
}


def make_optimizer(way: Way, rates: dict[str, float], steps: int, **common):
    """Return the optimizer of a way, with arguments for its wrapper."""
    rate = way.factor * rates[way.rate or way.baseline]
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
    inner = way.inner or way.baseline
    if inner == "Adam":
        optimizer = keras.optimizers.Adam(schedule)
    elif inner == "LAMB":
        optimizer = keras.optimizers.Lamb(schedule)
    else:
        momentum = 0.9 if inner == "momentum" else 0.0
        optimizer = keras.optimizers.SGD(schedule, momentum=momentum)
    return way.wrap(optimizer, steps, **common)
