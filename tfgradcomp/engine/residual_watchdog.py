"""A warning where residuals have outgrown a fixed threshold."""

from __future__ import annotations

import numpy as np

from tfgradcomp.compressors.sparse_compressor import ThresholdSparsifier
from tfgradcomp.core.logging import logger
from tfgradcomp.engine.plan import Plan

# A residual of more thresholds takes more than this number of steps to send.
LIMIT = 16
# One in so many elements may exceed the limit: of the overdue ones, or of all.
ONE_IN, ONE_OF_ALL_IN = 10, 1000


class ResidualWatchdog:
    """Reads the residuals of this process, and warns once if a threshold is too low."""

    def __init__(self):
        self._has_warned = False

    def look(self, plan: Plan) -> None:
        """Warns once if residuals have outgrown a fixed threshold, in process 0."""
        if self._has_warned or plan.collectives.process_index > 0:
            return
        for bucket in plan.buckets:
            compressor = bucket.route.method.compressor
            if not isinstance(compressor, ThresholdSparsifier):
                continue
            if compressor.is_automatic:
                continue
            state = {name: v.local_values() for name, v in bucket.state.worker.items()}
            overdue = compressor.overdue_residuals(state)
            most = max(overdue.size / ONE_IN, state["residual"].size / ONE_OF_ALL_IN)
            if np.count_nonzero(overdue > LIMIT) <= most:
                continue
            self._has_warned = True
            logger.warning(
                "The residuals of %s have outgrown its threshold: more than one in %d "
                "of the overdue elements exceeds %d thresholds, and sends one sign for "
                "as many steps, even if later gradients change. Training with momentum "
                "can diverge. Expected: threshold='auto', or a larger threshold. "
                "Received: median of |r| / threshold=%.0f, %s",
                *(type(compressor).__name__, ONE_IN, LIMIT),
                *(np.median(overdue), compressor),
            )
            return
