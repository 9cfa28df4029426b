"""A limit on how often something may happen."""

from __future__ import annotations


class RateLimit:
    """Allows `burst` events at once and `rate` events a second in the long run.

    Args:
        rate: Events a second.
        burst: Events at once.
    """

    def __init__(self, rate: float, burst: int):
        self._rate, self._burst = rate, burst
        self._left, self._since = float(burst), 0.0

    def allows(self, now: float) -> bool:
        """Counts an event and returns whether it is within the limit.

        Args:
            now: The time, in seconds.
        """
        refilled = self._left + (now - self._since) * self._rate
        self._left, self._since = min(self._burst, refilled), now
        if self._left < 1:
            return False
        self._left -= 1
        return True
