"""Shapes of the trainable variables of known models, in the order of their layers.

A convolution's kernel is `[height, width, inputs, outputs]`, a dense layer's `[inputs,
outputs]`; normalisation has two vectors. What moves gradients needs no more of a model.
"""

from __future__ import annotations

import math

Shapes = list[tuple[int, ...]]


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

    Three of its convolutions see one half of their input's channels.
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


def vgg_16() -> Shapes:
    """Returns VGG-16, configuration D: 138,357,544 parameters."""
    shapes, inputs = [], 3
    for layers, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(layers):
            shapes += _layer(3, 3, inputs, width)
            inputs = width
    return [
        *shapes,
        *_layer(7 * 7 * 512, 4096),
        *_layer(4096, 4096),
        *_layer(4096, 1000),
    ]


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


def _layer(*kernel: int) -> Shapes:
    return [kernel, kernel[-1:]]


def _normalised(*kernel: int) -> Shapes:
    return [kernel, kernel[-1:], kernel[-1:]]


WORKLOADS = {
    "lenet": lenet,
    "alexnet": alexnet,
    "vgg16": vgg_16,
    "resnet50": resnet_50,
    "bert": bert_base,
}


def sizes(shapes: Shapes) -> list[int]:
    """Returns the number of elements of each shape."""
    return [math.prod(shape) for shape in shapes]
