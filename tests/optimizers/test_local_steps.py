"""Local steps on real workers against NumPy, and against their sum."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests import reference
from tests.harness import Replicas
from tests.helpers import bits, split
from tfgradcomp.compressors import Identity
from tfgradcomp.optimizers import local_step_schedule
from tfgradcomp.servers import Mean
from tfgradcomp.transports import AllGather, Loopback

SGD = keras.optimizers.SGD
SHAPES = [(5, 4), (4,)]
# Three groups of a size, the second one of two variables.
GROUPED = [(3, 4), (4,), (2, 4), (12,)]


def identity(rate=1.0):
    """An outer optimizer that loses nothing."""
    parts = Identity(), Mean(Identity())
    return tfgradcomp.CompressedOptimizer(
        SGD(rate), *parts, transport="all_gather", min_size=0, nonfinite="skip"
    )


def dist_ef(rate=0.7):
    """An outer optimizer of one bit, with all of its state."""
    return tfgradcomp.DistEFBlockSGDM(SGD(rate), transport="all_gather", min_size=0)


INNER = {"sgd": lambda: SGD(0.125), "adam": lambda: keras.optimizers.Adam(0.05)}
OUTER = {"identity": identity, "dist_ef": dist_ef}


def size_of(shapes):
    return sum(int(np.prod(shape)) for shape in shapes)


def gradients_of(steps, workers, shapes=SHAPES):
    """Gradients `[steps, N, size]`; small integers, which add up exactly."""
    rng = np.random.default_rng([steps, workers])
    return rng.integers(-8, 9, (steps, workers, size_of(shapes))).astype("float32")


def start(shapes=SHAPES):
    return np.random.default_rng(1).integers(-8, 9, size_of(shapes)) / 8


def run(inner, outer, every, steps, spoiled=None, shapes=SHAPES, **options):
    """The weights of this worker's replicas by steps and after the end; counts.

    Args:
        inner: Key of `INNER`.
        outer: Key of `OUTER`.
        every: H.
        steps: Number of steps.
        spoiled: A step and a rank that has a NaN then.
        shapes: Those of the variables.
        options: Further arguments of the optimizer.
    """
    replicas = Replicas(
        lambda: tfgradcomp.LocalSteps(INNER[inner](), OUTER[outer](), every, **options),
        split(start(shapes), shapes),
    )
    gradients = gradients_of(steps, replicas.number, shapes)
    if spoiled:
        gradients[spoiled] = np.nan
    seen = []
    for step in gradients:
        replicas.step(step)
        seen.append(replicas.weights())
    optimizer = replicas.optimizer
    optimizer.synchronize()
    optimizer.verify()
    exchanges = int(optimizer.outer.iterations.numpy())
    counts = optimizer.skipped_steps, exchanges, optimizer.local_steps
    return np.stack([*seen, replicas.weights()]), *counts


def runs(cases):
    """Runs several cases in one call."""
    return [run(**case) for case in cases]


def run_on(pool, **case):
    """The weights of all replicas, `[steps + 1, N, size]`, and each worker's counts."""
    answers = [answer for (answer,) in pool.run(runs, [case]).answers]
    weights = np.concatenate([seen for seen, *_ in answers], axis=1)
    return weights, [counts for _, *counts in answers]


@pytest.mark.slow  # A cluster's minute; the means below are the same step.
def test_one_local_step_is_synchronous_training(pools):
    case = {"inner": "sgd", "outer": "identity", "every": 1, "steps": 3}
    weights, _ = run_on(pools(2), **case)
    g = gradients_of(3, 2).mean(1)
    for step in range(3):
        # Eighths and sixteenths: no bit is lost.
        expected = start() - 0.125 * g[: step + 1].sum(0)
        np.testing.assert_array_equal(weights[step], [expected] * 2)


