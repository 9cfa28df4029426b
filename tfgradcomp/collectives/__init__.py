"""Collectives: TensorFlow's between replicas, or a loopback in one process."""

from tfgradcomp.collectives.base import Call, Collectives, SingleWorker, padded_size
from tfgradcomp.collectives.loopback import Loopback, LoopbackCollectives
from tfgradcomp.collectives.multi_worker_fit import enable_multi_worker_fit
from tfgradcomp.collectives.replicas import (
    Hosts,
    Replicas,
    across_hosts,
    for_strategy,
)

__all__ = [
    "Call",
    "Collectives",
    "Hosts",
    "Loopback",
    "LoopbackCollectives",
    "Replicas",
    "SingleWorker",
    "across_hosts",
    "enable_multi_worker_fit",
    "for_strategy",
    "padded_size",
]
