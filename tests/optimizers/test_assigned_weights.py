"""Weights that a program assigns between two exchanges of local steps."""

import keras
import numpy as np
import pytest

import tfgradcomp
from tests import harness
from tests.cluster import strategy_and_rank
from tests.harness import Replicas
from tests.helpers import split
from tests.optimizers.test_local_steps import GROUPED, gradients_of, identity, start

SGD = keras.optimizers.SGD
X, Y = np.random.default_rng(0).normal(size=(2, 40, 4)).astype("float32")


def half():
    """Takes half of what has changed: a mean would not show the anchor."""
    return identity(0.5)


def assign_between(every, steps, assigned, stagger=False, outer=half):
    """The weights of this worker's replicas by steps; some are assigned in between.

    Args:
        every: H.
        steps: Number of steps.
        assigned: By steps, before which it is done: the variable, and its value by
            worker; None where a worker leaves it alone.
        stagger: The optimizer's argument.
        outer: Function that returns the outer optimizer.
    """
    replicas = Replicas(
        lambda: tfgradcomp.LocalSteps(SGD(0.125), outer(), every, stagger=stagger),
        split(start(GROUPED), GROUPED),
    )
    _, rank = strategy_and_rank()
    seen = []
    for step, gradients in enumerate(gradients_of(steps, replicas.number, GROUPED)):
        position, values = assigned.get(step, (0, {}))
        if values.get(rank) is not None:
            variable = replicas.variables[position]
            variable.assign(np.full(variable.shape, values[rank]))
        replicas.step(gradients)
        seen.append(replicas.weights())
    replicas.optimizer.synchronize()
    replicas.optimizer.verify()
    return np.stack([*seen, replicas.weights()])


def expected_between(workers, every, steps, assigned, stagger=False):
    """Returns what each worker should see where half the mean change is applied."""
    own, anchors = np.stack([start(GROUPED)] * workers)[np.newaxis].repeat(2, 0)
    ends = np.cumsum([0, *map(np.prod, GROUPED)])
    groups = [(0, 1), (1, 3), (3, 4)] if stagger else [(0, 4)]
    seen = []

    def exchange(first, last):
        part = slice(ends[first], ends[last])
        change = 0.5 * (anchors - own)[:, part].mean(0)
        own[:, part] = anchors[:, part] = anchors[0, part] - change

    for step, gradients in enumerate(gradients_of(steps, workers, GROUPED)):
        position, values = assigned.get(step, (0, {}))
        for rank, value in values.items():
            part = slice(ends[position], ends[position + 1])
            own[rank, part] = anchors[rank, part] = value
        own -= 0.125 * gradients
        for index, group in enumerate(groups):
            turn = (index + 1) * every // len(groups)
            if (step + 1 - turn) % every == 0:
                exchange(*group)
        seen.append(own.copy())
    for group in groups:
        exchange(*group)
    return np.stack([*seen, own])


@pytest.mark.sample(1)
@pytest.mark.parametrize("stagger", [False, True])
def test_an_assigned_weight_is_the_anchor(pools, stagger):
    # The last one stands before the end, which is an exchange as well.
    both = {3: (0, {0: 2.0, 1: 2.0}), 9: (3, {0: -1.5, 1: -1.5})}
    case = (6, 10, both, stagger)
    (found,), _ = pools(2, "virtual").run(assign_between, *case)
    np.testing.assert_array_equal(found, expected_between(2, *case))


ALONE = {
    "worker 0": {1: (0, {0: 2.0}), 5: (3, {0: 0.5})},
    "worker 1": {1: (0, {1: 2.0}), 5: (3, {1: 0.5})},
    "different values": {2: (0, {0: 1.0, 1: 3.0})},
}


def assign_alone(cases):
    """The weights of several cases; compares all other shared state of the last one."""

    def with_shared_state():
        inner = SGD(0.7, use_ema=True, ema_momentum=0.5)
        return tfgradcomp.DistEFBlockSGDM(inner, min_size=1, weight_decay=0.1)

    assign_between(3, 8, cases[-1], outer=with_shared_state)
    return [assign_between(3, 8, assigned) for assigned in cases]


@pytest.mark.slow
def test_all_workers_take_the_first_ones_assigned_weights(pools):
    answers = pools(2).run(assign_alone, [*ALONE.values()], timeout=120).answers
    for index, assigned in enumerate(ALONE.values()):
        found = np.concatenate([answer[index] for answer in answers], axis=1)
        expected = expected_between(2, 3, 8, assigned)
        np.testing.assert_array_equal(found, expected)


class Assign(keras.callbacks.Callback):
    """Assigns 1, 2, ... on some workers: in a step, or after the first epoch."""

    def __init__(self, ranks, batch=None):
        super().__init__()
        self.ranks, self.batch = ranks, batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self._assign()

    def on_epoch_end(self, epoch, logs=None):
        if self.batch is None and epoch == 0:
            self._assign()

    def _assign(self):
        if strategy_and_rank()[1] in self.ranks:
            weights = self.model.get_weights()
            self.model.set_weights([1.0 + 0 * weight for weight in weights])


