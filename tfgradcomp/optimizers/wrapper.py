"""A base class that answers Keras' questions by an inner optimizer."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, TypeAlias

import keras

InnerOptimizer: TypeAlias = keras.optimizers.Optimizer | str | dict
"""A Keras optimizer, its name or its config."""


class OptimizerWrapper(keras.optimizers.Optimizer):
    """An optimizer that answers Keras' questions by its inner optimizer.

    `learning_rate`, `iterations` and the like are those of the inner optimizer.

    Attributes:
        inner_optimizer: The wrapped optimizer.
        config_arguments: Names of the constructor's arguments, besides
            `inner_optimizer`, that are attributes as well and make up the
            configuration.
    """

    config_arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, inner_optimizer: InnerOptimizer, name: str | None = None, **kwargs: Any
    ):
        if kwargs:
            raise ValueError(
                f"{type(self).__name__} does not take {sorted(kwargs)}: arguments of "
                "the update (learning_rate, clipnorm, use_ema, ...) belong to "
                f"`inner_optimizer`. Received: {kwargs}"
            )
        super().__init__(learning_rate=0.0, name=name)
        inner: keras.optimizers.Optimizer = keras.optimizers.get(inner_optimizer)
        refuse_wrappers(inner)
        self.inner_optimizer = inner

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

    @property
    def loss_scale_factor(self):
        """The inner optimizer's loss scale."""
        return self.inner_optimizer.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value):
        # Keras' constructor sets it before there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            self.inner_optimizer.loss_scale_factor = value

    def scale_loss(self, loss):
        """Scales the loss as the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        """Raises an error: workers cannot exchange gradients without variables.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{type(self).__name__} keeps residuals in variables and exchanges "
            "gradients between workers, which `stateless_apply` cannot. Expected: "
            "`apply(gradients, variables)` or `model.fit`, with the TensorFlow "
            "backend."
        )

    def config_value(self, name: str) -> Any:
        """Returns the value of an argument, as Keras can save it."""
        return getattr(self, name)

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


def refuse_inner_momentum(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError if the inner optimizer has momentum of its own."""
    inner = optimizer.inner_optimizer
    for name in ("momentum", "beta_1"):
        value = getattr(inner, name, 0)
        if value:
            raise ValueError(
                f"{type(optimizer).__name__} holds the momentum itself, on each "
                "worker; take an inner optimizer without, such as "
                "keras.optimizers.SGD(learning_rate), or say "
                "allow_inner_momentum=True. Received: inner_optimizer="
                f"{type(inner).__name__}({name}={value})"
            )
