"""The contracts of methods and transports, for the tests of their authors."""

from tfgradcomp.testing.battery import check_method, check_transport
from tfgradcomp.testing.errors import ContractError

__all__ = ["ContractError", "check_method", "check_transport"]
