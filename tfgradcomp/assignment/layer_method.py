"""The method of a wrapper without the wrapper, for some of a model's variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import keras

from tfgradcomp.methods import Method


class MethodSettings(NamedTuple):
    """A method, and the least size of the variables that travel by it.

    Attributes:
        method: The method.
        min_size: Variables with fewer elements are not compressed.
    """

    method: Method
    min_size: int


@keras.saving.register_keras_serializable("tfgradcomp")
class LayerMethod:
    """The method of a wrapper, for some of a model's variables.

    `for_layers` of a wrapper makes it, and `policy` of a wrapper takes it. Keras can
    save it.

    Args:
        wrapper: The wrapper's class.
        arguments: The wrapper's arguments that describe its method, and `min_size` if
            it has one of its own.

    Attributes:
        method: The method.
        min_size: The argument; None if it was not given.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If an argument is missing or unknown.
    """

    def __init__(self, wrapper: type, arguments: Mapping[str, Any]):
        self.wrapper, self.arguments = wrapper, dict(arguments)
        own = dict(arguments)
        self.min_size: int | None = own.pop("min_size", None)
        self.method: Method = wrapper.make_method(**own)  # type: ignore[attr-defined]

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
        # Until version 0.3 it was an argument of some methods.
        arguments.pop("allow_inner_momentum", None)
        return cls(wrapper, arguments)
