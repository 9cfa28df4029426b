"""Rules that name variables: those that are not compressed, and tables."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tfgradcomp.assignment import models

# Names of the tables of `keras.layers.Embedding`, with and without LoRA.
_TABLES = ("embeddings", "lora_embeddings_a")

NORMS_AND_BIASES = "norms_and_biases"
# Classes of normalization layers, in lower case: LayerNormalization, RMSNorm, Norm2d.
_NORM_CLASS = re.compile(r"norm(ali[sz]ation)?(v?\d+d?)?$")
# Names of what they train.
_OF_NORMS = ("gamma", "beta")


def excluded(variables: Sequence, exclude: object) -> dict[int, str]:
    """Returns the reasons why variables are excluded, by their indices.

    Args:
        variables: The model's trainable variables, in order.
        exclude: As `CompressedOptimizer` takes it.

    Raises:
        ValueError: If a rule is of no known kind, or needs a model that cannot be
            found.
    """
    reasons: dict[int, str] = {}
    for rule in rules_of(exclude):
        for index in _matches(rule, variables):
            reasons.setdefault(index, f"exclude={named_rule(rule)}")
    return reasons


def table_positions(variables: Sequence, sparse: object) -> list[int]:
    """Returns the indices of the variables whose gradients may travel as rows.

    Args:
        variables: The model's trainable variables, in order.
        sparse: As `CompressedOptimizer` takes it.
    """
    if sparse == "dense":
        return []
    if sparse == "rows":
        # By name: the layers of a model cannot always be found.
        return [i for i, variable in enumerate(variables) if variable.name in _TABLES]
    return matching_positions(sparse, variables, "sparse")


def matching_positions(
    rules: object, variables: Sequence, argument: str = "exclude"
) -> list[int]:
    """Returns the indices of the variables that rules name.

    Args:
        rules: Rules as `CompressedOptimizer` takes them for `exclude`.
        variables: The model's trainable variables, in order.
        argument: Name of the argument, for errors.

    Raises:
        ValueError: If a rule is of no known kind, or needs a model that cannot be
            found.
    """
    named: set[int] = set()
    for rule in rules_of(rules, argument):
        named |= _matches(rule, variables)
    return sorted(named)


def rules_of(exclude: object, argument: str = "exclude") -> list:
    """Returns the rules that an argument such as `exclude` stands for.

    Raises:
        ValueError: If a rule is of no known kind.
    """
    rules = exclude if isinstance(exclude, (list, tuple)) else [exclude]
    for rule in rules:
        if rule is not None and not isinstance(rule, str) and not callable(rule):
            raise ValueError(
                f"{argument} takes None, 'last', 'norms_and_biases', a pattern of "
                "variable paths, 'layer:ClassName', a layer class, a function of a "
                f"variable, or a list of these. Received: {argument}={rule!r}"
            )
    return [rule for rule in rules if rule is not None]


def _matches(rule: Any, variables: Sequence) -> set[int]:
    if rule == "last":
        return _last(variables)
    if rule == NORMS_AND_BIASES:
        return _norms_and_biases(variables)
    if isinstance(rule, str) and rule.startswith("layer:"):
        return _owned_by(rule.removeprefix("layer:"), variables)
    if isinstance(rule, str):
        return {
            index
            for index, variable in enumerate(variables)
            if fnmatch.fnmatchcase(variable.path, f"*{rule}*")
        }
    if isinstance(rule, type) and issubclass(rule, keras.layers.Layer):
        return _owned_by(rule.__name__, variables)
    return {index for index, variable in enumerate(variables) if rule(variable)}


def _last(variables: Sequence) -> set[int]:
    model = models.find_model(variables)
    layer = models.last_layer(model) if model is not None else None
    if layer is not None:
        return _indices(layer.trainable_variables, variables)
    # Without a model, the path in front of the variable's name identifies the layer.
    parents = [variable.path.rpartition("/")[0] for variable in variables]
    return {index for index, parent in enumerate(parents) if parent == parents[-1]}


def _norms_and_biases(variables: Sequence) -> set[int]:
    """Returns the variables of normalization layers, and biases, of any size."""
    model = models.find_model(variables)
    owners = models.owners_of(model) if model is not None else {}
    return {
        index
        for index, variable in enumerate(variables)
        if _is_bias(variable) or _is_of_norm(variable, owners.get(id(variable)))
    }


def _is_bias(variable: Any) -> bool:
    # Biases of attention and GRU layers are matrices.
    return variable.path.rpartition("/")[2].endswith("bias")


def _is_of_norm(variable: Any, owner: keras.layers.Layer | None) -> bool:
    if owner is not None:
        names = [cls.__name__.lower() for cls in type(owner).__mro__]
        return any(_NORM_CLASS.search(name) for name in names)
    # Without a model, the path decides. A matrix is no scale of a normalization,
    # whatever the name of its layer.
    parent, _, name = variable.path.rpartition("/")
    layer = parent.rpartition("/")[2].lower()
    return len(variable.shape) < 2 and (name in _OF_NORMS or "norm" in layer)


def _owned_by(class_name: str, variables: Sequence) -> set[int]:
    model = models.find_model(variables)
    if model is None:
        raise ValueError(
            "Excluding a layer class needs a Keras model that owns the variables, and "
            "none was found. Exclude by path instead. "
            f"Received: exclude='layer:{class_name}'"
        )
    indices: set[int] = set()
    for layer in models.layers_of(model):
        if class_name in (cls.__name__ for cls in type(layer).__mro__):
            indices |= _indices(layer.trainable_variables, variables)
    return indices


def named_rule(rule: Any) -> str:
    """Returns a rule as text, without the address of a function."""
    if callable(rule) and not isinstance(rule, type):
        return f"<function {getattr(rule, '__name__', type(rule).__name__)}>"
    return repr(named_rules(rule))


def _indices(some: Iterable, variables: Sequence) -> set[int]:
    wanted = {id(variable) for variable in some}
    return {index for index, v in enumerate(variables) if id(v) in wanted}


def named_rules(exclude):
    """Returns `exclude` with the names of layer classes, for Keras to save."""
    if isinstance(exclude, (list, tuple)):
        return [named_rules(rule) for rule in exclude]
    return f"layer:{exclude.__name__}" if isinstance(exclude, type) else exclude
