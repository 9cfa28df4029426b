"""Plans of a training on N workers before it runs: which method pays, and from where.

`plan` returns the forecasts of every method and transport; `tfgradcomp-plan` prints
them. Nothing here starts a cluster.
"""

from tfgradcomp import lazy

# Imported at their first use: the command line answers --help without TensorFlow.
_ORIGINS = {
    "GRPC": "tfgradcomp.planning.network",
    "MODELS": "tfgradcomp.planning.shapes",
    "NO_SOFTWARE": "tfgradcomp.planning.network",
    "Forecast": "tfgradcomp.planning.forecasts",
    "Handling": "tfgradcomp.planning.network",
    "Link": "tfgradcomp.planning.network",
    "Plan": "tfgradcomp.planning.forecasts",
    "Profile": "tfgradcomp.planning.forecasts",
    "Software": "tfgradcomp.planning.network",
    "measure_compute": "tfgradcomp.planning.measured",
    "plan": "tfgradcomp.planning.forecasts",
    "software_of": "tfgradcomp.planning.forecasts",
}

__all__ = [*_ORIGINS]

__getattr__ = lazy.attributes(__name__, _ORIGINS)
