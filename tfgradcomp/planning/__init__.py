"""Forecasts of a training on N workers: which method pays, on which network.

`plan` returns the forecasts of every method and transport; `tfgradcomp-plan` prints
them. Neither starts a cluster.
"""

from tfgradcomp import lazy

# Imported at their first use: the command line answers --help without TensorFlow.
_ORIGINS = {
    "GRPC": "tfgradcomp.planning.network",
    "MODELS": "tfgradcomp.planning.shapes",
    "NO_SOFTWARE": "tfgradcomp.planning.network",
    "Candidate": "tfgradcomp.planning.candidates",
    "Decision": "tfgradcomp.planning.decision",
    "Forecast": "tfgradcomp.planning.training_plan",
    "Handling": "tfgradcomp.planning.network",
    "Link": "tfgradcomp.planning.network",
    "Profile": "tfgradcomp.planning.forecasts",
    "Software": "tfgradcomp.planning.network",
    "TCP": "tfgradcomp.planning.network",
    "TrainingPlan": "tfgradcomp.planning.training_plan",
    "decide": "tfgradcomp.planning.decision",
    "measure_compute": "tfgradcomp.planning.measured",
    "plan": "tfgradcomp.planning.forecasts",
    "software_of": "tfgradcomp.planning.forecasts",
    "stand_ins": "tfgradcomp.planning.forecasts",
}

__all__ = [*_ORIGINS]

# `Plan` is the former name of `TrainingPlan`.
__getattr__ = lazy.attributes(
    __name__, {**_ORIGINS, "Plan": "tfgradcomp.planning.training_plan"}
)
