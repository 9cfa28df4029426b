"""Training by `model.fit` on several workers: loops, statistics, state of a run."""

from tfgradcomp.fit.enable import enable_multi_worker_fit

__all__ = ["enable_multi_worker_fit"]
