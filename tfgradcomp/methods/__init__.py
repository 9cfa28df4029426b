"""Methods as functions: a paper a file.

A function takes the paper's arguments and returns a `Method`: the worker's and the
server's half. A wrapper of a similar name makes an optimizer of it: `terngrad` becomes
`tfgradcomp.TernGrad`.
"""

from tfgradcomp.methods.chunked_top_k import chunked_top_k
from tfgradcomp.methods.dgc import dgc
from tfgradcomp.methods.dist_ef import (
    dist_ef_block_sgd,
    dist_ef_block_sgdm,
    dist_ef_sgd,
)
from tfgradcomp.methods.half_precision import half_precision
from tfgradcomp.methods.integers import int4, int8
from tfgradcomp.methods.method import Method
from tfgradcomp.methods.natural import natural_compression
from tfgradcomp.methods.one_bit_sgd import one_bit_sgd
from tfgradcomp.methods.orq import bingrad, orq
from tfgradcomp.methods.power_sgd import power_sgd
from tfgradcomp.methods.qsgd import linear_quantization, qsgd, scaled_sign
from tfgradcomp.methods.random_k import random_k
from tfgradcomp.methods.scalar_codebook import scalar_codebook
from tfgradcomp.methods.signsgd import signsgd, signum
from tfgradcomp.methods.strom import strom
from tfgradcomp.methods.terngrad import terngrad
from tfgradcomp.methods.variance_based import hybrid, variance_based

__all__ = [
    "Method",
    "bingrad",
    "chunked_top_k",
    "dgc",
    "dist_ef_block_sgd",
    "dist_ef_block_sgdm",
    "dist_ef_sgd",
    "half_precision",
    "hybrid",
    "int4",
    "int8",
    "linear_quantization",
    "natural_compression",
    "one_bit_sgd",
    "orq",
    "power_sgd",
    "qsgd",
    "random_k",
    "scalar_codebook",
    "scaled_sign",
    "signsgd",
    "signum",
    "strom",
    "terngrad",
    "variance_based",
]
