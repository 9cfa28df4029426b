"""The server's half of each method."""

from tfgradcomp.servers.base import Mean, Server, Shard, SumField
from tfgradcomp.servers.code_sum import CodeSum
from tfgradcomp.servers.majority_vote import MajorityVote
from tfgradcomp.servers.recompress import Recompress
from tfgradcomp.servers.requantize import Requantize
from tfgradcomp.servers.sign_of_mean import SignOfMean

__all__ = [
    "CodeSum",
    "MajorityVote",
    "Mean",
    "Recompress",
    "Requantize",
    "Server",
    "Shard",
    "SignOfMean",
    "SumField",
]
