"""Methods to choose from, each as the call that makes its wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras

from tfgradcomp import optimizers
from tfgradcomp.assignment.compatibility import rescales
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compressors import Identity
from tfgradcomp.methods import Method
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.frozen_variance import is_plain_adam
from tfgradcomp.servers import Mean

FLOAT32, BFLOAT16 = "float32", "bfloat16"


@dataclass(frozen=True)
class Candidate:
    """A wrapper and its arguments.

    Attributes:
        wrapper: Name of the wrapper in `tfgradcomp`; or `"float32"` or `"bfloat16"`,
            for gradients that are added up in these formats.
        arguments: Arguments of the wrapper, without the inner optimizer.
    """

    wrapper: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        known = (FLOAT32, BFLOAT16, *optimizers.__all__)
        if self.wrapper not in known:
            raise ValueError(
                "A candidate is the name of a wrapper in tfgradcomp, such as "
                "'TernGrad', and a dictionary of its arguments. "
                f"Received: wrapper={self.wrapper!r}"
            )

    @property
    def name(self) -> str:
        """The call that makes the wrapper, without the inner optimizer."""
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.arguments.items())
        return f"{self.wrapper}({arguments})" if arguments else self.wrapper

    @property
    def method(self) -> Method:
        """The method of the wrapper."""
        if self.wrapper == FLOAT32:
            return Method(Identity(), Mean(), name=FLOAT32)
        inner = {
            "OneBitAdam": keras.optimizers.Adam,
            "OneBitLAMB": keras.optimizers.Lamb,
            "ZeroOneAdam": keras.optimizers.Adam,
        }.get(self.wrapper, keras.optimizers.SGD)
        return self.wrap(inner()).method

    def wrap(self, inner_optimizer: Any, **arguments: Any) -> CompressedOptimizer:
        """Returns the wrapper around an optimizer.

        Args:
            inner_optimizer: A Keras optimizer, its name or its config.
            **arguments: Further arguments of the wrapper, such as `exclude`.
        """
        arguments = {**self.arguments, **arguments}
        if self.wrapper == FLOAT32:
            return CompressedOptimizer(inner_optimizer, self.method, **arguments)
        is_half = self.wrapper == BFLOAT16
        kind = getattr(optimizers, "HalfPrecision" if is_half else self.wrapper)
        return kind(inner_optimizer, **arguments)

    @property
    def keeps_momentum(self) -> bool:
        """True if the method keeps a momentum in place of the inner optimizer's."""
        return self.wrapper == "DistEFBlockSGDM"

    @property
    def has_unbiased_errors(self) -> bool:
        """True if messages are rounded at random, each step by itself."""
        return self.wrapper in ("QSGD", "ORQ", "TernGrad")

    def call(self, inner_optimizer: keras.optimizers.Optimizer) -> str:
        """Returns the call that makes the wrapper around an optimizer, as a program."""
        inner = _call_of(inner_optimizer)
        if self.wrapper == FLOAT32:
            return f"{inner}, without a wrapper"
        given = [f"{name}={value!r}" for name, value in self.arguments.items()]
        wrapper = "HalfPrecision" if self.wrapper == BFLOAT16 else self.wrapper
        return f"tfgradcomp.{wrapper}({', '.join([inner, *given])})"


def _call_of(optimizer):
    """Returns the call that makes a Keras optimizer, with its unusual arguments."""
    config = optimizer.get_config()
    usual = type(optimizer)().get_config()
    given = [
        f"{name}={_short(value)}"
        for name, value in config.items()
        if name != "name" and value != usual.get(name)
    ]
    return f"keras.optimizers.{type(optimizer).__name__}({', '.join(given)})"


_FEEDBACK = "error feedback in front of "


def _short(value):
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, (int, str)) else "..."


class Option(NamedTuple):
    """A candidate of `Auto`.

    Attributes:
        candidate: The candidate.
        risk: The least risk that allows it.
        reason: Why the inner optimizer rules it out; empty if it does not.
        has_limit: Whether the error of a layer is limited.
    """

    candidate: Candidate
    risk: str
    reason: str = ""
    has_limit: bool = True

    @property
    def name(self) -> str:
        """The name of the candidate."""
        return self.candidate.name


def options(inner: keras.optimizers.Optimizer, warmup_steps: int = 1) -> list[Option]:
    """Returns the candidates of all risks, for an inner optimizer.

    One bit with error feedback fits plain SGD alone. In front of a momentum or of
    Adam, an exchange that keeps the momentum itself takes its place.

    Args:
        inner: The inner optimizer.
        warmup_steps: Steps after which 1-bit Adam compresses, 1 or more.
    """
    adam = type(inner).__name__ if rescales(inner) else ""
    _, momentum = compat.momentum_of(inner)
    is_momentum_sgd = bool(momentum) and type(inner) is keras.optimizers.SGD
    quantizers = [
        Option(Candidate("QSGD", {"levels": levels, "reply": reply}), "low")
        for levels in (9, 17)
        for reply in ("float32", "requantize")
    ]
    orq = {
        levels: Candidate("ORQ", {"levels": levels, "reply": "requantize"})
        for levels in (5, 9)
    }
    after = adam and _FEEDBACK + adam
    if compat.members(inner) != [inner]:
        after = _FEEDBACK + "optimizers with rates of their own"
    return [
        Option(Candidate(FLOAT32), "none"),
        Option(Candidate(BFLOAT16), "none"),
        *quantizers,
        Option(orq[9], "low"),
        Option(Candidate("PowerSGD", {"rank": 32}), "low", after),
        Option(Candidate("TernGrad"), "medium"),
        Option(orq[5], "medium"),
        Option(Candidate("PowerSGD", {"rank": 4}), "medium", after),
        Option(
            Candidate("DistEFBlockSGD"),
            "high",
            after or (_FEEDBACK + "momentum" if momentum else ""),
            has_limit=False,
        ),
        Option(
            Candidate("DistEFBlockSGDM", {"momentum": momentum or 0.9}),
            "high",
            "" if is_momentum_sgd else "replaces the momentum of SGD",
            has_limit=False,
        ),
        Option(
            Candidate("OneBitAdam", {"warmup_steps": warmup_steps, "refresh": 16}),
            "high",
            "" if is_plain_adam(inner) else "is made of Adam's moments",
            has_limit=False,
        ),
    ]
