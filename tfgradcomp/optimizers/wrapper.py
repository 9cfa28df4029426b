"""A base class that answers Keras' questions by an inner optimizer."""

from __future__ import annotations

import copy
import inspect
from typing import Any, ClassVar, TypeAlias

import keras
import tensorflow as tf

from tfgradcomp.compat import inner_optimizer as compat

InnerOptimizer: TypeAlias = keras.optimizers.Optimizer | str | dict
"""A Keras optimizer, its name or its config."""


class _WrapperType(type):
    def __call__(cls, *args, **kwargs):
        wrapper = super().__call__(*args, **kwargs)
        wrapper._answer_by_inner()
        return wrapper

    @property
    def __signature__(cls):
        # The constructor's: Python would show that of `__call__`.
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class OptimizerWrapper(keras.optimizers.Optimizer, metaclass=_WrapperType):
    """An optimizer that answers Keras' questions by its inner optimizer.

    What is not its own is the inner optimizer's, to read and to set: `learning_rate`,
    `iterations`, `clipnorm`, `use_ema`, `beta_1`, `momentum`, ... Its own are its
    methods and what its constructor sets. Where both take an argument, such as
    `weight_decay`, it is the wrapper's if it was given there, and cannot be changed;
    `inner_optimizer.weight_decay` is the other one.

    Attributes:
        inner_optimizer: The wrapped optimizer.
        config_arguments: Names of the constructor's arguments, besides
            `inner_optimizer`, that are attributes as well and make up the
            configuration.
    """

    config_arguments: ClassVar[tuple[str, ...]] = ()
    built: bool
    _is_constructed = False

    def __init__(
        self, inner_optimizer: InnerOptimizer, name: str | None = None, **kwargs: Any
    ):
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
        self._keras_arguments = compat.forget_arguments(self)
        self.inner_optimizer = inner

    def _answer_by_inner(self):
        for name in self._keras_arguments:
            if vars(self).get(name, ...) is None:
                super().__delattr__(name)
        self._is_constructed = True

    def __getattr__(self, name):
        # Python asks here for what the wrapper does not have.
        if self._is_constructed and not name.startswith("__"):
            return getattr(self.inner_optimizer, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")

    def __setattr__(self, name, value):
        is_of_both = (
            self._is_constructed
            and not name.startswith("_")
            and not hasattr(type(self), name)
            and hasattr(self.inner_optimizer, name)
        )
        if is_of_both and name not in vars(self):
            setattr(self.inner_optimizer, name, value)
        elif is_of_both and name in self.config_arguments:
            raise AttributeError(
                f"{type(self).__name__} was given a `{name}` of its own, which cannot "
                f"be changed; that of the inner optimizer is inner_optimizer.{name}. "
                f"Received: {name}={value}"
            )
        else:
            super().__setattr__(name, value)

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
        variables = self.variables_of(gradients, variables)
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
        """Returns the value of an argument of its own, as Keras can save it."""
        is_own = name in vars(self) or hasattr(type(self), name)
        return getattr(self, name) if is_own else None

    def get_config(self):
        """Returns the constructor's arguments, serialized by Keras."""
        names = ("inner_optimizer", *self.config_arguments, "name")
        return {
            name: keras.saving.serialize_keras_object(self.config_value(name))
            for name in names
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Returns the optimizer that `get_config` describes."""
        # Keras writes an inner optimizer's schedule into the dict that it reads.
        config = copy.deepcopy(config)
        # Files that were written before version 0.2 call it so.
        if "bucket_size" in config:
            config["block_size"] = config.pop("bucket_size")
        return cls(
            **{
                name: keras.saving.deserialize_keras_object(value, custom_objects)
                for name, value in config.items()
            }
        )


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
