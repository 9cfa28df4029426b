"""Frozen dataclasses that Keras can save: the parts that methods are made of."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import keras
from typing_extensions import Self

State = Any
"""A nest (tuple, dict) of float32 tensors; `()` where there is none."""


@dataclass(frozen=True)
class Component:
    """A frozen dataclass that Keras can save: compressors, servers, local terms.

    Subclasses are registered with Keras as `package>ClassName`. The names of this
    package's classes are pinned by `registered_package`, so that a class may move to
    another file; those of users are registered under their module's package.

    Attributes:
        registered_package: Package under which Keras knows this package's classes.
        registered_name: Name in saved files, if it is not that of the class.
    """

    registered_package: ClassVar[str] = "tfgradcomp"
    registered_name: ClassVar[str | None] = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        package = cls.__module__.rpartition(".")[0] or cls.__module__
        if package.partition(".")[0] == "tfgradcomp":
            package = cls.registered_package
        name = vars(cls).get("registered_name")
        keras.saving.register_keras_serializable(package, name)(cls)

    def get_config(self) -> dict:
        """Returns the arguments, serialized by Keras."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: keras.saving.serialize_keras_object(v) for k, v in values.items()}

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Returns the component that `get_config` describes."""
        return cls(
            **{k: keras.saving.deserialize_keras_object(v) for k, v in config.items()}
        )