FITS = {((0, 1), 1): 1.0, ((0,), None): 1.0, ((1,), None): None, ((1,), 1): None}


def fit_between():
    """The weights before and after trainings of rate 0, by the keys of `FITS`."""

    def make():
        outer = tfgradcomp.DistEFBlockSGDM(SGD(1.0), min_size=1)
        return tfgradcomp.LocalSteps(SGD(0.0), outer, every=4)

    found = {}
    for ranks, batch in FITS:
        model = harness.make_model(make, steps_per_execution=1 + (batch is None))
        callbacks = [Assign(ranks, batch)]
        before = np.concatenate([w.ravel() for w in model.get_weights()])
        x = np.ones((24, 8), "float32")
        model.fit(x, x[:, :2], batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
        after = np.concatenate([w.ravel() for w in model.get_weights()])
        found[ranks, batch] = before, after
    return found


@pytest.mark.slow
def test_fit_keeps_what_callbacks_of_worker_0_assign(pools):
    for found in pools(2).run(fit_between, timeout=120).answers:
        for case, value in FITS.items():
            before, after = found[case]
            expected = before if value is None else np.full(before.shape, value)
            np.testing.assert_array_equal(after, expected, err_msg=str(case))


class Subclassed(keras.Model):
    """A model whose files Keras reads in the order of its attributes' names."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(3)
        self.second = keras.layers.Dense(4)

    def call(self, x):
        return self.second(self.first(x))


def sequential():
    return keras.Sequential([keras.Input((4,)), *map(keras.layers.Dense, (3, 4))])


def compiled(make_model, rate, **arguments):
    keras.utils.set_random_seed(0)
    model = make_model()
    outer = tfgradcomp.DistEFBlockSGDM(SGD(1.0), min_size=1)
    model.compile(tfgradcomp.LocalSteps(SGD(rate), outer, 4), "mse", **arguments)
    # Keras reads the optimizer's state in front of the layers of `Subclassed`.
    model.another_name = model.optimizer
    return model


def fit(model, *callbacks):
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[*callbacks])


def set_by_layer(model, values, _):
    for layer in model.layers:
        layer.set_weights(values[:2])
        values = values[2:]


def load(model, values, path):
    other = sequential()
    other.set_weights(values)
    other.save_weights(path)
    model.load_weights(path)


def restore_the_best(model, values, _):
    """Lets `EarlyStopping` remember and restore."""
    stop = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    stop.set_model(model)
    model.set_weights(values)
    stop.on_train_begin()
    stop.on_epoch_end(0, {"loss": 1.0})
    model.set_weights([0 * value for value in values])
    model.stop_training = False
    stop.on_epoch_end(1, {"loss": 2.0})
    stop.on_train_end()
    model.stop_training = False


WAYS = {
    "set_weights": lambda model, values, _: model.set_weights(values),
    "layer.set_weights": set_by_layer,
    "load_weights": load,
    "EarlyStopping": restore_the_best,
}


# How weights are assigned does not depend on how steps run.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("way", "arguments"),
    [
        *((way, {}) for way in WAYS),
        ("load_weights", {"steps_per_execution": 2}),
        ("EarlyStopping", {"run_eagerly": True}),
    ],
    ids="".join,
)
def test_weights_that_a_callback_assigns_stay_what_they_are(way, arguments, tmp_path):
    model = compiled(sequential, 0.0, **arguments)
    values = [np.arange(1.0, 1 + w.size).reshape(w.shape) for w in model.get_weights()]

    def assign(batch, logs):
        if batch == 5:
            WAYS[way](model, [v.copy() for v in values], tmp_path / "x.weights.h5")

    fit(model, keras.callbacks.LambdaCallback(on_train_batch_end=assign))
    model.optimizer.synchronize()
    for found, expected in zip(model.get_weights(), values, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("make_model", [sequential, Subclassed])
def test_a_file_with_the_optimizer_assigns_nothing(make_model, tmp_path):
    path = tmp_path / "x.weights.h5"
    straight, resumed = (compiled(make_model, 0.1) for _ in range(2))
    fit(straight)
    # Two steps after an exchange.
    straight.save_weights(path)
    fit(resumed, keras.callbacks.TerminateOnNaN())
    fit(resumed)
    resumed.load_weights(path)
    for model in (straight, resumed):
        fit(model)
    pairs = zip(straight.get_weights(), resumed.get_weights(), strict=True)
    for expected, found in pairs:
        np.testing.assert_array_equal(found, expected)


def test_weights_within_a_step_are_progress():
    constraint = keras.constraints.MaxNorm(0.5)
    weight = keras.Variable(np.ones(4, "float32"))
    weight.constraint = constraint
    optimizer = tfgradcomp.LocalSteps(SGD(0.25), identity(0.5), every=2)
    optimizer.build([weight])
    for gradient in (1.0, 0.0):
        optimizer.apply([np.full(4, gradient, "float32")], [weight])
    # Half the way from 1 to 0.25, where the norm is a half.
    np.testing.assert_allclose(weight.numpy(), np.full(4, 0.625), rtol=1e-5)
