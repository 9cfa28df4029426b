"""Shapes of the trainable variables of known models, in the order of their layers.

A convolution's kernel is `[height, width, inputs, outputs]`, and a dense layer's is
`[inputs, outputs]`. After each kernel comes its bias, or scale and offset.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Shapes = list[tuple[int, ...]]

# Widths of each inception: 1x1; 3x3, reduced and full; 5x5, reduced and full; and the
# convolution after the pooling.
_INCEPTIONS = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


def lenet() -> Shapes:
    """Returns LeNet for MNIST, the variant of Caffe: 431,080 parameters."""
    return _layers((5, 5, 1, 20), (5, 5, 20, 50), (4 * 4 * 50, 500), (500, 10))


def alexnet() -> Shapes:
    """Returns AlexNet as first published: 60,965,224 parameters.

    Three of its convolutions see one half of their input's channels. The variant in one
    tower, whose convolutions see all channels, has 62,378,344.
    """
    convolutions = [(11, 11, 3, 96), (5, 5, 48, 256), (3, 3, 256, 384)]
    convolutions += [(3, 3, 192, 384), (3, 3, 192, 256)]
    return _layers(*convolutions, (6 * 6 * 256, 4096), (4096, 4096), (4096, 1000))


def googlenet() -> Shapes:
    """Returns GoogLeNet without its two auxiliary heads: 6,998,552 parameters."""
    shapes = _layers((7, 7, 3, 64), (1, 1, 64, 64), (3, 3, 64, 192))
    inputs = 192
    for single, small_3, full_3, small_5, full_5, pooled in _INCEPTIONS:
        shapes += _layers((1, 1, inputs, single))
        shapes += _layers((1, 1, inputs, small_3), (3, 3, small_3, full_3))
        shapes += _layers((1, 1, inputs, small_5), (5, 5, small_5, full_5))
        shapes += _layers((1, 1, inputs, pooled))
        inputs = single + full_3 + full_5 + pooled
    return shapes + _layers((inputs, 1000))


def vgg_a() -> Shapes:
    """Returns VGG, configuration A with 11 layers: 132,863,336 parameters."""
    return _vgg(1, 1, 2, 2, 2)


def vgg_16() -> Shapes:
    """Returns VGG-16, configuration D: 138,357,544 parameters."""
    return _vgg(2, 2, 3, 3, 3)


def resnet_50() -> Shapes:
    """Returns ResNet-50: 25,557,032 parameters."""
    shapes = _normalized((7, 7, 3, 64))
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += _normalized((1, 1, inputs, width), (3, 3, width, width))
            shapes += _normalized((1, 1, width, 4 * width))
            if block == 0:
                shapes += _normalized((1, 1, inputs, 4 * width))
            inputs = 4 * width
    return shapes + _layers((2048, 1000))


def bert_base() -> Shapes:
    """Returns BERT-base, uncased, with its pooler: 109,482,240 parameters."""
    width, inner = 768, 3072
    norm: Shapes = [(width,), (width,)]
    block = _layers(*[(width, width)] * 4) + norm
    block += _layers((width, inner), (inner, width)) + norm
    embeddings: Shapes = [(30522, width), (512, width), (2, width)]
    return [*embeddings, *norm, *block * 12, *_layers((width, width))]


def _vgg(*blocks: int) -> Shapes:
    shapes, inputs = [], 3
    for count, width in zip(blocks, (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            shapes += _layers((3, 3, inputs, width))
            inputs = width
    return shapes + _layers((7 * 7 * 512, 4096), (4096, 4096), (4096, 1000))


def _layers(*kernels: tuple[int, ...]) -> Shapes:
    """Returns the shapes of kernels, each with its bias."""
    return [shape for kernel in kernels for shape in (kernel, kernel[-1:])]


def _normalized(*kernels: tuple[int, ...]) -> Shapes:
    """Returns the shapes of kernels, each with scale and offset of its outputs."""
    return [shape for k in kernels for shape in (k, k[-1:], k[-1:])]


MODELS = {
    "lenet": lenet,
    "alexnet": alexnet,
    "googlenet": googlenet,
    "vgg_a": vgg_a,
    "vgg16": vgg_16,
    "resnet50": resnet_50,
    "bert": bert_base,
}


def sizes(shapes: Iterable[Sequence[int]]) -> list[int]:
    """Returns the number of elements of each shape."""
    return [math.prod(shape) for shape in shapes]
