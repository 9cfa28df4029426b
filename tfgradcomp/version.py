"""The version of the package, stated once."""

__version__ = "0.3.1.dev0"
