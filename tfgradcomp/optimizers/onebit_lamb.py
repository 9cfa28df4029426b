"""1-bit LAMB: LAMB whose momentum travels, one bit an element, both ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.engine.consistency_check import path_of
from tfgradcomp.optimizers.frozen_variance import floored_root, replaced_update_step
from tfgradcomp.optimizers.onebit_adam import (
    MomentumStepper,
    OneBitAdam,
    VarianceSteps,
)
from tfgradcomp.optimizers.wrapper import InnerOptimizer

_Lamb = keras.optimizers.Lamb


@dataclass(frozen=True)
class ScalingSteps(VarianceSteps):
    """The warm-up, and the bounds of the layers' scalings.

    Attributes:
        coefficient_beta: Decay of the average of the coefficients, in [0, 1).
        coefficient_range: The least and the largest coefficient.
        factor_range: The least and the largest factor.
        factor_threshold: The largest relative change of a factor in a step.

    Raises:
        ValueError: If an argument is out of range.
    """

    coefficient_beta: float = 0.9
    coefficient_range: tuple[float, float] = (0.01, 10.0)
    factor_range: tuple[float, float] = (0.5, 4.0)
    factor_threshold: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        for name in ("coefficient_beta", "factor_threshold"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1). Received: {name}={value}")
        for name in ("coefficient_range", "factor_range"):
            least, largest = getattr(self, name)
            if not 0 < least <= largest:
                raise ValueError(
                    f"{name} must be a pair of positive numbers, the smaller one "
                    f"first. Received: {name}={(least, largest)}"
                )


class Slots(NamedTuple):
    """The variables of 1-bit LAMB, in the order of the weights.

    Attributes:
        fresh: The variances that are not frozen.
        averages: The moving averages of the scaling coefficients, scalars.
        factors: The factors of the last step, scalars.
    """

    fresh: list
    averages: list
    factors: list

    @classmethod
    def added_to(cls, lamb: keras.optimizers.Lamb) -> Slots:
        """Adds the variables to a built optimizer, whose variables Keras saves."""
        weights = compat.trainable_variables(lamb)

        def scalars(name, initializer):
            names = [f"{path_of(w).replace('/', '_')}_{name}" for w in weights]
            return [
                lamb.add_variable((), initializer, weight.dtype, name=name)
                for weight, name in zip(weights, names, strict=True)
            ]

        return cls(
            [lamb.add_variable_from_reference(w, "fresh_velocity") for w in weights],
            scalars("average", "zeros"),
            scalars("factor", "ones"),
        )


class ScalingStepper(MomentumStepper):
    """Takes Keras' LAMB steps in the warm-up, then steps with scaled layers.

    Attributes:
        slots: The variables of 1-bit LAMB.
    """

    slots: Slots
    uncompressed_steps: ScalingSteps

    @override
    def take_uncompressed(self, gradients, variables):
        with replaced_update_step(self.inner, self._warm_up_step):
            super().take_uncompressed(gradients, variables)

    @override
    def take_compressed(self, gradients, variables):
        with replaced_update_step(self.inner, self._compressed_step):
            super().take_compressed(gradients, variables)

    def _warm_up_step(self, gradient, variable, learning_rate):
        """Takes Keras' own step, and averages the coefficient that it has taken."""
        lamb, settings = self.inner, self.uncompressed_steps
        m, v, fresh, average, _ = self._slots_of(variable)
        weight_norm = _norm(variable)
        _Lamb.update_step(lamb, gradient, variable, learning_rate)
        m_rest, v_rest = self._bias_corrections(variable.dtype)
        update_norm = _norm((m / m_rest) / (tf.sqrt(v / v_rest) + lamb.epsilon))
        is_known = (weight_norm > 0) & (update_norm > 0)
        coefficient = tf.where(is_known, weight_norm / update_norm, 1.0)
        coefficient = tf.clip_by_value(coefficient, *settings.coefficient_range)
        change = (coefficient - average) * (1 - settings.coefficient_beta)
        lamb.assign_add(average, change)
        lamb.assign(fresh, v)

    def _compressed_step(self, momentum, variable, learning_rate):
        """Takes a step by the momentum of all workers; m is that of the step before."""
        lamb, settings = self.inner, self.uncompressed_steps
        m, v, fresh, average, last = self._slots_of(variable)
        momentum = tf.cast(momentum, variable.dtype)
        gradient = (momentum - lamb.beta_1 * m) / (1 - lamb.beta_1)
        lamb.assign(m, momentum)
        lamb.assign_add(fresh, (tf.square(gradient) - fresh) * (1 - lamb.beta_2))

        m_rest, v_rest = self._bias_corrections(variable.dtype)
        warmup_steps, allowed = settings.warmup_steps, settings.factor_threshold
        floor, frozen = settings.variance_floor, v / (1 - lamb.beta_2**warmup_steps)
        root = floored_root(frozen, floor) + lamb.epsilon
        fresh_root = floored_root(fresh / v_rest, floor) + lamb.epsilon
        factor = tf.reduce_max(root / fresh_root)
        factor = tf.clip_by_value(factor, *settings.factor_range)
        factor = tf.clip_by_value(factor, (1 - allowed) * last, (1 + allowed) * last)
        lamb.assign(last, factor)

        coefficient = average / (1 - settings.coefficient_beta**warmup_steps)
        rate = tf.cast(learning_rate, variable.dtype) * coefficient * factor
        lamb.assign_sub(variable, rate * (momentum / m_rest) / root)

    def _slots_of(self, variable):
        """Returns a variable's moments of LAMB, and its slots."""
        lamb = self.inner
        lists = (compat.momenta(lamb), compat.velocities(lamb), *self.slots)
        position = compat.position(lamb, variable)
        return [values[position] for values in lists]

    def _bias_corrections(self, dtype):
        """Returns the divisors of both moments in this step."""
        lamb = self.inner
        step = tf.cast(tf.convert_to_tensor(lamb.iterations) + 1, dtype)
        return 1 - lamb.beta_1**step, 1 - lamb.beta_2**step


