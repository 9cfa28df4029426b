"""Local steps on real workers against NumPy, and against what they amount to."""

import keras
import numpy as np
import pytest

import tfgradcomp
from tests import reference
from tests.optimizers import local_steps_cases as cases
from tfgradcomp.optimizers import local_step_schedule
from tfgradcomp.transports import AllGather, Loopback


def flat(parts):
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in parts])


def mean_gradients(steps, workers):
    """By steps and workers, flat."""
    return np.array(
        [[flat(own) for own in step] for step in cases.gradients_of(steps, workers)]
    )


def weights(answers, step):
    """The weights of all replicas after a step, flat, by ranks."""
    return np.array(
        [
            flat([variable[replica] for variable in answer[step]])
            for answer in answers
            for replica in range(len(answer[step][0]))
        ]
    )


@pytest.mark.slow  # A cluster's minute; the means below are the same step.
def test_one_step_is_synchronous_training(pools):
    case = {"inner": "sgd", "outer": "identity", "every": 1, "steps": 3, "ends": False}
    answers = [one for (one,) in pools(2).run(cases.runs, [case]).answers]
    g = mean_gradients(3, 2).mean(1)
    for step in range(3):
        # Eighths and sixteenths: no bit is lost.
        expected = flat(cases.start()) - 0.125 * g[: step + 1].sum(0)
        for own in weights([seen for seen, *_ in answers], step):
            np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize(
    "kind", ["multi_worker", pytest.param("mirrored", marks=pytest.mark.slow)]
)
def test_workers_train_alone_and_then_take_the_mean(pools, kind):
    case = {"inner": "adam", "outer": "identity", "every": 4, "steps": 6}
    spoiled = {**case, "spoiled": (1, 1)}
    answers = pools(2, kind).run(cases.runs, [case, spoiled]).answers
    for index, is_spoiled in enumerate((False, True)):
        seen = [worker[index][0] for worker in answers]
        alone = [cases.INNER["adam"]() for _ in range(2)]
        own = [[keras.Variable(v) for v in cases.start()] for _ in range(2)]
        for step, gradients in enumerate(cases.gradients_of(6, 2)):
            for rank in range(2):
                left_out = (
                    is_spoiled and step == 1 and (rank == 1 or kind == "mirrored")
                )
                if not left_out:
                    alone[rank].apply(gradients[rank], own[rank])
            if step == 3:
                average(own)
            found = weights(seen, step)
            for rank in range(2):
                expected = flat([v.numpy() for v in own[rank]])
                np.testing.assert_allclose(found[rank], expected, rtol=1e-5, atol=1e-6)
        average(own)
        first, second = weights(seen, -1)
        np.testing.assert_array_equal(first, second)
        expected = flat([v.numpy() for v in own[0]])
        np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)
        counted = [worker[index][1:3] for worker in answers]
        left_out = is_spoiled * np.array([kind == "mirrored", 1])[-len(counted) :]
        assert counted == [(int(skipped), 2) for skipped in left_out]


@pytest.mark.slow  # A cluster's minute; what one group does is seen above.
def test_groups_of_variables_take_turns(pools):
    case = {"inner": "sgd", "outer": "identity", "every": 6, "steps": 9}
    case |= {"stagger": True, "shapes": cases.GROUPED}
    answers = [one for (one,) in pools(2).run(cases.runs, [case]).answers]
    seen = [weights for weights, *_ in answers]
    own = [[np.array(v) for v in cases.start(cases.GROUPED)] for _ in range(2)]
    turns = {2: [0], 4: [1, 2], 6: [3], 8: [0]}
    for step, gradients in enumerate(cases.gradients_of(9, 2, cases.GROUPED)):
        for rank in range(2):
            for value, gradient in zip(own[rank], gradients[rank], strict=True):
                value -= 0.125 * gradient
        for position in turns.get(step + 1, []):
            mean = (own[0][position] + own[1][position]) / 2
            own[0][position], own[1][position] = mean, mean.copy()
        for rank in range(2):
            found = weights(seen, step)[rank]
            np.testing.assert_array_equal(found, flat(own[rank]))
    first, second = weights(seen, -1)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, (flat(own[0]) + flat(own[1])) / 2)


@pytest.mark.slow  # A cluster's minute; the rule is seen below.
def test_workers_measure_how_often_an_exchange_pays(pools):
    case = {"inner": "sgd", "outer": "dist_ef", "every": "auto", "steps": 12}
    answers = [one for (one,) in pools(2).run(cases.runs, [case]).answers]
    (*_, every), (*_, other) = answers
    assert every == other and 1 <= every <= 64
    seen = [weights for weights, *_ in answers]
    # Eight exchanges are measured, after a first one that is traced.
    for step in [*range(9), -1]:
        first, second = weights(seen, step)
        np.testing.assert_array_equal(first, second)
    if every > 1:
        assert np.any(np.diff(weights(seen, 9), axis=0))


