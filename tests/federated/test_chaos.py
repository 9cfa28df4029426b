"""Nothing is counted twice and nothing is lost, whatever breaks."""

import numpy as np
import pytest

from tests.federated.harness import World
from tfgradcomp import methods

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


@pytest.mark.parametrize("by_examples", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_books_balance_after_300_rounds_of_chaos(seed, by_examples):
    method = methods.dist_ef_block_sgd()
    world = World(method, NAMES, seed, chaos=0.05, by_examples=by_examples)
    world.run()
    assert world.hub.anchor.round == 300
    assert len(digests(world)) == 1
    assert imbalance(world) <= 1e-6
    moved = world.first.weights - world.hub.anchor.weights
    np.testing.assert_allclose(moved, world.updates, rtol=1e-3, atol=1e-3)
