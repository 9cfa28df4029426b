"""Steps of the inner optimizer with gradients that this worker keeps for itself."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.core.split_vector import SplitVector
from tfgradcomp.engine import inner_step, update_rules
from tfgradcomp.engine.dense import multiplied
from tfgradcomp.engine.inner_step import FusedUpdate


def take_own_step(
    inner: keras.optimizers.Optimizer, gradients: list, variables: list, factor: int
) -> None:
    """Takes the optimizer's own step with gradients times a factor.

    Where it can, a native operation multiplies them and updates weights and momenta in
    one pass over memory, with the bits of Keras' operations.

    Args:
        inner: The optimizer.
        gradients: Tensors or `IndexedSlices` of this replica.
        variables: Their variables.
        factor: The number that gradients are multiplied by.
    """
    direct = fused(inner, gradients, variables, factor)
    if direct is None:
        gradients = multiplied(gradients, factor)
        return inner_step.apply_alone(inner, gradients, variables)
    taken = [compat.position(inner, v) in direct.positions for v in variables]
    # Keras would leave out a variable without a gradient.
    rest = [tf.zeros([]) if t else g for g, t in zip(gradients, taken, strict=True)]
    inner_step.update(inner, multiplied(rest, factor), variables, direct)


def fused(
    inner: keras.optimizers.Optimizer, gradients: list, variables: list, factor: int = 1
) -> FusedUpdate | None:
    """Returns the update of those variables whose step a native operation takes.

    Args:
        inner: The optimizer.
        gradients: As for `take_own_step`.
        variables: Their variables.
        factor: The number that gradients are multiplied by.

    Returns:
        The update; None if there are no such variables.
    """
    rule = update_rules.rule_of(inner)
    # Keras changes the gradients before the step.
    is_changed = inner.loss_scale_factor or inner.gradient_accumulation_steps
    if rule is None or is_changed or inner_step.clips(inner):
        return None
    pairs = [
        (gradient, variable)
        for gradient, variable in zip(gradients, variables, strict=True)
        if isinstance(gradient, tf.Tensor)
        and gradient.dtype.name == variable.dtype == "float32"
        and gradient.shape == variable.shape
    ]
    if not pairs or not ops.can_apply():
        return None
    taken, own = map(list, zip(*pairs, strict=True))

    def apply():
        (target,) = update_rules.targets(inner, rule, [(own, [0] * len(own))])
        ops.apply_vector(SplitVector(taken, factor), *target)

    return FusedUpdate({compat.position(inner, v) for v in own}, apply)
