"""The lists of shapes that benchmarks measure with: most are `tfgradcomp-plan`'s."""

from tfgradcomp.planning.shapes import MODELS, Shapes, resnet_50, sizes

__all__ = ["SMALL", "WORKLOADS", "Shapes", "resnet_50", "sizes"]


def vgg_32() -> Shapes:
    """Returns VGG, configuration A, for images of 32 pixels: 9,225,610 parameters."""
    shapes, inputs = [], 3
    for width in (64, 128, 256, 256, 512, 512, 512, 512):
        shapes += [(3, 3, inputs, width), (width,)]
        inputs = width
    return [*shapes, (512, 10), (10,)]


def transformer() -> Shapes:
    """Returns a language model of 4 blocks, 384 wide: 10,268,928 parameters.

    The table of its 8,000 tokens is also the last layer. It counts as dense, which its
    gradient therefore is.
    """
    width, inner = 384, 1536
    norm = [(width,), (width,)]
    block = [(width, 3 * width), (3 * width,), (width, width), (width,), *norm]
    block += [(width, inner), (inner,), (inner, width), (width,), *norm]
    return [(8000, width), (256, width), *block * 4, *norm]


WORKLOADS = {**MODELS, "vgg_32": vgg_32, "transformer": transformer}
# Models whose methods fit into memory side by side, for four workers of one machine.
SMALL = ("lenet", "googlenet", "vgg_32", "transformer", "resnet50")
