"""1-bit Adam: Adam whose momentum travels, one bit an element, both ways."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import keras
import tensorflow as tf
from typing_extensions import override

from tfgradcomp import methods, ops
from tfgradcomp.compat.inner_optimizer import momenta
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.core.split_vector import SplitVector
from tfgradcomp.engine.step import Stepper
from tfgradcomp.engine.step_records import Gradients
from tfgradcomp.engine.uncompressed_steps import UncompressedSteps
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.frozen_variance import (
    frozen_variance,
    is_plain_adam,
    own_steps,
)
from tfgradcomp.optimizers.wrapper import InnerOptimizer

# A distance of 2 to this power is never reached.
_POWERS = 40


@dataclass(frozen=True)
class VarianceSteps(UncompressedSteps):
    """The warm-up, and steps in between whose distance doubles.

    Attributes:
        refresh: After the warm-up, the distance from one such step to the next is 1,
            and doubles after so many of them; None: there are none.
        variance_floor: In all other steps, the root of the variance is at least this
            part of its root mean square over the variable.
    """

    refresh: int | None = None
    variance_floor: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.refresh is not None:
            check_integer("refresh", self.refresh, 1)

    def refreshes(self) -> list[int]:
        """Returns the steps in between."""
        found, step = [], self.warmup_steps
        # Of each distance there are `refresh` steps.
        for power in range(_POWERS):
            for _ in range(self.refresh or 0):
                step += 1 << power
                found.append(step)
        return found

    def _tensor(self):
        steps = self.refreshes()
        return tf.constant(steps, tf.int64, [len(steps)])

    @override
    def include(self, step):
        is_refresh = tf.reduce_any(tf.equal(self._tensor(), step))
        return tf.logical_or(super().include(step), is_refresh)

    @override
    def count(self, step):
        refreshes = tf.reduce_sum(tf.cast(self._tensor() <= step, tf.int64))
        return super().count(step) + refreshes


class MomentumStepper(Stepper):
    """Exchanges the workers' momenta instead of their gradients, after the warm-up."""

    sends_momenta = True
    uncompressed_steps: VarianceSteps

    @override
    def context(self):
        # Residuals are in units of the momentum: learning rates do not enter.
        one = tf.constant(1.0)
        return super().context()._replace(learning_rate=one, previous_learning_rate=one)

    @override
    def take_compressed(self, gradients, variables):
        self.take_momenta(self.own_momenta(gradients), variables)

    def take_momenta(self, momenta: Gradients, variables: list) -> None:
        """Exchanges momenta and updates the variables by what comes back.

        Args:
            momenta: Those of this worker, over all variables.
            variables: Those that have had a gradient.
        """
        super().take_compressed(momenta, variables)

    def own_momenta(self, gradients: Gradients) -> Gradients:
        """Returns the momenta that this worker's gradients make of the shared ones."""
        beta = self.inner.beta_1
        factor = (1 - beta) * gradients.scale
        values = [
            None if g is None else _weighted_sum(beta, m, factor, g)
            for g, m in zip(gradients.values, momenta(self.inner), strict=True)
        ]
        return gradients._replace(values=values, scale=1.0)


def _weighted_sum(a: float, x: Any, b: float, y: tf.Tensor) -> tf.Tensor:
    """Returns a·x + b·y; of float32 tensors in one pass over memory."""
    x = tf.convert_to_tensor(x)
    y = tf.cast(y, x.dtype)
    if x.dtype != tf.float32:
        return a * x + b * y
    factor = tf.constant(b, tf.float32)
    total = ops.add_scaled(SplitVector([x], a), tf.reshape(y, [-1]), factor)
    return tf.reshape(total, x.shape)


class FrozenVarianceStepper(MomentumStepper):
    """Updates the variables by Adam with a frozen variance, in compressed steps."""

    @override
    def take_uncompressed(self, gradients, variables):
        with own_steps(self.inner, self.uncompressed_steps.count):
            super().take_uncompressed(gradients, variables)

    @override
    def take_compressed(self, gradients, variables):
        with self.frozen_variance():
            self.take_frozen(gradients, variables)

    def take_frozen(self, gradients: Gradients, variables: list) -> None:
        """Takes a step with the frozen variance.

        Args:
            gradients: This worker's gradients, over all variables.
            variables: The variables that have one.
        """
        super().take_compressed(gradients, variables)

    def frozen_variance(self) -> AbstractContextManager:
        """Returns a context in which updates leave v as it is."""
        steps = self.uncompressed_steps
        return frozen_variance(self.inner, steps.count, steps.variance_floor)


