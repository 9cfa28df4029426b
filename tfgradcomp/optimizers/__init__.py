"""The public wrappers: a paper a file."""

import keras

from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.dist_ef import DistEFBlockSGD, DistEFBlockSGDM, DistEFSGD
from tfgradcomp.optimizers.half_precision import HalfPrecision
from tfgradcomp.optimizers.orq import ORQ, BinGrad
from tfgradcomp.optimizers.qsgd import QSGD, LinearQuantization, ScaledSign
from tfgradcomp.optimizers.signsgd import SignSGD, Signum
from tfgradcomp.optimizers.strom import Strom
from tfgradcomp.optimizers.terngrad import TernGrad
from tfgradcomp.optimizers.variance_based import Hybrid, VarianceBased

__all__ = [
    "ORQ",
    "QSGD",
    "BinGrad",
    "CompressedOptimizer",
    "DistEFBlockSGD",
    "DistEFBlockSGDM",
    "DistEFSGD",
    "HalfPrecision",
    "Hybrid",
    "LinearQuantization",
    "ScaledSign",
    "SignSGD",
    "Signum",
    "Strom",
    "TernGrad",
    "VarianceBased",
]

for _name in __all__:
    keras.saving.register_keras_serializable("tfgradcomp")(globals()[_name])
