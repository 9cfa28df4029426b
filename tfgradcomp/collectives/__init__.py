"""Collectives: of TensorFlow between replicas, or a loopback in one process."""

from tfgradcomp.collectives.base import (
    CollectiveCall,
    Collectives,
    SingleWorker,
    padded_size,
)
from tfgradcomp.collectives.loopback import Loopback, LoopbackCollectives
from tfgradcomp.collectives.processes import assign_hosts
from tfgradcomp.collectives.replicas import (
    Devices,
    Hosts,
    Replicas,
    across_hosts,
    devices_of,
    for_strategy,
)
from tfgradcomp.collectives.tcp import CARRIERS, TcpCollectives, over_carrier

__all__ = [
    "CARRIERS",
    "CollectiveCall",
    "Collectives",
    "Devices",
    "Hosts",
    "Loopback",
    "LoopbackCollectives",
    "Replicas",
    "SingleWorker",
    "TcpCollectives",
    "across_hosts",
    "assign_hosts",
    "devices_of",
    "for_strategy",
    "over_carrier",
    "padded_size",
]
