"""The public wrappers: a paper a file.

The wrappers of this folder's modules are found when it is imported, and registered with
Keras as `tfgradcomp>ClassName`, whatever file a class stands in.
"""

from typing import TYPE_CHECKING, Any

import keras

from tfgradcomp.core.registry import public_classes
from tfgradcomp.optimizers.wrapper import OptimizerWrapper

# What has no configuration of its own is a base class, such as `Quantizer`.
_CLASSES = {
    name: kind
    for name, kind in public_classes(__name__, OptimizerWrapper).items()
    if vars(kind).get("config_arguments")
}
for _class in _CLASSES.values():
    keras.saving.register_keras_serializable("tfgradcomp")(_class)
globals().update(_CLASSES)
if TYPE_CHECKING:
    # A type checker cannot know what is found.
    def __getattr__(name: str) -> Any: ...


__all__ = [*_CLASSES]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