@pytest.mark.parametrize(
    "kind", ["multi_worker", pytest.param("mirrored", marks=pytest.mark.slow)]
)
def test_workers_train_alone_and_then_take_the_mean(pools, kind):
    case = {"inner": "adam", "outer": "identity", "every": 4, "steps": 6}
    spoiled = {**case, "spoiled": (1, 1)}
    answers = pools(2, kind).run(runs, [case, spoiled]).answers
    for index, is_spoiled in enumerate((False, True)):
        found = np.concatenate([answer[index][0] for answer in answers], axis=1)
        alone = [INNER["adam"]() for _ in range(2)]
        own = [keras.Variable(start()) for _ in range(2)]

        def average(own=own):
            mean = (own[0].numpy() + own[1].numpy()) / 2
            for weights in own:
                weights.assign(mean)

        for step, gradients in enumerate(gradients_of(6, 2)):
            for rank in range(2):
                # The replicas of one process skip a step together.
                left_out = rank == 1 or kind == "mirrored"
                if not (is_spoiled and step == 1 and left_out):
                    alone[rank].apply([tf.constant(gradients[rank])], [own[rank]])
            if step == 3:
                average()
            np.testing.assert_allclose(found[step], np.stack(own), 1e-5, 1e-6)
        average()
        np.testing.assert_array_equal(*found[-1])
        np.testing.assert_allclose(found[-1], np.stack(own), 1e-5, 1e-6)
        counted = [list(answer[index][1:3]) for answer in answers]
        left_out = is_spoiled * np.array([kind == "mirrored", 1])[-len(counted) :]
        assert counted == [[int(skipped), 2] for skipped in left_out]


@pytest.mark.slow  # A cluster's minute; one group is seen above.
def test_groups_of_variables_take_turns(pools):
    case = {"inner": "sgd", "outer": "identity", "every": 6, "steps": 9}
    weights, _ = run_on(pools(2), stagger=True, shapes=GROUPED, **case)
    own = np.stack([start(GROUPED)] * 2)
    ends = np.cumsum([0, *map(np.prod, GROUPED)])
    turns = {2: (0, 1), 4: (1, 3), 6: (3, 4), 8: (0, 1)}
    for step, gradients in enumerate(gradients_of(9, 2, GROUPED)):
        own = own - 0.125 * gradients
        if step + 1 in turns:
            first, last = turns[step + 1]
            group = slice(ends[first], ends[last])
            own[:, group] = own[:, group].mean(0)
        np.testing.assert_array_equal(weights[step], own)
    np.testing.assert_array_equal(weights[-1], [own.mean(0)] * 2)


@pytest.mark.slow  # A cluster's minute; the rule is seen below.
def test_workers_measure_how_often_an_exchange_pays(pools):
    case = {"inner": "sgd", "outer": "dist_ef", "every": "auto", "steps": 12}
    weights, ((*_, every), (*_, other)) = run_on(pools(2), **case)
    assert every == other and 1 <= every <= 64
    # Eight exchanges are measured, after a first one that is traced.
    for step in [*range(9), -1]:
        np.testing.assert_array_equal(*weights[step])
    if every > 1:
        assert np.any(np.diff(weights[9], axis=0))


