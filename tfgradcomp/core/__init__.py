"""Types that every layer shares: fields, layouts, contexts, components."""

from tfgradcomp.core.component import Component, State
from tfgradcomp.core.context import Context
from tfgradcomp.core.field import Field, Fields
from tfgradcomp.core.layout import Layout, VaryingLayout
from tfgradcomp.core.split_vector import SplitVector, Vector

__all__ = [
    "Component",
    "Context",
    "Field",
    "Fields",
    "Layout",
    "SplitVector",
    "State",
    "VaryingLayout",
    "Vector",
]
