"""Where the server is, and how words get there."""

from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce
from tfgradcomp.transports.base import Transport, Words
from tfgradcomp.transports.auto import NAMES, Costs, Line, candidates, carriers
from tfgradcomp.collectives.base import Collectives
from tfgradcomp.collectives.loopback import DirectExchange, Loopback
from tfgradcomp.parameter_server.transport import (
    Rendezvous,
    ParameterServer,
    ServerCollectives,
)
from tfgradcomp.parameter_server.push_log import Log, LogCollectives, PushPull
from tfgradcomp.transports.sharded import Sharded

__all__ = [
    "NAMES",
    "AllGather",
    "AllReduce",
    "Collectives",
    "Costs",
    "DirectExchange",
    "Line",
    "Log",
    "LogCollectives",
    "Loopback",
    "Rendezvous",
    "ParameterServer",
    "PushPull",
    "ServerCollectives",
    "Sharded",
    "Transport",
    "Words",
    "candidates",
    "carriers",
]
