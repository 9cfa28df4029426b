"""Plans of a training on N workers before it runs: which method pays, and from where.

`plan` returns the forecasts of every method and transport; `tfgradcomp-plan` prints
them. Nothing here starts a cluster.
"""

import importlib
from typing import Any

# Imported at their first use: the command line answers --help without TensorFlow.
_ORIGINS = {
    "GRPC": "network",
    "MODELS": "shapes",
    "NO_SOFTWARE": "network",
    "Forecast": "forecasts",
    "Handling": "network",
    "Link": "network",
    "Plan": "forecasts",
    "Profile": "forecasts",
    "Software": "network",
    "measure_compute": "measured",
    "plan": "forecasts",
    "software_of": "forecasts",
}

__all__ = [*_ORIGINS]


def __getattr__(name: str) -> Any:
    if name not in _ORIGINS:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}. It has: {__all__}"
        )
    return getattr(importlib.import_module(f"{__name__}.{_ORIGINS[name]}"), name)
