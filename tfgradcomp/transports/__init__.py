"""Where the server is, and how words get there."""

from __future__ import annotations

from tfgradcomp.compressors.base import Compressor, Layout
from tfgradcomp.servers.base import Server
from tfgradcomp.servers.mean import Mean
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce, can_carry
from tfgradcomp.transports.base import Transport, Words
from tfgradcomp.transports.collectives import Collectives
from tfgradcomp.transports.loopback import DirectExchange, Loopback

_BY_NAME = {"all_gather": AllGather, "all_reduce": AllReduce}
NAMES = ("auto", *_BY_NAME)


def choose(
    name: str,
    compressor: Compressor,
    server: Server,
    layout: Layout,
    collectives: Collectives,
) -> Transport:
    """Returns the transport of a name; `"auto"` takes the cheaper one that can do it.

    Raises:
        ValueError: If the transport cannot carry what the method sends.
    """
    can_reduce = can_carry(compressor.fields(layout)) and isinstance(server, Mean)
    if name == "auto":
        name = "all_reduce" if can_reduce else "all_gather"
    if name == "all_reduce" and not can_reduce:
        raise ValueError(
            "transport='all_reduce' adds up numbers for a server that takes their "
            "mean; use 'auto' or 'all_gather'. Received: "
            f"compressor={compressor}, server={server}"
        )
    return _BY_NAME[name](collectives)


__all__ = [
    "AllGather",
    "AllReduce",
    "Collectives",
    "DirectExchange",
    "Loopback",
    "Transport",
    "Words",
    "choose",
]