class OneBitAdam(CompressedOptimizer):
    r"""Adam with one bit an element, up and down, after a warm-up in float32.

    In the first `warmup_steps` steps the mean gradient travels as float32 and Adam
    takes its own steps. Then v is frozen, and the momentum travels, with error feedback
    on the workers and on the server:

    ```
    worker i:  p = β₁·m + (1 − β₁)·g + e      push Δ = C(p)       e ← p − Δ
    server:    p̃ = mean_i Δ_i + ẽ             reply m = C(p̃)      ẽ ← p̃ − m
    worker:    x ← x − η·m / (√v + ε)
    ```

    C is the scaled sign, with a scale a block. m on the right is that of the step
    before, which all workers share. Both moments keep the corrections of Keras' Adam:
    \( 1 - \beta_1^t \) goes on with the steps, and in \( 1 - \beta_2^k \) k is the
    number of gradients that are in v, so that the step is continuous where v is frozen.
    The paper has none; after a warm-up of some hundred steps the first is 1, and the
    second only scales the learning rate. Weight decay of AdamW, clipping and schedules
    are the inner optimizer's.

    The sign gives all elements of a block one magnitude, so those with a small v would
    take steps far beyond Adam's: a LeNet diverges by them. So \( \sqrt v \) is
    taken as at least `variance_floor` times its root mean square over the variable.

    Residuals are in units of m: learning rates do not enter, unlike with `DistEFSGD`.
    The gradients of embedding tables travel whole.

    Args:
        inner_optimizer: `keras.optimizers.Adam` or `AdamW`, without `amsgrad`.
        warmup_steps: Steps of plain Adam, 1 or more: until v has settled, some 15 to
            25 % of the training in the paper.
        refresh: None, or as in 0/1 Adam: v takes part again in steps after the warm-up
            whose distance doubles after so many of them (16 in the paper). Those steps
            travel as float32, while residuals wait.
        variance_floor: See above, in [0, 1]; 0 is the paper's.
        block_size: Elements a block. None: a block is a parameter tensor.
        **kwargs: Those of `CompressedOptimizer` from `transport` on, but `sparse`,
            `dense_every` and `policy`.

    Raises:
        ValueError: If an argument is out of range, or the inner optimizer is another or
            has trained.

    Example:
        ```python
        adam = keras.optimizers.Adam(1e-3)
        model.compile(tfgradcomp.OneBitAdam(adam, warmup_steps=500), "mse")
        ```

    References:
        Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with
        Adam's Convergence Speed, 2021, Algorithm 1; Lu et al., Maximizing
        Communication Efficiency for Large-scale Training via 0/1 Adam, 2022, Section 4.
    """

    stepper_class: ClassVar[type[MomentumStepper]] = FrozenVarianceStepper
    refused_arguments: ClassVar[tuple[str, ...]] = (
        "sparse",
        "dense_every",
        "policy",
        "allow_inner_momentum",
    )

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        warmup_steps: int,
        refresh: int | None = None,
        variance_floor: float = 0.1,
        block_size: int | None = None,
        **kwargs: Any,
    ):
        check_integer("warmup_steps", warmup_steps, 1)
        refused, given = self.refused_arguments, {"refresh": refresh, **kwargs}
        for argument in refused:
            if given.get(argument) is not None:
                raise ValueError(
                    f"{type(self).__name__} has one method for all layers, takes "
                    "tables whole, chooses its own uncompressed steps, and sends the "
                    f"inner optimizer's momenta. Expected: none of {refused}. "
                    f"Received: {argument}={given[argument]!r}"
                )
        if not 0 <= variance_floor <= 1:
            raise ValueError(
                "variance_floor is a part of the root mean square, in [0, 1]. "
                f"Received: variance_floor={variance_floor!r}"
            )
        super().__init__(
            inner_optimizer,
            replace(methods.dist_ef_block_sgd(block_size), name=type(self).__name__),
            warmup_steps=warmup_steps,
            sparse="dense",
            **kwargs,
        )
        self.check_moments(self.inner_optimizer)
        self.keep_arguments(refresh=refresh, variance_floor=variance_floor)
        self.uncompressed_steps = VarianceSteps(
            warmup_steps, refresh=refresh, variance_floor=variance_floor
        )

    @override
    def _build(self, variables):
        inner = self.inner_optimizer
        with tf.init_scope():
            steps = int(tf.convert_to_tensor(inner.iterations)) if inner.built else 0
        if steps or (inner.built and self.needs_new_inner):
            raise ValueError(
                f"{type(self).__name__} follows the moments from the first step on. "
                "Expected: an inner optimizer that is new, not one that has trained or "
                f"belongs to another wrapper. Received: inner_optimizer={inner.name}, "
                f"built=True, steps={steps}"
            )
        super()._build(variables)

    @override
    def settings_of_state(self):
        steps = cast(VarianceSteps, self.uncompressed_steps)
        # By them and the step k is found, the number of gradients in v.
        return {"variance_steps": [steps.warmup_steps, steps.refresh or 0]}

    @staticmethod
    def check_moments(inner: keras.optimizers.Optimizer) -> None:
        """Raises ValueError if the inner optimizer's step is another one."""
        if not is_plain_adam(inner):
            raise ValueError(
                "1-bit Adam is made of Adam's moments. Expected: keras.optimizers.Adam "
                "or AdamW, without amsgrad. Received: inner_optimizer="
                f"{type(inner).__name__}, amsgrad={getattr(inner, 'amsgrad', None)}"
            )

    @classmethod
    @override
    def for_layers(cls, **arguments):
        """Raises an error: the inner optimizer's step is another one, for all layers.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{cls.__name__} changes the inner optimizer's own step and is the method "
            "of all layers. Expected: another method in `policy`. "
            f"Received: {cls.__name__}.for_layers({arguments})"
        )
