"""The package's logger, `logging.getLogger("tfgradcomp")`."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("tfgradcomp")


class _UnlessConfigured(logging.StreamHandler):
    """Writes to stderr as long as the program has configured no logging."""

    def emit(self, record):
        if not logging.getLogger().handlers:
            # Looked up each time: a notebook or a test may have replaced it.
            self.setStream(sys.stderr)
            super().emit(record)


if not logger.handlers:
    _handler = _UnlessConfigured()
    _handler.setFormatter(logging.Formatter("tfgradcomp: %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
