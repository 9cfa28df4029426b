"""Every Keras optimizer around the identity on real workers, and alone."""

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.helpers import KERAS
from tfgradcomp.compressors import Identity
from tfgradcomp.servers import Mean

SHAPES = {"kernel": (5, 4), "bias": (4,)}
STEPS = 4
# Before this step comes another one, which a NaN on the last worker spoils.
SPOILED = 2
RULES = {
    "plain": {},
    "all": {
        "loss_scale_factor": 3.0,
        "gradient_accumulation_steps": 2,
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 2,
        "weight_decay": 0.1,
    },
}


class OwnUpdate(keras.optimizers.SGD):
    """Overrides what Keras asks to be overridden."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(keras.ops.sign(gradient), variable, learning_rate)


class OwnStep(keras.optimizers.Adam):
    """Does work of its own once a step, as Nadam does."""

    def build(self, variables):
        super().build(variables)
        self.factor = self.add_variable((), "ones", name="factor")

    def _backend_update_step(self, gradients, variables, learning_rate):
        self.assign(self.factor, self.factor * 0.5)
        super()._backend_update_step(gradients, variables, learning_rate * self.factor)


class Lookahead(keras.optimizers.SGD):
    """Centralizes gradients before Keras' `apply`, and averages weights after it."""

    def build(self, variables):
        super().build(variables)
        self.slow = self.add_optimizer_variables(variables, "slow")
        for slow, variable in zip(self.slow, variables, strict=True):
            slow.assign(variable)

    def apply(self, grads, trainable_variables=None):
        grads = [g - keras.ops.mean(g) for g in grads]
        super().apply(grads, trainable_variables)
        for slow, variable in zip(self.slow, trainable_variables, strict=True):
            slow.assign(0.75 * slow + 0.25 * variable)
            variable.assign(slow)


def two_optimizers(learning_rate):
    """Different optimizers for the variables of one model."""
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Nadam(learning_rate, clipnorm=1e3),
            {"bias": keras.optimizers.SGD(2 * learning_rate, momentum=0.5)},
        )
    )


OWN = {own.__name__: own for own in (OwnUpdate, OwnStep, Lookahead)}
if hasattr(keras.optimizers, "MultiOptimizer"):  # Not there before Keras 3.15.
    OWN["two_optimizers"] = two_optimizers


def names():
    """The names of all optimizers of Keras that update variables by themselves."""
    others = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
    if KERAS < (3, 13):
        # It fails under every strategy, also without a wrapper.
        others.add("Muon")
    return [
        name
        for name, value in sorted(vars(keras.optimizers).items())
        if isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
        and name not in others
    ]


def make(name, rule):
    cls = OWN.get(name) or getattr(keras.optimizers, name)
    return cls(learning_rate=0.05, **RULES[rule])


def gradients_of(num_workers):
    """Gradients by steps, workers and variables."""
    rng = np.random.default_rng(0)
    return [
        [
            [rng.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]
            for _ in range(num_workers)
        ]
        for _ in range(STEPS)
    ]


def variables():
    rng = np.random.default_rng(1)
    return [
        keras.Variable(rng.normal(size=shape).astype(np.float32), name=name)
        for name, shape in SHAPES.items()
    ]


def alone(name, rule, num_workers):
    """The weights of the optimizer alone on the mean gradients, without a strategy."""
    weights, optimizer = variables(), make(name, rule)
    optimizer.build(weights)
    scale = RULES[rule].get("loss_scale_factor", 1.0)
    for workers in gradients_of(num_workers):
        means = [np.mean(g, axis=0) * scale for g in zip(*workers, strict=True)]
        optimizer.apply_gradients(zip(map(tf.constant, means), weights, strict=True))
    return [weight.numpy() for weight in weights]


def wrapped(name, rule):
    """The weights on this worker, with the optimizer around the identity."""
    strategy, _ = strategy_and_rank()
    number = strategy.num_replicas_in_sync
    with strategy.scope():
        weights = variables()
        optimizer = tfgradcomp.CompressedOptimizer(
            make(name, rule),
            Identity(),
            Mean(Identity()),
            # Nothing is measured.
            transport="all_gather",
            min_size=0,
            nonfinite="skip",
        )
        optimizer.build(weights)
    scale = RULES[rule].get("loss_scale_factor", 1.0) / number

    @tf.function
    def step(gradients):
        strategy.run(
            lambda g: optimizer.apply_gradients(zip(g, weights, strict=True)),
            args=(gradients,),
        )

    steps = [(workers, scale) for workers in gradients_of(number)]
    if rule == "plain":
        steps.insert(SPOILED, (steps[0][0], np.nan))
    for workers, factor in steps:
        factors = [scale] * (number - 1) + [factor]

        def own(context, workers=workers, factors=factors):
            rank = context.replica_id_in_sync_group
            return [tf.constant(g * factors[rank], tf.float32) for g in workers[rank]]

        step(strategy.experimental_distribute_values_from_function(own))
    assert optimizer.skipped_steps == len(steps) - STEPS
    return [
        [local.numpy() for local in strategy.experimental_local_results(weight.value)]
        for weight in weights
    ]


def weights_of(cases):
    """Weights of each case, by variables and local replicas."""
    return [wrapped(*case) for case in cases]
