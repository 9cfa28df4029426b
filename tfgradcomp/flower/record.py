"""The record of a Flower message that holds messages of hub and clients."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ConfigRecord

from tfgradcomp.federated import codec

RECORD = "tfgradcomp"
"""Name of the record."""


def record_of(messages: Iterable[codec.Message], mark: int) -> ConfigRecord:
    """Returns a record.

    Args:
        messages: The messages, in order.
        mark: A number that names what is in the client's folder. The client sends it,
            and the hub returns it with its next message. So a client that has lost its
            folder, or whose last answer was lost, does not hear what was meant for
            another state.
    """
    return ConfigRecord({"messages": [*map(codec.encode, messages)], "mark": mark})
