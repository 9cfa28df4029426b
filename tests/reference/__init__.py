"""The methods and the operations in NumPy; nothing here uses the package."""

from tests.reference.methods import *  # noqa: F403
from tests.reference.operations import *  # noqa: F403
