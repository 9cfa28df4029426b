"""A warning where what workers owe has outgrown a fixed threshold."""

from __future__ import annotations

import numpy as np

from tfgradcomp.compressors.sparse_compressor import ThresholdSparsifier
from tfgradcomp.core.logging import logger
from tfgradcomp.engine.plan import Plan

# Thresholds that an element may owe: with more, it is paid back over so many steps.
LIMIT = 16
# Elements that may owe more: one in so many of those that are due, or of all.
ONE_IN, ONE_OF_ALL_IN = 10, 1000


class ResidualWatchdog:
    """Looks at residuals between steps, and warns once where thresholds are too low.

    It reads this process' own residuals and changes nothing.
    """

    def __init__(self):
        self._has_warned = False

    def look(self, plan: Plan) -> None:
        """Warns, once, if what is owed has outgrown a fixed threshold.

        Args:
            plan: The optimizer's plan. Of several processes the first one warns.
        """
        if self._has_warned or plan.collectives.process_index > 0:
            return
        for bucket in plan.buckets:
            compressor = bucket.route.method.compressor
            # What is owed to an automatic threshold need not be read.
            if (
                not isinstance(compressor, ThresholdSparsifier)
                or compressor.is_automatic
            ):
                continue
            state = {name: v.local_values() for name, v in bucket.state.worker.items()}
            overdue_residuals = compressor.overdue_residuals(state)
            late = np.count_nonzero(overdue_residuals > LIMIT)
            most = max(
                overdue_residuals.size / ONE_IN, state["residual"].size / ONE_OF_ALL_IN
            )
            if late <= most:
                continue
            self._has_warned = True
            logger.warning(
                "What %s owes has outgrown its threshold: more than one in %d of the "
                "elements that are due owe over %d thresholds, and go on sending one "
                "sign for as many steps, however the weights move meanwhile. Under "
                "momentum that can end a training. Expected: threshold='auto', or a "
                "larger one. Received: median of |r| / threshold=%.0f, %s",
                *(
                    type(compressor).__name__,
                    ONE_IN,
                    LIMIT,
                    np.median(overdue_residuals),
                ),
                compressor,
            )
            return
