"""Where the server is, and how words get there."""

from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce
from tfgradcomp.transports.base import Transport, Words
from tfgradcomp.transports.choose import NAMES, Costs, Line, candidates, carriers
from tfgradcomp.transports.collectives import Collectives
from tfgradcomp.transports.loopback import DirectExchange, Loopback
from tfgradcomp.transports.parameter_server import (
    Meeting,
    ParameterServer,
    ServerCollectives,
)
from tfgradcomp.transports.push_pull import Log, LogCollectives, PushPull
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
    "Meeting",
    "ParameterServer",
    "PushPull",
    "ServerCollectives",
    "Sharded",
    "Transport",
    "Words",
    "candidates",
    "carriers",
]
