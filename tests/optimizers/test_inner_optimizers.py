"""Every Keras optimizer around the identity moves as it does alone, on real workers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.harness import Replicas
from tests.helpers import KERAS, flat, make_variables
from tfgradcomp.compressors import Identity
from tfgradcomp.servers import Mean

SHAPES = [(5, 4), (4,)]
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
            {"weight_1": keras.optimizers.SGD(2 * learning_rate, momentum=0.5)},
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


# Those that do more in a step than Keras asks for, and one that does not.
UNUSUAL = ("Nadam", "Muon", "Lookahead", "SGD")
NAMES = (*OWN, *names())
CASES = {
    "multi_worker": [
        *[(name, "plain") for name in NAMES],
        *[(name, "all") for name in UNUSUAL if name in NAMES],
    ],
    # The replicas of one process take turns within a step.
    "mirrored": [
        (name, rule)
        for name, rule in (("Nadam", "all"), ("Muon", "plain"), ("Lookahead", "plain"))
        if name in NAMES
    ],
}


def gradients_of(rule):
    """Gradients of two workers, `[steps, 2, size]`, times the loss scale."""
    rng = np.random.default_rng(0)
    scale = RULES[rule].get("loss_scale_factor", 1.0)
    return scale * rng.normal(size=(STEPS, 2, 24)).astype(np.float32)


def alone(name, rule):
    """The weights of the optimizer alone on the mean gradients."""
    variables, optimizer = make_variables(SHAPES), make(name, rule)
    optimizer.build(variables)
    for gradients in gradients_of(rule).mean(1):
        parts = gradients[:20].reshape(5, 4), gradients[20:]
        optimizer.apply([tf.constant(part) for part in parts], variables)
    return flat([v.numpy() for v in variables])


def around_the_identity(cases):
    """The weights of this worker's replicas, by cases."""
    found = []
    for name, rule in cases:
        replicas = Replicas(
            lambda name=name, rule=rule: tfgradcomp.CompressedOptimizer(
                make(name, rule),
                Identity(),
                Mean(Identity()),
                # Nothing is measured.
                transport="all_gather",
                min_size=0,
                nonfinite="skip",
            ),
            [v.numpy() for v in make_variables(SHAPES)],
        )
        steps = list(gradients_of(rule))
        if rule == "plain":
            steps.insert(SPOILED, steps[0] * np.float32([[1], [np.nan]]))
        for gradients in steps:
            replicas.step(gradients)
        assert replicas.optimizer.skipped_steps == len(steps) - STEPS
        found.append(replicas.weights())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["multi_worker", "mirrored"])
def test_optimizers_move_as_alone_on_the_mean_gradient(pools, kind):
    cases = CASES[kind]
    workers = pools(2, kind).run(around_the_identity, cases).answers
    moved = set()
    for case, *found in zip(cases, *workers, strict=True):
        expected = alone(*case)
        first, second = np.concatenate(found)
        np.testing.assert_array_equal(first, second, err_msg=str(case))
        np.testing.assert_allclose(first, expected, 1e-5, 1e-6, err_msg=str(case))
        moved.add(float(expected.sum()))
    # A case that is another one in disguise would show nothing of its own.
    assert len(moved) == len(cases)
