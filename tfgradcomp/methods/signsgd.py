"""signSGD and Signum, with majority vote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tfgradcomp.compressors import Momentum, Sign
from tfgradcomp.compressors.momentum import warmup_steps_for
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import CodeSum, MajorityVote


def signsgd(
    aggregate: str = "vote",
    tie: str = "zero",
    abstain_below: float = 0.0,
    quorum: int = 0,
    noise_std: float = 0.0,
) -> Method:
    r"""One bit an element, up and down.

    Worker: \( \mathrm{sign}(g) \). Server: \( \mathrm{sign}(\sum_i
    \mathrm{sign}(g^{(i)})) \). The inner optimizer gets \( \pm 1 \) for each element,
    whatever N is: with SGD, \( x \leftarrow x - \eta \cdot vote \), so take a much
    smaller learning rate than SGD's. Weight decay belongs to the inner optimizer
    (`weight_decay=`), never into the sign.

    What is not compressed moves by the sign of the mean gradient, or, with
    `aggregate="mean"`, by the mean of the signs.

    Args:
        aggregate: `"vote"`, or `"mean"`: the mean of the workers' signs, which moves an
            element less where workers disagree (with a learning rate \( \delta / N
            \) for the paper's \( \delta \)).
        tie: Where an even number of workers is split: `"zero"` (the element stays) or
            `"random"`, a shared pseudo-random sign.
        abstain_below: \( \tau \): a worker does not vote on elements smaller than
            \( \tau \) times the mean magnitude in their block; 1.6 bits up then.
        quorum: Elements with fewer net votes stay as they are.
        noise_std: Deviation of Gaussian noise on the update, in units of a vote, the
            same on all workers without communication.

    Raises:
        ValueError: If an argument is none of the choices.

    Example:
        ```python
        method = tfgradcomp.methods.signsgd()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(1e-4), method
        )
        ```

    References:
        Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation
        for Non-Convex Problems, 2018, Algorithms 1 and 3, Section 6.
    """
    sign = Sign(abstain_below)
    check_choice("aggregate", aggregate, ("vote", "mean"))
    check_integer("quorum", quorum, 0)
    if aggregate == "mean" and quorum:
        raise ValueError(
            "A quorum is a rule of aggregate='vote'; the mean of signs has none. "
            f"Received: aggregate='mean', quorum={quorum}"
        )
    vote = MajorityVote(tie, quorum, sign)
    server = vote if aggregate == "vote" else CodeSum(sign)
    return Method(sign, server, noise_std=noise_std, name="SignSGD")


def signum(
    momentum: float = 0.9,
    warmup_steps: int | str = 0,
    aggregate: str = "vote",
    tie: str = "zero",
    abstain_below: float = 0.0,
    quorum: int = 0,
    noise_std: float = 0.0,
) -> Method:
    r"""signSGD on each worker's momentum: one bit an element, up and down.

    Worker: \( m \leftarrow \beta m + (1 - \beta) g \), sends \( \mathrm{sign}(m) \).
    Server and update are those of `signsgd`.

    Args:
        momentum: \( \beta \) in [0, 1).
        warmup_steps: Not the argument of `CompressedOptimizer`, but steps at the start
            that send \( \mathrm{sign}(g) \) while m accumulates: a number, or
            `"auto"` for the paper's \( C(\beta) \) (54 for 0.9).
        aggregate: As for `signsgd`.
        tie: As for `signsgd`.
        abstain_below: As for `signsgd`, of the momentum.
        quorum: As for `signsgd`.
        noise_std: As for `signsgd`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.signum()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(1e-4), method
        )
        ```

    References:
        Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation
        for Non-Convex Problems, 2018, Algorithms 2 and 3, Appendix E.
    """
    signs = signsgd(aggregate, tie, abstain_below, quorum, noise_std)
    steps: Any = warmup_steps
    if warmup_steps == "auto":
        steps = warmup_steps_for(momentum)
    return replace(
        signs,
        compressor=Momentum(signs.compressor, momentum, steps),
        refuses_inner_momentum=True,
        name="Signum",
    )
