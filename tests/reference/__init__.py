"""The methods and the operations in NumPy; nothing here uses the package."""

from tests.reference.late import *  # noqa: F403
from tests.reference.methods import *  # noqa: F403
from tests.reference.operations import *  # noqa: F403
from tests.reference.trajectory import *  # noqa: F403
