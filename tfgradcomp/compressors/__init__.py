"""The worker's half of each method; pure functions over flat float32 vectors."""

from tfgradcomp.compressors.base import Compressed, Compressor, Identity, Wrapper
from tfgradcomp.compressors.bingrad import BinGrad
from tfgradcomp.compressors.clip import Clip
from tfgradcomp.compressors.codebook import Codebook
from tfgradcomp.compressors.error_feedback import ErrorFeedback
from tfgradcomp.compressors.hybrid import Hybrid
from tfgradcomp.compressors.linear import LinearQuantization
from tfgradcomp.compressors.momentum import Momentum, NesterovMomentum
from tfgradcomp.compressors.orq import ORQ
from tfgradcomp.compressors.qsgd import QSGD
from tfgradcomp.compressors.sign import ScaledSign, Sign
from tfgradcomp.compressors.strom import Strom
from tfgradcomp.compressors.ternary import Ternary
from tfgradcomp.compressors.top_k import TopK
from tfgradcomp.compressors.uniform_levels import UniformLevels
from tfgradcomp.compressors.variance import VarianceBased
from tfgradcomp.compressors.weight_decay import WeightDecay

_BY_NAME = {
    "bingrad": BinGrad,
    "identity": Identity,
    "linear": LinearQuantization,
    "orq": ORQ,
    "qsgd": QSGD,
    "scaled_sign": ScaledSign,
    "ternary": Ternary,
    "top_k": TopK,
}


def get(identifier: str | Compressor) -> Compressor:
    """Returns a compressor by its name, with its defaults, or the one given.

    Raises:
        ValueError: If the name is unknown.
    """
    if isinstance(identifier, Compressor):
        return identifier
    if identifier in _BY_NAME:
        return _BY_NAME[identifier]()
    raise ValueError(
        f"compressor must be a Compressor or one of {sorted(_BY_NAME)}. "
        f"Received: compressor={identifier!r}"
    )


__all__ = [
    "ORQ",
    "QSGD",
    "BinGrad",
    "Clip",
    "Codebook",
    "Compressed",
    "Compressor",
    "ErrorFeedback",
    "Hybrid",
    "Identity",
    "LinearQuantization",
    "Momentum",
    "NesterovMomentum",
    "ScaledSign",
    "Sign",
    "Strom",
    "Ternary",
    "TopK",
    "UniformLevels",
    "VarianceBased",
    "WeightDecay",
    "Wrapper",
    "get",
]
