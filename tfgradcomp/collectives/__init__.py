"""Collectives: TensorFlow's between replicas, or a loopback in one process."""

from tfgradcomp.collectives.base import Call, Collectives, SingleWorker, padded_size
from tfgradcomp.collectives.loopback import Loopback, LoopbackCollectives
from tfgradcomp.collectives.replicas import (
    Devices,
    Hosts,
    Replicas,
    across_hosts,
    devices_of,
    for_strategy,
)
from tfgradcomp.compat.strategy import assign_hosts

__all__ = [
    "Call",
    "Collectives",
    "Devices",
    "Hosts",
    "Loopback",
    "LoopbackCollectives",
    "Replicas",
    "SingleWorker",
    "across_hosts",
    "assign_hosts",
    "devices_of",
    "for_strategy",
    "padded_size",
]
