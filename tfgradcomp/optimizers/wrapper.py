"""A base class that wraps a Keras optimizer."""

from __future__ import annotations

import copy
import inspect
from typing import Any, ClassVar, TypeAlias

import keras
import tensorflow as tf

from tfgradcomp.collectives import across_hosts
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.engine.create_variables import create_variables
from tfgradcomp.engine.settings_check import check_same_settings

InnerOptimizer: TypeAlias = keras.optimizers.Optimizer | str | dict
"""A Keras optimizer, its name or its config."""

# Arguments and values that were renamed in version 0.2.
RENAMED = {"bucket_size": "block_size"}
_RENAMED_VALUES = {("aggregate", "sum"): "mean"}


class InnerAttribute:
    """An attribute of Keras' base class that belongs to the inner optimizer.

    If the wrapper's constructor has an argument of the same name, and it was given,
    reading returns that argument.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self
        own = vars(wrapper).get(self._name)
        return getattr(wrapper.inner_optimizer, self._name) if own is None else own

    def __set__(self, wrapper: Any, value: Any) -> None:
        # Keras' constructor sets its defaults before there is an inner optimizer.
        if "inner_optimizer" in vars(wrapper):
            setattr(wrapper.inner_optimizer, self._name, value)


class OptimizerWrapper(keras.optimizers.Optimizer):
    """An optimizer around an inner optimizer, whose attributes it forwards.

    The arguments of Keras' base class (`learning_rate`, `clipnorm`, `use_ema`, ...) are
    properties that read and set those of the inner optimizer. Any other attribute that
    only the inner optimizer has (`beta_1`, an attribute of a subclass) is read and set
    there as well, by `__getattr__` and `__setattr__`.

    The wrapper's own arguments are fixed when it is created: setting one raises.

    Attributes:
        inner_optimizer: The wrapped optimizer.
        argument_names: Names of the constructor's arguments, which are attributes and
            make up the configuration.
    """

    argument_names: ClassVar[tuple[str, ...]]
    built: bool

    weight_decay = InnerAttribute()
    clipnorm = InnerAttribute()
    clipvalue = InnerAttribute()
    global_clipnorm = InnerAttribute()
    use_ema = InnerAttribute()
    ema_momentum = InnerAttribute()
    ema_overwrite_frequency = InnerAttribute()
    loss_scale_factor = InnerAttribute()
    gradient_accumulation_steps = InnerAttribute()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "argument_names" not in vars(cls):
            parameters = inspect.signature(cls).parameters.values()
            cls.argument_names = tuple(
                one.name for one in parameters if one.kind is not one.VAR_KEYWORD
            )

    def __init__(
        self, inner_optimizer: InnerOptimizer, name: str | None = None, **kwargs: Any
    ):
        for old, new in RENAMED.items():
            if old in kwargs:
                raise ValueError(
                    f"`{old}` is called `{new}` since version 0.2. "
                    f"Received: {old}={kwargs[old]!r}"
                )
        if kwargs:
            raise ValueError(
                f"{type(self).__name__} does not take {sorted(kwargs)}: arguments of "
                "the update (learning_rate, clipnorm, use_ema, ...) belong to "
                f"`inner_optimizer`. Received: {kwargs}"
            )
        inner: keras.optimizers.Optimizer = keras.optimizers.get(inner_optimizer)
        refuse_wrappers(inner)
        compat.refuse_wrappers_in_multi_optimizer(
            "A compressed optimizer goes around all optimizers together, so that a "
            "step is skipped as a whole: TernGrad(MultiOptimizer(...))."
        )
        super().__init__(learning_rate=0.0, name=name or inner.name)
        compat.forget_variables(self)
        self.inner_optimizer = inner
        self._fixed_names: set[str] = set()

    def keep_arguments(self, **arguments: Any) -> None:
        """Keeps arguments of the constructor as attributes that nobody can set."""
        # Past the descriptors, which belong to the inner optimizer.
        self.__dict__.update(arguments)
        self._fixed_names.update(arguments)

    def __getattr__(self, name):
        """Returns an attribute that only the inner optimizer has."""
        inner = vars(self).get("inner_optimizer")
        if inner is None or name.startswith("__") or not hasattr(inner, name):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(inner, name)

    def __setattr__(self, name, value):
        """Sets an attribute here, or in the inner optimizer if only that has it."""
        own = vars(self)
        inner = own.get("inner_optimizer")
        is_inner = hasattr(inner, name)
        if name in own.get("_fixed_names", ()):
            # An argument that was not given leaves its name to the inner optimizer.
            if own[name] is not None or not is_inner:
                raise AttributeError(self._fixed_message(name, value, is_inner))
            setattr(inner, name, value)
        elif name.startswith("_") or name in own or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif is_inner:
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def _fixed_message(self, name, value, is_inner):
        owner = type(self).__name__
        other = f", or inner_optimizer.{name}, another argument" if is_inner else ""
        return (
            f"`{name}` of {owner} is fixed when the optimizer is created. Expected: a "
            f"new optimizer, {owner}(..., {name}={value!r}){other}. "
            f"Received: {name}={value!r}"
        )

    @property
    def learning_rate(self):
        """The inner optimizer's learning rate; settable."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate):
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self):
        """The inner optimizer's number of steps."""
        return self.inner_optimizer.iterations

    def scale_loss(self, loss):
        """Scales the loss as the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def update_step(self, gradient, variable, learning_rate):
        """Updates one variable as the inner optimizer does, without an exchange."""
        self.inner_optimizer.update_step(gradient, variable, learning_rate)

    def build(self, variables: Any) -> None:
        """Creates all state, once, wherever the first step is taken.

        Args:
            variables: The variables that the inner optimizer trains.
        """
        if not self.built:
            create_variables(self.inner_optimizer, self._build, variables)

    def _build(self, variables: list) -> None:
        """Creates all state, eagerly, and sets `built`."""
        raise NotImplementedError

    def check_settings(self, strategy: tf.distribute.Strategy) -> None:
        """Compares the settings of all workers, before the first other exchange.

        Raises:
            ValueError: On all workers, if they differ.
        """
        hosts = across_hosts(strategy)
        if hosts is not None:
            check_same_settings(hosts, self)

    def decide(self) -> bool:
        """Returns whether the method has just been chosen, so that steps changed."""
        return False

    def synchronize(self):
        """Makes weights equal on all workers, where they are not after each step."""

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        """Excludes variables from the weight decay, the wrapper's own included."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def set_weights(self, weights):
        """Sets all `variables`, those of the inner optimizer included.

        Raises:
            ValueError: If the optimizer is not built, or the weights are not those of
                such an optimizer.
        """
        if not self.built:
            raise ValueError(
                "You are calling `set_weights` before there are any; call "
                "`optimizer.build(model.trainable_variables)` first. "
                f"Received: optimizer={self.name}"
            )
        expected = [tuple(variable.shape) for variable in self.variables]
        shapes = [tuple(weight.shape) for weight in weights]
        if shapes != expected:
            raise ValueError(
                f"The weights of {self.name} have the shapes {expected}, in the order "
                f"of `optimizer.variables`. Received: shapes={shapes}"
            )
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def variables_of(self, gradients: list, variables: Any) -> list:
        """Returns the variables of a list of gradients: those given; if None, all.

        Raises:
            ValueError: If there are none yet, or not as many as gradients.
        """
        if variables is None and not self.built:
            raise ValueError(
                "The variables are not known before the optimizer is built. Expected: "
                "`apply(gradients, variables)`, or `optimizer.build(variables)` "
                "before. Received: trainable_variables=None"
            )
        if variables is None:
            variables = compat.trainable_variables(self)
        variables = list(variables)
        if len(gradients) != len(variables):
            raise ValueError(
                "Expected a gradient, or None, for each variable. Received: "
                f"{len(gradients)} gradients, {len(variables)} variables"
            )
        return variables

    def begin_step(self, gradients: Any, variables: Any) -> tuple[list, list]:
        """Returns the gradients and variables of a step; builds what is not built.

        Both lists are empty if there is no gradient.

        Raises:
            ValueError: If this is no replica's context, or there is not a gradient, or
                None, for each variable.
        """
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                f"{type(self).__name__}.apply() must be called in a replica context, "
                "inside `strategy.run`."
            )
        gradients = list(gradients)
        if not gradients:
            return [], []
        gradients, variables = _summed(
            gradients, self.variables_of(gradients, variables)
        )
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
        return gradients, variables

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        """Raises an error: workers cannot exchange gradients without variables.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "`stateless_apply` is not supported: residuals are kept in variables, and "
            "gradients are exchanged between workers. Expected: `apply(gradients, "
            "variables)` or `model.fit`, with the TensorFlow backend. "
            f"Received: optimizer={type(self).__name__}"
        )

    def config_value(self, name: str) -> Any:
        """Returns the value of a constructor's argument, as Keras can save it."""
        return vars(self).get(name)

    def get_config(self):
        """Returns the constructor's arguments, serialized by Keras."""
        return {
            name: keras.saving.serialize_keras_object(self.config_value(name))
            for name in self.argument_names
        }

    @classmethod
    def arguments_from(cls, config: dict, custom_objects: Any = None) -> dict[str, Any]:
        """Returns the constructor's arguments that `get_config` has described.

        Arguments and values of files that earlier versions wrote get their new names.
        Objects that are not serialized, such as a transport, stay as they are.
        """
        arguments = {}
        for name, value in config.items():
            if isinstance(value, (dict, list, tuple)):
                # Keras writes an inner optimizer's schedule into the dict it reads.
                saved = copy.deepcopy(value)
                value = keras.saving.deserialize_keras_object(saved, custom_objects)
            elif isinstance(value, str):
                value = _RENAMED_VALUES.get((name, value), value)
            arguments[RENAMED.get(name, name)] = value
        return arguments

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Returns the optimizer that `get_config` describes."""
        return cls(**cls.arguments_from(config, custom_objects))


def refuse_wrappers(inner: keras.optimizers.Optimizer) -> None:
    """Raises ValueError if the inner optimizer is itself a wrapper."""
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "LossScaleOptimizer belongs outside: LossScaleOptimizer(TernGrad(SGD())). "
            "With the policy 'mixed_float16', `model.compile` adds it by itself. "
            "Received: inner_optimizer=LossScaleOptimizer"
        )
    if hasattr(inner, "inner_optimizer"):
        raise ValueError(
            "A compressed optimizer cannot wrap another one: gradients are exchanged "
            f"once. Received: inner_optimizer={type(inner).__name__}"
        )


def _summed(gradients, variables):
    """Adds up the gradients of a variable that is there several times."""
    each = {id(variable): variable for variable in variables}
    if len(each) == len(variables):
        return gradients, variables
    given: dict[int, list] = {key: [] for key in each}
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None:
            given[id(variable)].append(tf.convert_to_tensor(gradient))
    totals = [tf.add_n(own) if own else None for own in given.values()]
    return totals, [*each.values()]
