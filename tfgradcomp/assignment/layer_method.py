"""The method of a wrapper without the wrapper, for some of a model's variables."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import keras

from tfgradcomp.compressors import OptimalScale
from tfgradcomp.compressors.base import Wrapper
from tfgradcomp.core import Method


class MethodSettings(NamedTuple):
    """A method, and what else a wrapper says of the variables that travel by it.

    Attributes:
        name: The wrapper's, for users.
        method: The method.
        block_size: What a block of it is, as `CompressedOptimizer` takes it.
        min_size: Variables with fewer elements are not compressed.
        microbatches: What its second moments are of, as `VarianceBased` takes it.
    """

    name: str
    method: Method
    block_size: int | str | None
    min_size: int
    microbatches: int | None = None

    @property
    def is_scaled(self) -> bool:
        """True if updates are as large as gradients; False for signs."""
        part = self.method.compressor
        # A fitted factor gives a scale to what has none.
        while isinstance(part, Wrapper) and not isinstance(part, OptimalScale):
            part = part.compressor
        return part.is_scaled

    @property
    def needs_second_moments(self) -> bool:
        """True if its compressor needs second moments."""
        return self.method.compressor.needs_second_moments


def settings_of(optimizer: Any) -> MethodSettings:
    """Returns what a `CompressedOptimizer` says of its variables."""
    name, method = type(optimizer).__name__, optimizer.method
    if "compressor" in type(optimizer).config_arguments:
        # The general one: its name says nothing.
        name = f"{type(method.compressor).__name__}, {type(method.server).__name__}"
    return MethodSettings(
        name,
        method,
        optimizer._method_block_size,
        optimizer.min_size,
        optimizer.microbatches,
    )


@keras.saving.register_keras_serializable("tfgradcomp")
class LayerMethod:
    """The method of a wrapper, to be used for some of a model's variables.

    `for_layers` of a wrapper makes it, and `policy` of a wrapper takes it. Keras can
    save it.

    Args:
        wrapper: The wrapper's class.
        arguments: The wrapper's arguments, without those of the whole optimizer.
    """

    def __init__(self, wrapper: type, arguments: Mapping[str, Any]):
        self.wrapper, self.arguments = wrapper, dict(arguments)

    def around(
        self, inner: keras.optimizers.Optimizer, min_size: int
    ) -> MethodSettings:
        """Returns the settings of such a wrapper around an inner optimizer.

        Args:
            inner: The inner optimizer.
            min_size: The wrapper's argument, unless it is among its own.

        Raises:
            ValueError: If an argument is out of range, or the method does not go with
                the inner optimizer.
        """
        arguments = {"min_size": min_size, **self.arguments}
        return settings_of(self.wrapper(inner, **arguments))

    def __repr__(self):
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.arguments.items())
        return f"{self.wrapper.__name__}.for_layers({arguments})"

    def get_config(self) -> dict:
        """Returns the arguments, serialized by Keras."""
        arguments = {
            name: keras.saving.serialize_keras_object(value)
            for name, value in self.arguments.items()
        }
        name = keras.saving.get_registered_name(self.wrapper)
        return {"wrapper": name, "arguments": arguments}

    @classmethod
    def from_config(cls, config: dict) -> LayerMethod:
        """Returns what `get_config` describes.

        Raises:
            ValueError: If Keras does not know the wrapper.
        """
        name = config["wrapper"]
        wrapper = keras.saving.get_registered_object(name)
        if wrapper is None:
            raise ValueError(
                "Keras does not know a wrapper of the policy. Import its module, or "
                f"hand it over in `custom_objects`. Received: wrapper={name!r}"
            )
        arguments = {
            name: keras.saving.deserialize_keras_object(value)
            for name, value in config["arguments"].items()
        }
        return cls(wrapper, arguments)


class ForLayers:
    """The part of a wrapper that lends its method to the policy of another one."""

    common_arguments: ClassVar[tuple[str, ...]]

    @classmethod
    def for_layers(cls, **arguments: Any) -> LayerMethod:
        """Returns the wrapper's method for some of a model's variables.

        Args:
            **arguments: Those of the wrapper that say what its method is, and
                `min_size`, which is that of the whole optimizer if it is left out. All
                others are of the whole optimizer, and so is the inner optimizer.

        Raises:
            ValueError: If an argument is one of the whole optimizer.
            TypeError: If one is missing or unknown.

        Example:
            ```python
            optimizer = tfgradcomp.TernGrad(
                keras.optimizers.SGD(0.1),
                policy=[("*/embeddings", tfgradcomp.Strom.for_layers(threshold=0.01))],
            )
            ```
        """
        signature = inspect.signature(cls)
        own = {
            name
            for name, one in signature.parameters.items()
            if one.kind is not inspect.Parameter.VAR_KEYWORD
        }
        of_all = {*cls.common_arguments, "inner_optimizer", "name"}
        if own >= {*cls.common_arguments}:
            # The general wrapper lists them; others hand them on.
            own -= of_all
        # Signum has a `warmup_steps` of its own.
        wrong = sorted((of_all - own | {"inner_optimizer", "name"}) & {*arguments})
        wrong = [name for name in wrong if name != "min_size"]
        if wrong:
            raise ValueError(
                f"{cls.__name__}.for_layers() takes the arguments of the method and "
                "`min_size`. The inner optimizer and the other arguments are those of "
                f"the wrapper whose `policy` it stands in. Received: {wrong}"
            )
        signature.bind(None, **arguments)
        return LayerMethod(cls, arguments)
