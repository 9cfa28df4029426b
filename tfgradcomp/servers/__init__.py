"""The server's half of each method.

The public classes of this folder's modules are found when it is imported.
"""

from typing import TYPE_CHECKING, Any

from tfgradcomp.core.registry import public_classes
from tfgradcomp.servers.base import Server
from tfgradcomp.servers.base import Shard as Shard
from tfgradcomp.servers.base import SumField as SumField

_CLASSES = public_classes(__name__, Server)
globals().update(_CLASSES)
__all__ = sorted([*_CLASSES, "Shard", "SumField"])

if TYPE_CHECKING:
    # A type checker cannot know what is found.
    def __getattr__(name: str) -> Any: ...