@pytest.mark.parametrize(
    ("step", "exchange", "every"),
    [(0.1, 0.05, 5), (1.0, 0.05, 1), (0.1, 10.0, 64), (0.0, 0.0, 1)],
)
def test_an_exchange_takes_a_tenth_of_the_computing_time(step, exchange, every):
    slowest = np.array([step, -exchange], np.float32)
    assert local_step_schedule.steps_that_pay(slowest).numpy() == every


def test_groups_are_about_as_large_as_the_largest_variable():
    assert local_step_schedule.groups_of([12, 4, 8, 12], 6) == [[0], [1, 2], [3]]
    assert local_step_schedule.groups_of([12, 4, 8, 12], 2) == [[0, 2], [1, 3]]
    assert local_step_schedule.groups_of([100, 3, 4], 16) == [[0, 1, 2]]


def test_a_measured_rhythm_is_saved():
    def make(every):
        optimizer = tfgradcomp.LocalSteps("sgd", cases.dist_ef(), every=every)
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


def test_workers_that_would_not_meet_are_told(pools):
    for error in pools(2).run(cases.error_of_different_arguments).answers:
        assert "every=" in error and "workers [1] differ" in error


def test_arguments_are_saved_and_traffic_is_a_mean():
    optimizer = tfgradcomp.LocalSteps(
        cases.SGD(0.125), cases.dist_ef(), every=4, warmup_steps=2
    )
    config = keras.optimizers.serialize(optimizer)
    again = keras.optimizers.deserialize(config)
    assert again.get_config() == optimizer.get_config()
    assert (again.every, again.warmup_steps) == (4, 2)
    assert isinstance(again.outer, tfgradcomp.DistEFBlockSGDM)
    transport = AllGather(Loopback(3).collectives(0))
    outer = tfgradcomp.DistEFBlockSGDM(
        cases.SGD(), transport=transport, min_size=0, block_size=32
    )
    optimizer = tfgradcomp.LocalSteps("sgd", outer, every=4)
    optimizer.build([keras.Variable(np.zeros(320))])
    # Of 10 words of signs, 10 scales and a flag, to two others, a quarter a step.
    assert optimizer.traffic.words_sent == 2 * (10 + 10 + 1) / 4
    assert optimizer.traffic.elements_sent == 320 / 4
    lines = []
    optimizer.summary(print_fn=lines.append)
    assert "variable" in lines[2] and "DistEFBlockSGDM" in lines[2]
    assert lines[-1] == "An exchange every 4 steps"


@pytest.mark.parametrize(
    ("inner", "arguments", "message"),
    [
        ("sgd", {"every": 0}, "every"),
        ("sgd", {"warmup_steps": -1}, "warmup_steps"),
        ("sgd", {"outer": "sgd"}, "outer"),
        ("sgd", {"outer": tfgradcomp.VarianceBased("sgd")}, "no second moments"),
        (keras.optimizers.SGD(use_ema=True), {}, "use_ema"),
        (tfgradcomp.TernGrad("sgd"), {}, "exchanged once"),
    ],
)
def test_bad_arguments_are_refused(inner, arguments, message):
    given = {"outer": cases.dist_ef(), **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        tfgradcomp.LocalSteps(inner, **given)


def average(variables):
    for same in zip(*variables, strict=True):
        mean = np.mean([v.numpy() for v in same], 0)
        for variable in same:
            variable.assign(mean)


@pytest.mark.slow  # Tests of the method follow it on synchronous workers.
def test_compressed_differences_follow_their_formula(pools):
    every, steps, rate = 4, 12, 0.7
    case = {"inner": "sgd", "outer": "dist_ef", "every": every, "steps": steps}
    answers = [one for (one,) in pools(3).run(cases.runs, [case]).answers]
    g = mean_gradients(steps, 3)
    anchor = flat(cases.start())
    own = np.array([anchor] * 3)
    splits = np.cumsum([0, *(np.prod(shape) for shape in cases.SHAPES.values())])
    outer = reference.Workers(cases.dist_ef().method, 3, splits)
    for step in range(steps):
        own = own - 0.125 * g[step]
        if step % every == every - 1:
            anchor = anchor - rate * outer.update(step, anchor - own, anchor, rate)
            own = np.array([anchor] * 3)
        found = weights([seen for seen, *_ in answers], step)
        np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1:], found[:-1])
