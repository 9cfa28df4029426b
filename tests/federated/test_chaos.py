"""Nothing is counted twice and nothing is lost, whatever breaks."""

import numpy as np
import pytest

from tests.federated.harness import World
from tfgradcomp import methods
from tfgradcomp.compressors import ErrorFeedback, Identity, TopK
from tfgradcomp.federated.anchor import OuterStep
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean

NESTEROV = OuterStep(0.7, 0.9, nesterov=True)
NAMES = ["berlin", "lima", "oslo", "pune"]


def imbalance(world):
    """The greatest gap in the books, over the norm of what has moved."""
    _, arrays = world.hub.kept.to_files()
    rest = world.means - world.updates - arrays.get("server.residual", 0.0)
    at_hub = np.linalg.norm(rest) / np.linalg.norm(world.means)
    return max(at_hub, *(client.imbalance() for client in world.clients.values()))


def digests(world):
    clients = [client.logic.anchor.digest for client in world.clients.values()]
    return {world.hub.anchor.digest, *clients}


SPARSE = ErrorFeedback(TopK(0.2))
METHODS = {
    "one bit": methods.dist_ef_block_sgd(),
    "sparse": Method(SPARSE, Mean(SPARSE.compressor)),
    "float32": Method(Identity(), Mean()),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed", "arguments"),
    [
        ("one bit", 0, {}),
        ("one bit", 1, {"by_examples": True}),
        ("one bit", 2, {"outer": NESTEROV}),
        ("one bit", 3, {"replies_kept": 2}),
        ("sparse", 4, {"quorum": 2}),
        ("float32", 5, {}),
    ],
)
def test_books_balance_after_300_rounds_of_chaos(name, seed, arguments):
    world = World(METHODS[name], NAMES, seed, chaos=0.05, **arguments)
    world.run()
    assert world.hub.anchor.round == 300
    assert len(digests(world)) == 1
    assert imbalance(world) <= 1e-6
    if "outer" not in arguments:
        moved = world.first.weights - world.hub.anchor.weights
        np.testing.assert_allclose(moved, world.updates, rtol=1e-3, atol=1e-3)