class OneBitLAMB(OneBitAdam):
    r"""LAMB with one bit an element, up and down, after a warm-up in float32.

    In the first `warmup_steps` steps the mean gradient travels as float32, and the
    steps are those of Keras' LAMB, to the bit. They keep, for each layer (variable), an
    average \( \bar c \) of its scaling coefficient, bounded by `coefficient_range`:

    \( \bar c \leftarrow \beta_c \bar c + (1 - \beta_c)\, \|x\| / \|u\| \) with
    \( u = \hat m / (\sqrt{\hat v} + \epsilon) \)

    Then v and \( \bar c \) are frozen, and the momentum travels as in `OneBitAdam`, by
    the scaled sign with error feedback on the workers and on the server. From the
    momentum \( m_t \) that comes back, every worker estimates the mean gradient, and
    goes on with a fresh variance, which began as v:

    \( \hat g = (m_t - \beta_1 m_{t-1}) / (1 - \beta_1) \), and
    \( v' \leftarrow \beta_2 v' + (1 - \beta_2)\, \hat g^2 \)

    Where gradients shrink or grow, the layer's learning rate follows by a factor, the
    largest ratio of both denominators:

    \( r = \max\, (\sqrt{\hat v} + \epsilon) / (\sqrt{\hat v'} + \epsilon) \), and
    \( x \leftarrow x - \eta\, \bar c\, r\, \hat m / (\sqrt{\hat v} + \epsilon) \)

    r is bounded by `factor_range`, and differs from r of the step before, 1 at first,
    by no more than `factor_threshold` of it.

    Hats are Keras' corrections of averages that begin with zero. \( \hat v \) is
    divided by \( 1 - \beta_2^k \), where k is the number of steps of the warm-up;
    \( \bar c \) is corrected in the same way. As in `OneBitAdam`, both roots are at
    least `variance_floor` times their root mean square over the variable.

    Weight decay, clipping and schedules are the inner optimizer's. Keras decays weights
    apart from the update, so decay is not part of u, and is not scaled. The paper also
    scales the momenta before they are compressed, so that all layers can share a scale.
    Here each variable has a scale of its own.

    The fresh variance, \( \bar c \) and r are variables of the inner optimizer, and are
    saved with it.

    Args:
        inner_optimizer: `keras.optimizers.Lamb`.
        warmup_steps: Steps of plain LAMB, 1 or more: until v has settled, as with
            `OneBitAdam`.
        coefficient_beta: \( \beta_c \), in [0, 1).
        coefficient_range: The least and the largest scaling coefficient that counts.
        factor_range: The least and the largest r.
        factor_threshold: The largest relative change of r in a step, in [0, 1).
        variance_floor: See above, in [0, 1]; 0 is the paper's.
        block_size: Elements a block. None: a block is a parameter tensor.
        **kwargs: Those that `OneBitAdam` takes, but `refresh`.

    Raises:
        ValueError: If an argument is out of range, or the inner optimizer is another;
            at the first step, if the inner optimizer has trained before.

    Example:
        ```python
        lamb = keras.optimizers.Lamb(1e-2)
        model.compile(tfgradcomp.OneBitLAMB(lamb, warmup_steps=500), "mse")
        ```

    References:
        Li et al., 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training
        with LAMB's Convergence Speed, 2021, Algorithm 1.
    """

    stepper_class = ScalingStepper
    refused_arguments = (*OneBitAdam.refused_arguments, "refresh")
    needs_new_inner = True
    _stepper: ScalingStepper

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        warmup_steps: int,
        coefficient_beta: float = 0.9,
        coefficient_range: tuple[float, float] = (0.01, 10.0),
        factor_range: tuple[float, float] = (0.5, 4.0),
        factor_threshold: float = 0.1,
        variance_floor: float = 0.1,
        block_size: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            inner_optimizer,
            warmup_steps,
            variance_floor=variance_floor,
            block_size=block_size,
            **kwargs,
        )
        bounds: dict[str, Any] = {
            "coefficient_beta": coefficient_beta,
            "coefficient_range": tuple(coefficient_range),
            "factor_range": tuple(factor_range),
            "factor_threshold": factor_threshold,
        }
        self.keep_arguments(**bounds)
        self.uncompressed_steps = ScalingSteps(
            warmup_steps, variance_floor=variance_floor, **bounds
        )

    @staticmethod
    @override
    def check_moments(inner):
        if (
            not isinstance(inner, _Lamb)
            or type(inner).update_step is not _Lamb.update_step
        ):
            raise ValueError(
                "1-bit LAMB is made of the moments and the coefficients of LAMB. "
                "Expected: keras.optimizers.Lamb, with Keras' own update_step. "
                f"Received: inner_optimizer={type(inner).__name__}"
            )

    @override
    def _bind(self, is_fallback=None):
        super()._bind(is_fallback)
        if "_slots" not in vars(self):
            self._slots = Slots.added_to(self.inner_optimizer)
        self._stepper.slots = self._slots


def _norm(values):
    return tf.sqrt(tf.reduce_sum(tf.square(values)))
