"""Costs by which `transport="auto"` chooses in pools of workers, not measured ones.

A measurement takes a part of a second for each method, and its choice depends on what
else the machine does. Programs that the tests start by themselves, such as the
examples, do measure.
"""

import contextlib
from unittest import mock

from tfgradcomp.transports import Costs, LinearCost, auto, costs

# Seconds, and seconds a word, of a quick link: small buckets are gathered.
COLLECTIVE = LinearCost(1e-3, 1e-9)
SECONDS_PER_ELEMENT = 1e-9
_MEASURE, _OF_ELEMENTS = costs.measure, costs._seconds_per_element


def use() -> None:
    """Makes this process choose by the fixed costs from now on."""
    auto.measure = lambda collectives: Costs(*[COLLECTIVE] * 3)
    costs._seconds_per_element = lambda *given: SECONDS_PER_ELEMENT


@contextlib.contextmanager
def unused():
    """Chooses by measured costs as long as the context lasts."""
    with (
        mock.patch.object(auto, "measure", _MEASURE),
        mock.patch.object(costs, "_seconds_per_element", _OF_ELEMENTS),
    ):
        yield
