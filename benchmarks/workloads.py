"""The lists of shapes that benchmarks measure with: those of `tfgradcomp-plan`."""

from tfgradcomp.planning.shapes import MODELS as WORKLOADS
from tfgradcomp.planning.shapes import Shapes, resnet_50, sizes

__all__ = ["WORKLOADS", "Shapes", "resnet_50", "sizes"]
