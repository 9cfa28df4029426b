"""The worker's half of each method; pure functions over flat float32 vectors."""

from tfgradcomp.compressors.base import Compressor, Context, Field, Layout
from tfgradcomp.compressors.bingrad import BinGrad
from tfgradcomp.compressors.clip import Clip
from tfgradcomp.compressors.error_feedback import ErrorFeedback
from tfgradcomp.compressors.fused import fused
from tfgradcomp.compressors.hybrid import Hybrid
from tfgradcomp.compressors.identity import Identity
from tfgradcomp.compressors.level_table import LevelTable
from tfgradcomp.compressors.levels import EvenLevels
from tfgradcomp.compressors.linear import LinearQuantization
from tfgradcomp.compressors.momentum import Momentum, NesterovMomentum
from tfgradcomp.compressors.orq import ORQ
from tfgradcomp.compressors.qsgd import QSGD
from tfgradcomp.compressors.sign import ScaledSign, Sign
from tfgradcomp.compressors.sparse import TopK
from tfgradcomp.compressors.strom import Strom
from tfgradcomp.compressors.ternary import Ternary
from tfgradcomp.compressors.variance import VarianceBased

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
    "Compressor",
    "Context",
    "ErrorFeedback",
    "EvenLevels",
    "Field",
    "Hybrid",
    "Identity",
    "Layout",
    "LevelTable",
    "LinearQuantization",
    "Momentum",
    "NesterovMomentum",
    "ScaledSign",
    "Sign",
    "Strom",
    "Ternary",
    "TopK",
    "VarianceBased",
    "fused",
    "get",
]
