"""Transports: where the server runs, and how words reach it and come back."""

from tfgradcomp.collectives import Collectives, Loopback
from tfgradcomp.transports.all_gather import AllGather, SharedGather
from tfgradcomp.transports.all_reduce import AllReduce
from tfgradcomp.transports.auto import NAMES, Selection, select_transports
from tfgradcomp.transports.base import (
    ExchangeResult,
    PendingExchange,
    Route,
    Transport,
    Words,
)
from tfgradcomp.transports.costs import Costs, LinearCost
from tfgradcomp.transports.direct import DirectExchange
from tfgradcomp.transports.rows import Rows, RowsRoute
from tfgradcomp.transports.sharded import Sharded
from tfgradcomp.transports.traffic import Traffic

__all__ = [
    "NAMES",
    "AllGather",
    "AllReduce",
    "Collectives",
    "Costs",
    "DirectExchange",
    "ExchangeResult",
    "LinearCost",
    "Loopback",
    "PendingExchange",
    "Route",
    "Rows",
    "RowsRoute",
    "Selection",
    "Sharded",
    "SharedGather",
    "Traffic",
    "Transport",
    "Words",
    "select_transports",
]

# The names of 0.2, for programs that import them.
Flight, Line = PendingExchange, LinearCost
