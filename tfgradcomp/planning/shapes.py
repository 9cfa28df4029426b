"""Shapes of the trainable variables of known models, in the order of their layers.

A convolution's kernel is `[height, width, inputs, outputs]`, a dense layer's `[inputs,
outputs]`; normalisation has two vectors. What moves gradients needs no more of a model.
"""

from __future__ import annotations

import math

Shapes = list[tuple[int, ...]]

# Of each inception: widths of 1x1; of 3x3, reduced and full; of 5x5, reduced and full;
# and of the convolution after the pooling.
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
    """Returns LeNet as Caffe has it for MNIST: 431,080 parameters."""
    return [
        *_layer(5, 5, 1, 20),
        *_layer(5, 5, 20, 50),
        *_layer(4 * 4 * 50, 500),
        *_layer(500, 10),
    ]


def alexnet() -> Shapes:
    """Returns AlexNet as first published: 60,965,224 parameters.

    Three of its convolutions see one half of their input's channels. Where all of them
    see all channels, in one tower, there are 62,378,344.
    """
    return [
        *_layer(11, 11, 3, 96),
        *_layer(5, 5, 48, 256),
        *_layer(3, 3, 256, 384),
        *_layer(3, 3, 192, 384),
        *_layer(3, 3, 192, 256),
        *_layer(6 * 6 * 256, 4096),
        *_layer(4096, 4096),
        *_layer(4096, 1000),
    ]


def googlenet() -> Shapes:
    """Returns GoogLeNet without its two auxiliary heads: 6,998,552 parameters."""
    shapes = [*_layer(7, 7, 3, 64), *_layer(1, 1, 64, 64), *_layer(3, 3, 64, 192)]
    inputs = 192
    for one, small_3, full_3, small_5, full_5, pooled in _INCEPTIONS:
        shapes += _layer(1, 1, inputs, one)
        shapes += [*_layer(1, 1, inputs, small_3), *_layer(3, 3, small_3, full_3)]
        shapes += [*_layer(1, 1, inputs, small_5), *_layer(5, 5, small_5, full_5)]
        shapes += _layer(1, 1, inputs, pooled)
        inputs = one + full_3 + full_5 + pooled
    return [*shapes, *_layer(inputs, 1000)]


def vgg_a() -> Shapes:
    """Returns VGG, configuration A with 11 layers: 132,863,336 parameters."""
    return _vgg(1, 1, 2, 2, 2)


def vgg_16() -> Shapes:
    """Returns VGG-16, configuration D: 138,357,544 parameters."""
    return _vgg(2, 2, 3, 3, 3)


def resnet_50() -> Shapes:
    """Returns ResNet-50: 25,557,032 parameters."""
    shapes = _normalised(7, 7, 3, 64)
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += _normalised(1, 1, inputs, width)
            shapes += _normalised(3, 3, width, width)
            shapes += _normalised(1, 1, width, 4 * width)
            if block == 0:
                shapes += _normalised(1, 1, inputs, 4 * width)
            inputs = 4 * width
    return [*shapes, *_layer(2048, 1000)]


def bert_base() -> Shapes:
    """Returns BERT-base, uncased, with its pooler: 109,482,240 parameters."""
    width, inner = 768, 3072
    shapes = [(30522, width), (512, width), (2, width), (width,), (width,)]
    for _ in range(12):
        for _ in range(4):
            shapes += _layer(width, width)
        shapes += [(width,), (width,)]
        shapes += [*_layer(width, inner), *_layer(inner, width), (width,), (width,)]
    return [*shapes, *_layer(width, width)]


def _vgg(*layers: int) -> Shapes:
    shapes, inputs = [], 3
    for count, width in zip(layers, (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            shapes += _layer(3, 3, inputs, width)
            inputs = width
    return [
        *shapes,
        *_layer(7 * 7 * 512, 4096),
        *_layer(4096, 4096),
        *_layer(4096, 1000),
    ]


def _layer(*kernel: int) -> Shapes:
    return [kernel, kernel[-1:]]


def _normalised(*kernel: int) -> Shapes:
    return [kernel, kernel[-1:], kernel[-1:]]


MODELS = {
    "lenet": lenet,
    "alexnet": alexnet,
    "googlenet": googlenet,
    "vgg_a": vgg_a,
    "vgg16": vgg_16,
    "resnet50": resnet_50,
    "bert": bert_base,
}


def sizes(shapes: Shapes) -> list[int]:
    """Returns the number of elements of each shape."""
    return [math.prod(shape) for shape in shapes]
