"""The lists of shapes against what is known of the models."""

import pytest

from tests.benchmarks.scripts import import_script

workloads = import_script("workloads")

# Layers with weights: convolutions, dense layers, tables of embeddings.
KNOWN = {
    "lenet": (431_080, 4),
    "alexnet": (60_965_224, 8),
    "googlenet": (6_998_552, 3 + 9 * 6 + 1),
    "vgg_a": (132_863_336, 11),
    "vgg16": (138_357_544, 16),
    "resnet50": (25_557_032, 54),
    "bert": (109_482_240, 3 + 12 * 6 + 1),
    "vgg_32": (9_225_610, 9),
    "transformer": (10_268_928, 2 + 4 * 4),
}


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_parameters_and_layers(name):
    parameters, layers = KNOWN[name]
    shapes = workloads.WORKLOADS[name]()
    assert sum(workloads.sizes(shapes)) == parameters
    assert sum(len(shape) > 1 for shape in shapes) == layers


def test_resnet_50_ends_in_a_thousand_classes():
    # Tensors: 53 kernels with scale and shift, one dense layer with bias.
    shapes = workloads.resnet_50()
    assert len(shapes) == 53 * 3 + 2
    assert shapes[0] == (7, 7, 3, 64)
    assert shapes[-2:] == [(2048, 1000), (1000,)]
    assert workloads.sizes([(2, 3), (4,), ()]) == [6, 4, 1]
