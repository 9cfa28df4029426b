"""The worker's half of each method: pure functions over flat float32 vectors.

The public classes of this folder's modules are found when it is imported.
"""

from typing import TYPE_CHECKING, Any

from tfgradcomp.compressors.base import Compressed as Compressed
from tfgradcomp.compressors.base import Compressor
from tfgradcomp.core import Component
from tfgradcomp.core.registry import public_classes

_CLASSES = public_classes(__name__, Component)
globals().update(_CLASSES)
# Its name before version 0.3.
Fitted = _CLASSES["OptimalScale"]

_BY_NAME = {
    kind.short_name: kind
    for kind in _CLASSES.values()
    if issubclass(kind, Compressor) and kind.short_name
}


def get(identifier: str | Compressor) -> Compressor:
    """Returns the compressor of a short name, with its defaults, or the given one.

    Raises:
        ValueError: If the name is unknown.
    """
    if isinstance(identifier, Compressor):
        return identifier
    if identifier in _BY_NAME:
        return _BY_NAME[identifier]()
    raise ValueError(
        f"compressor must be a Compressor or one of {sorted(_BY_NAME)}. "
        f"Received: compressor={identifier!r}"
    )


__all__ = sorted([*_CLASSES, "Compressed", "get"])

if TYPE_CHECKING:
    # A type checker cannot know what is found.
    def __getattr__(name: str) -> Any: ...
