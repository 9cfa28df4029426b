"""signSGD and Signum, with majority vote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from typing_extensions import override

from tfgradcomp.assignment.compatibility import refuse_inner_momentum
from tfgradcomp.compressors import Momentum, Sign
from tfgradcomp.compressors.momentum import warmup_steps_for
from tfgradcomp.core.arguments import (
    check_choice,
    check_integer,
)
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.wrapper import InnerOptimizer
from tfgradcomp.servers import CodeSum, MajorityVote

AGGREGATES = ("vote", "mean")


class _Signs(CompressedOptimizer):
    noise_std: float

    def _add_noise(self, noise_std):
        self.method = replace(self.method, noise_std=noise_std)
        self.noise_std = noise_std

    @classmethod
    @override
    def from_config(cls, config, custom_objects=None):
        # Files that were written before version 0.2 call it so.
        if config.get("aggregate") == "sum":
            config = {**config, "aggregate": "mean"}
        return super().from_config(config, custom_objects)


class SignSGD(_Signs):
    r"""One bit an element, up and down.

    Worker: \( \mathrm{sign}(g) \). Server: \( \mathrm{sign}(\sum_i
    \mathrm{sign}(g^{(i)})) \). The inner optimizer gets \( \pm 1 \) for each element,
    whatever N is: with SGD, \( x \leftarrow x - \eta \cdot vote \), so take a much
    smaller learning rate than SGD's. Weight decay belongs to the inner optimizer
    (`weight_decay=`), never into the sign.

    What is not compressed moves by the sign of the mean gradient, or, with
    `aggregate="mean"`, by the mean of the signs.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        aggregate: `"vote"`, or `"mean"`: the mean of the workers' signs, which moves an
            element the less the more they disagree (with a learning rate \( \delta / N
            \) for the paper's \( \delta \)).
        tie: Where an even number of workers is split: `"zero"` (the element stays) or
            `"random"`, a shared pseudo-random sign.
        abstain_below: \( \tau \): a worker does not vote on elements smaller than
            \( \tau \) times the mean magnitude in their block; 1.6 bits up then.
        quorum: Elements with fewer net votes stay as they are.
        noise_std: Deviation of Gaussian noise on the update, in units of a vote, the
            same on all workers: nothing travels for it.
        **kwargs: Those of `CompressedOptimizer` from `transport` on.

    Raises:
        ValueError: If an argument is none of the choices.

    Example:
        ```python
        model.compile(tfgradcomp.SignSGD(keras.optimizers.SGD(1e-4)), "mse")
        ```

    References:
        Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation
        for Non-Convex Problems, 2018, Algorithms 1 and 3, Section 6.
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "aggregate",
        "tie",
        "abstain_below",
        "quorum",
        "noise_std",
        *CompressedOptimizer.common_arguments,
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        aggregate: str = "vote",
        tie: str = "zero",
        abstain_below: float = 0.0,
        quorum: int = 0,
        noise_std: float = 0.0,
        **kwargs: Any,
    ):
        sign = Sign(abstain_below)
        server = _server(sign, aggregate, tie, quorum)
        super().__init__(inner_optimizer, sign, server, **kwargs)
        self.aggregate = aggregate
        self.tie = tie
        self.abstain_below = abstain_below
        self.quorum = quorum
        self._add_noise(noise_std)


class Signum(_Signs):
    r"""signSGD on each worker's momentum: one bit an element, up and down.

    Worker: \( m \leftarrow \beta m + (1 - \beta) g \), sends \( \mathrm{sign}(m) \).
    Server and update are those of `SignSGD`.

    Args:
        inner_optimizer: A Keras optimizer without momentum, its name or its config.
        momentum: \( \beta \) in [0, 1).
        warmup_steps: Not the argument of `CompressedOptimizer`, but steps at the start
            that send \( \mathrm{sign}(g) \) while m accumulates: a number, or
            `"auto"` for the paper's \( C(\beta) \) (54 for 0.9).
        aggregate: As `SignSGD`.
        tie: As `SignSGD`.
        abstain_below: As `SignSGD`, of the momentum.
        quorum: As `SignSGD`.
        noise_std: As `SignSGD`.
        allow_inner_momentum: Whether the inner optimizer may have momentum of its own
            on top.
        **kwargs: Those of `CompressedOptimizer` from `transport` on.

    Raises:
        ValueError: If an argument is out of range, or the inner optimizer has
            momentum.

    Example:
        ```python
        model.compile(tfgradcomp.Signum(keras.optimizers.SGD(1e-4)), "mse")
        ```

    References:
        Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation
        for Non-Convex Problems, 2018, Algorithms 2 and 3, Appendix E.
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "momentum",
        "warmup_steps",
        "aggregate",
        "tie",
        "abstain_below",
        "quorum",
        "noise_std",
        "allow_inner_momentum",
        *CompressedOptimizer.common_arguments,
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        momentum: float = 0.9,
        warmup_steps: int | str = 0,
        aggregate: str = "vote",
        tie: str = "zero",
        abstain_below: float = 0.0,
        quorum: int = 0,
        noise_std: float = 0.0,
        allow_inner_momentum: bool = False,
        **kwargs: Any,
    ):
        sign = Sign(abstain_below)
        server = _server(sign, aggregate, tie, quorum)
        steps: Any = warmup_steps
        if warmup_steps == "auto":
            steps = warmup_steps_for(momentum)
        compressor = Momentum(sign, momentum, steps)
        super().__init__(inner_optimizer, compressor, server, **kwargs)
        if not allow_inner_momentum:
            refuse_inner_momentum(self)
        self.momentum = momentum
        self.warmup_steps = warmup_steps
        self.aggregate = aggregate
        self.tie = tie
        self.abstain_below = abstain_below
        self.quorum = quorum
        self._add_noise(noise_std)
        self.allow_inner_momentum = allow_inner_momentum


def _server(sign, aggregate, tie, quorum):
    check_choice("aggregate", aggregate, AGGREGATES)
    check_integer("quorum", quorum, 0)
    vote = MajorityVote(tie, quorum, sign)
    if aggregate == "mean" and quorum:
        raise ValueError(
            "A quorum is a rule of aggregate='vote'; the mean of signs has none. "
            f"Received: aggregate='mean', quorum={quorum}"
        )
    return vote if aggregate == "vote" else CodeSum(sign)
