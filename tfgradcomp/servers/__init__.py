"""The server's half of each method."""

from tfgradcomp.servers.base import Server
from tfgradcomp.servers.code_sum import CodeSum
from tfgradcomp.servers.fused import fused
from tfgradcomp.servers.majority_vote import MajorityVote
from tfgradcomp.servers.mean import Mean, SignOfMean
from tfgradcomp.servers.recompress import Recompress
from tfgradcomp.servers.requantize import Requantize

__all__ = [
    "CodeSum",
    "MajorityVote",
    "Mean",
    "Recompress",
    "Requantize",
    "Server",
    "SignOfMean",
    "fused",
]
