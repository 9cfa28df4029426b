"""The logic of a hub and of a client for a Keras model, whatever carries messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tfgradcomp.core.arguments import check_choice, check_instance
from tfgradcomp.federated.anchor import Anchor, OuterStep
from tfgradcomp.federated.bound_method import BoundMethod
from tfgradcomp.federated.client_logic import ClientLogic, Joined
from tfgradcomp.federated.description import (
    Description,
    describe_method,
    read_method,
)
from tfgradcomp.federated.hub_logic import HubLogic
from tfgradcomp.federated.rounds import Rules
from tfgradcomp.federated.store import Store
from tfgradcomp.federated.training_model import TrainingModel
from tfgradcomp.methods import Method
from tfgradcomp.version import __version__


def hub_logic(
    training: TrainingModel,
    method: Method,
    rules: Rules,
    outer: OuterStep | None,
    weights: str,
    seed: int,
    state: str | Path | None,
) -> tuple[HubLogic, Store | None]:
    """Returns the logic of a hub that begins with the model as it is, and its store.

    Args:
        training: The model.
        method: The method.
        rules: The rules of the training.
        outer: The step that moves the anchor; None is `OuterStep()`.
        weights: `"equal"` or `"examples"`.
        seed: Seed of random numbers.
        state: The hub's folder; None: nothing is kept.

    Raises:
        ValueError: If `weights` or the method is none that a hub takes, or if the
            folder belongs to another training.
    """
    check_instance("method", method, Method)
    check_choice("weights", weights, ("equal", "examples"))
    outer = OuterStep() if outer is None else outer
    bound = BoundMethod(method, training.shapes, weights == "examples", seed)
    store = None if state is None else Store(state)
    logic = HubLogic(
        bound,
        _description(training, method),
        Anchor.first(training.weights, training.statistics, outer),
        outer,
        rules,
        seed,
        store.load() if store else None,
    )
    return logic, store


def client_logic(
    training: TrainingModel,
    method: Method | None,
    name: str,
    saved: tuple[Mapping, Mapping[str, np.ndarray]] | None,
) -> ClientLogic:
    """Returns the logic of a client.

    Args:
        training: The model.
        method: The method; None: that of the hub.
        name: Name of the client.
        saved: The content of the client's folder.

    Raises:
        ValueError: If `saved` is that of another training.
    """

    def bind(joined: Joined) -> BoundMethod:
        own = method or read_method(joined.method)
        return BoundMethod(own, training.shapes, joined.by_examples, joined.seed)

    return ClientLogic(name, _description(training, method), bind, saved=saved)


def _description(training: TrainingModel, method: Method | None) -> Description:
    text = "" if method is None else describe_method(method)
    return Description(__version__, training.describe(), text)
