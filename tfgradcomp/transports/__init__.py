"""Where the server is, and how words get there."""

from __future__ import annotations

from tfgradcomp.compressors.base import Compressor, Layout
from tfgradcomp.servers.base import Server
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce, can_reduce
from tfgradcomp.transports.base import Transport, Words
from tfgradcomp.transports.collectives import Collectives
from tfgradcomp.transports.loopback import DirectExchange, Loopback
from tfgradcomp.transports.sharded import Sharded, can_shard

_BY_NAME = {"all_gather": AllGather, "all_reduce": AllReduce, "sharded": Sharded}
NAMES = ("auto", *_BY_NAME)


def candidates(
    compressor: Compressor, server: Server, layout: Layout, num_workers: int
) -> list[str]:
    """Returns the names of the transports that can carry what a method sends."""
    can = {
        "all_gather": True,
        "all_reduce": can_reduce(compressor, server, layout, num_workers),
        "sharded": can_shard(compressor, server, layout),
    }
    return [name for name in _BY_NAME if can[name]]


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
    possible = candidates(compressor, server, layout, collectives.num_workers)
    if name == "auto":
        name = "all_gather"
    if name not in possible:
        raise ValueError(
            f"transport={name!r} cannot carry what this method sends; use 'auto' or "
            f"one of {possible}. Received: compressor={compressor}, server={server}"
        )
    return _BY_NAME[name](collectives)


__all__ = [
    "AllGather",
    "AllReduce",
    "Collectives",
    "DirectExchange",
    "Loopback",
    "Sharded",
    "Transport",
    "Words",
    "candidates",
    "choose",
]