@pytest.mark.slow  # Tests of the method follow it on synchronous workers.
def test_compressed_differences_follow_their_formula(pools):
    every, steps, rate = 4, 12, 0.7
    case = {"inner": "sgd", "outer": "dist_ef", "every": every, "steps": steps}
    weights, _ = run_on(pools(3), **case)
    anchor = start()
    own = np.stack([anchor] * 3)
    splits = [0, 20, 24]
    outer = reference.Workers(dist_ef().method, 3, splits)
    for step, gradients in enumerate(gradients_of(steps, 3)):
        own = own - 0.125 * gradients
        if step % every == every - 1:
            anchor = anchor - rate * outer.update(step, anchor - own, anchor, rate)
            own = np.stack([anchor] * 3)
        np.testing.assert_allclose(weights[step], own, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(weights[-1], [weights[-1][0]] * 3)


@pytest.mark.parametrize(
    ("step", "exchange", "every"),
    [(0.1, 0.05, 5), (1.0, 0.05, 1), (0.1, 10.0, 64), (0.0, 0.0, 1)],
)
def test_exchange_takes_a_tenth_of_the_computing_time(step, exchange, every):
    slowest = np.array([step, -exchange], np.float32)
    assert local_step_schedule.steps_that_pay(slowest).numpy() == every


def test_groups_are_about_as_large_as_the_largest_variable():
    assert local_step_schedule.groups_of([12, 4, 8, 12], 6) == [[0], [1, 2], [3]]
    assert local_step_schedule.groups_of([12, 4, 8, 12], 2) == [[0, 2], [1, 3]]
    assert local_step_schedule.groups_of([100, 3, 4], 16) == [[0, 1, 2]]


def test_measured_interval_is_saved():
    def make(every):
        optimizer = tfgradcomp.LocalSteps("sgd", dist_ef(), every=every)
        optimizer.build([keras.Variable(np.zeros(320))])
        return optimizer

    measured, store = make("auto"), {}
    assert measured.local_steps is None
    for _ in range(12):
        measured.apply([np.ones(320)])
    measured.save_own_variables(store)
    restored, given = make("auto"), make(3)
    for optimizer in (restored, given):
        optimizer.load_own_variables(store)
    assert restored.local_steps == measured.local_steps >= 1
    assert given.local_steps == 3


def test_arguments_are_saved_and_traffic_is_a_mean():
    optimizer = tfgradcomp.LocalSteps(SGD(0.125), dist_ef(), every=4, warmup_steps=2)
    config = keras.optimizers.serialize(optimizer)
    again = keras.optimizers.deserialize(config)
    assert again.get_config() == optimizer.get_config()
    assert (again.every, again.warmup_steps) == (4, 2)
    assert isinstance(again.outer, tfgradcomp.DistEFBlockSGDM)
    transport = AllGather(Loopback(3).collectives(0))
    outer = tfgradcomp.DistEFBlockSGDM(
        SGD(), transport=transport, min_size=0, block_size=32
    )
    optimizer = tfgradcomp.LocalSteps("sgd", outer, every=4)
    optimizer.build([keras.Variable(np.zeros(320))])
    # 10 words of signs, 10 scales and a flag, to two others, a quarter a step.
    assert optimizer.traffic.words_sent == 2 * (10 + 10 + 1) / 4
    assert optimizer.traffic.elements_sent == 320 / 4
    lines = []
    optimizer.summary(print_fn=lines.append)
    assert "variable" in lines[2] and "DistEFBlockSGDM" in lines[2]
    assert "Bytes an exchange and worker: 168 sent, 168 received" in lines[-3]
    assert lines[-2:] == [
        "Mean bytes a step: 42 sent, 42 received",
        "An exchange every 4 steps",
    ]


def lamb():
    return tfgradcomp.OneBitLAMB(keras.optimizers.Lamb(), 2)


def averaged():
    outer = identity()
    outer.inner_optimizer.use_ema, outer.inner_optimizer.ema_momentum = True, 0.9
    return outer


@pytest.mark.parametrize(
    ("inner", "arguments", "message"),
    [
        ("sgd", {"every": 0}, "every"),
        ("sgd", {"warmup_steps": -1}, "warmup_steps"),
        ("sgd", {"outer": "sgd"}, "outer"),
        ("sgd", {"outer": tfgradcomp.VarianceBased("sgd")}, "no second moments"),
        (SGD(use_ema=True), {}, "use_ema"),
        (tfgradcomp.TernGrad("sgd"), {}, "exchanged once"),
        ("sgd", {"outer": tfgradcomp.ZeroOneAdam("adam", 2)}, "no local steps itself"),
        ("sgd", {"outer": lamb(), "stagger": True}, "in turns.*OneBitLAMB"),
        ("sgd", {"outer": averaged(), "stagger": True}, "in turns.*'use_ema': True"),
    ],
)
def test_bad_arguments_raise(inner, arguments, message):
    given = {"outer": dist_ef(), **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        tfgradcomp.LocalSteps(inner, **given)


def test_a_step_left_out_raises_as_fit_ends_though_the_epoch_ends_an_interval():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    outer = tfgradcomp.DistEFBlockSGD(keras.optimizers.SGD(1.0))
    model.compile(tfgradcomp.LocalSteps("sgd", outer, every=2), "mse")
    x = np.ones((4, 2), "float32")
    x[0] = np.nan
    with pytest.raises(FloatingPointError, match=r"left out by worker=\{0: 1\}"):
        model.fit(x, x[:, :1], batch_size=1, shuffle=False, verbose=0)
    # It is reported once.
    model.fit(x[1:], x[1:, :1], batch_size=1, verbose=0)


def test_averages_of_the_common_weights_become_the_weights_as_fit_ends():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    outer = averaged()
    model.compile(tfgradcomp.LocalSteps("sgd", outer, every=2), "mse")
    x = np.random.default_rng(0).normal(size=(12, 2)).astype("float32")
    model.fit(x, x[:, :1], batch_size=1, verbose=0)
    averages = outer.inner_optimizer._model_variables_moving_average
    expected = [bits(average.numpy()) for average in averages]
    for copies in (model.trainable_variables, model.optimizer._anchors):
        assert [bits(copy.numpy()) for copy in copies] == expected


def test_a_model_without_trainable_weights():
    assert local_step_schedule.groups_of([], 4) == [[]]


def test_groups_share_the_outer_optimizer_whose_steps_are_rounds():
    rates, every, steps = [1.0, 0.5, 0.25], 6, 16
    outer = identity()
    outer.inner_optimizer.momentum = 0.5
    optimizer = tfgradcomp.LocalSteps(SGD(0.125), outer, every, stagger=True)
    variables = [keras.Variable(v) for v in split(start(GROUPED), GROUPED)]
    optimizer.build(variables)
    step = tf.function(lambda *g: optimizer.apply(g, variables), autograph=False)
    weights, anchors, velocities = (
        split(values, GROUPED)
        for values in (start(GROUPED), start(GROUPED), 0 * start(GROUPED))
    )
    # The groups' turns: after 2, 4 and 6 steps, and every 6 steps from there.
    turns = {2: (0,), 4: (1, 2), 0: (3,)}
    for number in range(1, steps + 1):
        rate = outer.learning_rate = rates[(number - 1) // every]
        gradients = split(gradients_of(steps, 1, GROUPED)[number - 1, 0], GROUPED)
        step(*map(tf.constant, gradients))
        weights = [w - 0.125 * g for w, g in zip(weights, gradients, strict=True)]
        for i in turns.get(number % every, ()):
            velocities[i] = 0.5 * velocities[i] - rate * (anchors[i] - weights[i])
            weights[i] = anchors[i] = anchors[i] + velocities[i]
        for variable, expected in zip(variables, weights, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, 1e-6, 1e-6)
    assert int(outer.iterations) == steps // every


@pytest.mark.parametrize("rule", ["last", "layer:Dense", lambda v: "dense" in v.path])
def test_rules_of_groups_see_the_whole_model(rule):
    widths = {"dense": 8, "dense_1": 9}
    layers = [keras.layers.EinsumDense("bi,ij->bj", (9,), bias_axes="j", name="first")]
    layers += [keras.layers.Dense(width, name=name) for name, width in widths.items()]
    model = keras.Sequential([keras.Input((8,)), *layers])
    arguments = {"exclude": rule, "min_size": 1, "policy": [("first", "float32")]}
    outer = tfgradcomp.DistEFBlockSGD(SGD(1.0), **arguments)
    alone = tfgradcomp.DistEFBlockSGD(SGD(1.0), **arguments)
    optimizer = tfgradcomp.LocalSteps("sgd", outer, every=3, stagger=True)
    model.compile(optimizer, "mse")
    lines, expected = [], []
    optimizer.summary(print_fn=lines.append)
    alone.summary(model, print_fn=expected.append)
    assert len(optimizer.outers) == 3

    def cells(lines):
        rows = [re.split(" {2,}", line) for line in lines]
        return [(row[0], *row[2:3], row[-1]) for row in rows if "/" in row[0]]

    assert cells(lines) == cells(expected)
    assert len(cells(lines)) == 6
