"""Policies: the method of each variable, if an optimizer has several methods."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from tfgradcomp.assignment.compatibility import check_inner_optimizer, rescales
from tfgradcomp.assignment.layer_method import LayerMethod, MethodSettings
from tfgradcomp.assignment.rules import (
    excluded,
    matching_positions,
    named_rule,
    rules_of,
)
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compressors import Compressor
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.methods import Method

FLOAT32 = "float32"

# Number of paths that a warning lists.
_MOST_PATHS = 10
_FORMS = (
    "policy takes a list of pairs (rule, method), or a function from a variable to a "
    "method. A rule is what `exclude` takes: a pattern of variable paths, 'last', "
    "'norms_and_biases', 'layer:ClassName', a layer class or a function of a variable. "
    "A method is 'float32', one of tfgradcomp.methods, such as "
    "methods.terngrad(clip_factor=2.5), or tfgradcomp.TernGrad.for_layers(). "
)


class Assigned(NamedTuple):
    """The method of a variable.

    Attributes:
        settings: The method, with its `min_size`.
        reason: Reason why the variable is not compressed; None if it is compressed.
    """

    settings: MethodSettings
    reason: str | None


class Policy:
    """The methods of an optimizer besides the wrapper's method, by rules.

    Args:
        policy: The argument of `CompressedOptimizer`.
        inner: The inner optimizer.
        min_size: The wrapper's `min_size`, the default of the policy's methods.
        allow_inner_momentum: Argument of the wrapper.

    Attributes:
        methods: The known methods; for a function, the methods that it has returned.

    Raises:
        ValueError: If the policy has no known form, or a method does not go with the
            inner optimizer.
    """

    def __init__(
        self,
        policy: Any,
        inner: keras.optimizers.Optimizer,
        min_size: int,
        allow_inner_momentum: bool,
    ):
        self._inner, self._min_size = inner, min_size
        self._allow_inner_momentum = allow_inner_momentum
        self.methods: list[MethodSettings] = []
        self._function = policy if callable(policy) else None
        self._rules: list[tuple[Any, Any]] = []
        if self._function is None:
            if not isinstance(policy, (list, tuple)):
                raise ValueError(f"{_FORMS}Received: policy={policy!r}")
            self._rules = [self._checked_pair(pair) for pair in policy]

    def _checked_pair(self, pair):
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not is_pair or not rules_of(pair[0], "policy"):
            raise ValueError(f"{_FORMS}Received: policy=[..., {pair!r}, ...]")
        rule, entry = pair
        return rule, self._settings_of(entry)

    def _settings_of(self, entry):
        """Returns the settings of a method as the user wrote it; equal ones once."""
        if entry is None or entry == FLOAT32:
            return entry
        if isinstance(entry, Method):
            settings = MethodSettings(entry, self._min_size)
        elif isinstance(entry, LayerMethod):
            own = entry.min_size
            settings = MethodSettings(
                entry.method, self._min_size if own is None else own
            )
        else:
            raise ValueError(f"{_FORMS}Received: method={entry!r}")
        check_integer("min_size", settings.min_size, 0)
        if not self._allow_inner_momentum:
            check_inner_optimizer(settings.method, self._inner)
        for known in self.methods:
            if settings == known:
                return known
        self.methods.append(settings)
        return settings

    @property
    def microbatches(self) -> int | None:
        """Number of groups of examples whose gradients are squared, or None."""
        given = [
            m.method.microbatches for m in self.methods if m.method.needs_second_moments
        ]
        return given[0] if given else None

    def named(self, variables: Sequence) -> dict[int, tuple[Any, str]]:
        """Returns the methods that the rules give to variables, by their indices.

        Args:
            variables: The model's trainable variables, in order.

        Returns:
            The settings, or `"float32"`, and the rule as text. The first rule that
            names a variable decides.

        Raises:
            ValueError: If a function returns a method that it may not.
        """
        if self._function is not None:
            return self._named_by_function(self._function, variables)
        found: dict[int, tuple[Any, str]] = {}
        for rule, settings in self._rules:
            positions = matching_positions(rule, variables, "policy")
            if not positions:
                paths = [variable.path for variable in variables[:_MOST_PATHS]]
                warnings.warn(
                    "A rule of `policy` names no variable of the model. Expected: a "
                    f"pattern of variable paths, for example. The first are {paths}. "
                    f"Received: rule={named_rule(rule)}",
                    UserWarning,
                    stacklevel=2,
                )
            for position in positions:
                found.setdefault(position, (settings, f"policy={named_rule(rule)}"))
        return found

    def _named_by_function(self, function, variables):
        entries = [function(variable) for variable in variables]
        reason = f"policy={named_rule(function)}"
        found = {}
        for index, entry in enumerate(entries):
            settings = self._settings_of(entry)
            if settings is None:
                continue
            if settings != FLOAT32 and settings.method.needs_second_moments:
                raise ValueError(
                    "A method that needs second moments must be known before the "
                    "variables are. Expected: a list, policy=[(function, "
                    f"{entry!r})], with a function that is true of the variables. "
                    f"Received: {reason}"
                )
            found[index] = settings, reason
        return found

    def check(self, used: Sequence[MethodSettings]) -> None:
        """Checks that methods can share an inner optimizer and a step.

        Args:
            used: The methods that some variable travels by.

        Raises:
            ValueError: If they cannot.
        """
        inners = compat.members(self._inner)
        names = [one.method.name for one in used]
        scales = {one.method.is_scaled for one in used}
        if len(scales) > 1 and len(inners) == 1 and not rescales(self._inner):
            raise ValueError(
                "Signs move each weight by the learning rate itself, other methods by "
                "the learning rate times the gradient: no learning rate suits both. "
                "Expected: methods of one kind, an inner optimizer that rescales each "
                "element, such as Adam, or a MultiOptimizer with a learning rate for "
                f"each. Received: methods={names}, "
                f"inner_optimizer={type(self._inner).__name__}"
            )
        groups = {
            one.method.microbatches for one in used if one.method.needs_second_moments
        }
        if len(groups) > 1:
            raise ValueError(
                "Second moments are computed once a step, for all variables. Expected: "
                "one `microbatches` in all methods that need them. Received: "
                f"methods={names}, microbatches={sorted(groups, key=str)}"
            )


def moments_compressor(own: Method, policy: Policy | None) -> Compressor:
    """Returns a compressor that needs second moments, else the wrapper's own."""
    others = policy.methods if policy else []
    compressors = [own.compressor, *(one.method.compressor for one in others)]
    return max(compressors, key=lambda one: one.needs_second_moments)


def assign(
    variables: Sequence,
    own: MethodSettings,
    exclude: object,
    policy: Policy | None,
) -> list[Assigned]:
    """Returns the method of each variable.

    `exclude` comes first, then the first rule of the policy that names the variable.
    All other variables travel by the wrapper's method.

    Args:
        variables: The model's trainable variables, in order.
        own: The wrapper's method.
        exclude: The argument of `CompressedOptimizer`.
        policy: The policy, or None.

    Raises:
        ValueError: If a rule is of no known kind, or needs a model that cannot be
            found; if methods do not go together.
    """
    left_out = excluded(variables, exclude)
    named = policy.named(variables) if policy else {}
    assigned, used = [], []
    for index, variable in enumerate(variables):
        settings, rule = named.get(index, (None, ""))
        reason = left_out.get(index)
        if reason is None and settings == FLOAT32:
            reason = rule
        if reason is not None or settings is None:
            settings = own
        if reason is None and variable.shape.num_elements() < max(settings.min_size, 1):
            reason = f"smaller than min_size={settings.min_size}"
        assigned.append(Assigned(settings, reason))
        if settings not in used:
            used.append(settings)
    if policy:
        policy.check(used)
    return assigned
