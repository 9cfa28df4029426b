"""The public wrappers.

The wrappers of this folder's modules are found when it is imported, and registered with
Keras as `tfgradcomp>ClassName`, whatever file a class stands in.
"""

from typing import TYPE_CHECKING, Any

import keras

from tfgradcomp.compat.inner_optimizer import (
    create_without_exchange,
    show_through_loss_scale,
)
from tfgradcomp.core.registry import public_classes
from tfgradcomp.optimizers.wrapper import OptimizerWrapper

# `tfgradcomp.TernGrad(SGD(...))` comes here before it creates the inner optimizer.
create_without_exchange()
show_through_loss_scale(OptimizerWrapper)
_CLASSES = public_classes(__name__, OptimizerWrapper)
# Base classes of wrappers, which are no optimizers by themselves.
for _name in ("OptimizerWrapper", "ExchangeOptimizer", "MethodWrapper"):
    del _CLASSES[_name]
for _class in _CLASSES.values():
    keras.saving.register_keras_serializable("tfgradcomp")(_class)
globals().update(_CLASSES)
if TYPE_CHECKING:
    # A type checker cannot know what is found.
    def __getattr__(name: str) -> Any: ...


__all__ = [*_CLASSES]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
