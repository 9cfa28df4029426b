"""Exchanges of local steps that are applied later, against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.harness import Replicas
from tests.helpers import split
from tests.optimizers.test_local_steps import (
    GROUPED,
    dist_ef,
    gradients_of,
    identity,
    run_on,
    runs,
    start,
)

SGD = keras.optimizers.SGD
ENDS = np.cumsum([0, *map(np.prod, GROUPED)])


def expected_run(
    workers,
    every,
    steps,
    delay,
    mix=None,
    stagger=False,
    warmup_steps=0,
    assigned=(),
):
    """Returns what each worker sees, where the mean of all changes is applied.

    `assigned` has the step before which worker 0 assigns a variable, its position and
    its value.
    """
    own, anchors, snapshots = np.stack([start(GROUPED)] * workers)[None].repeat(3, 0)
    groups = [(0, 1), (1, 3), (3, 4)] if stagger else [(0, 4)]
    due, seen, is_assigned = {}, [], False
    for step, gradients in enumerate(gradients_of(steps, workers, GROUPED), 1):
        if assigned and step == assigned[0]:
            _, position, value = assigned
            part = slice(ENDS[position], ENDS[position + 1])
            own[0, part] = anchors[0, part] = snapshots[0, part] = value
            is_assigned = True
        own = own - 0.125 * gradients
        for index, (first, last) in enumerate(groups):
            part = slice(ENDS[first], ENDS[last])
            x, anchor, snapshot = own[:, part], anchors[:, part], snapshots[:, part]
            if step <= warmup_steps:
                x[:] = anchor[:] = x.mean(0)
            if step == due.get(index):
                anchor[:] = anchor[0] - (anchor - snapshot).mean(0)
                is_sum = mix is None or is_assigned
                is_assigned = False
                x[:] = (
                    anchor + (x - snapshot) if is_sum else mix * x + (1 - mix) * anchor
                )
            begin = 0 if stagger else warmup_steps
            turn = (index + 1) * every // len(groups)
            if step > warmup_steps and (step - begin - turn) % every == 0:
                due[index] = step + delay
                snapshot[:] = x
        seen.append(own.copy())
    # What waits is part of what all workers exchange at the end.
    last = anchors[0] - (anchors - own).mean(0)
    return np.stack([*seen, [last] * workers])


CASES = [
    {"every": 4, "steps": 11, "delay": 1},
    {"every": 4, "steps": 9, "delay": 3, "mix": 0.5, "warmup_steps": 2},
    {"every": 6, "steps": 13, "delay": 2, "stagger": True},
    {"every": 6, "steps": 9, "delay": 5, "mix": 0.25, "stagger": True},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cases"),
    [("multi_worker", CASES[1:3]), ("multi_worker", CASES[::3]), ("virtual", CASES)],
)
def test_new_anchors_are_applied_after_the_delay(pools, kind, cases):
    common = {"inner": "sgd", "outer": "identity", "shapes": GROUPED}
    answers = pools(2, kind).run(runs, [common | case for case in cases]).answers
    for index, case in enumerate(cases):
        found = np.concatenate([answer[index][0] for answer in answers], axis=1)
        np.testing.assert_allclose(found, expected_run(2, **case), 1e-6, 1e-6)
        np.testing.assert_array_equal(*found[-1])


@pytest.mark.slow  # Starts both kinds of workers.
def test_processes_and_virtual_workers_end_in_the_same_bits(pools):
    case = {"inner": "adam", "outer": "dist_ef", "every": 4, "steps": 10, "delay": 2}
    case |= {"shapes": GROUPED, "stagger": True, "mix": 0.5}
    found, _ = run_on(pools(2), **case)
    again, _ = run_on(pools(2), **case)
    np.testing.assert_array_equal(found, again)
    virtual, _ = run_on(pools(2, "virtual"), **case)
    np.testing.assert_array_equal(found, virtual)


def assign_while_waiting(cases):
    """The weights of this worker's replicas by steps, for each case."""
    found = []
    for case in cases:
        options = {name: case[name] for name in ("every", "delay", "mix")}
        replicas = Replicas(
            lambda options=options: tfgradcomp.LocalSteps(
                SGD(0.125), identity(), **options
            ),
            split(start(GROUPED), GROUPED),
        )
        seen = []
        all_gradients = gradients_of(case["steps"], replicas.number, GROUPED)
        for step, gradients in enumerate(all_gradients, 1):
            before, position, value = case["assigned"]
            if step == before and strategy_and_rank()[1] == 0:
                variable = replicas.variables[position]
                variable.assign(np.full(variable.shape, value))
            replicas.step(gradients)
            seen.append(replicas.weights())
        replicas.optimizer.synchronize()
        replicas.optimizer.verify()
        found.append(np.stack([*seen, replicas.weights()]))
    return found


@pytest.mark.slow
def test_a_weight_that_is_assigned_while_its_snapshot_waits_is_the_anchor(pools):
    case = {"every": 4, "steps": 9, "delay": 3, "assigned": (6, 0, 2.0)}
    cases = [case | {"mix": mix} for mix in (None, 0.5)]
    answers = pools(2).run(assign_while_waiting, cases).answers
    for index, case in enumerate(cases):
        found = np.concatenate([answer[index] for answer in answers], axis=1)
        np.testing.assert_allclose(found, expected_run(2, **case), 1e-6, 1e-6)


def test_the_exchange_waits_for_nothing_that_its_step_computes():
    optimizer = tfgradcomp.LocalSteps(SGD(0.125), dist_ef(), 3, delay=1)
    variable = keras.Variable(np.ones(64, "float32"))
    optimizer.build([variable])
    function = tf.function(lambda g: optimizer.apply([g], [variable]), autograph=False)
    graph = function.get_concrete_function(tf.ones(64)).graph
    (anchor,) = (
        own
        for handle, own in graph.captures
        if handle is optimizer._anchors[0].value.handle
    )
    users = [op for op in anchor.consumers() if op.type == "If"]
    exchange, *others = sorted(users, key=graph.get_operations().index)
    assert others
    gradient = graph.inputs[0].op
    assert gradient not in ancestors(exchange)
    assert all(gradient in ancestors(other) for other in others)


def ancestors(operation):
    """Returns all operations that must have run before one."""
    found, new = set(), [operation]
    while new:
        one = new.pop()
        before = {*(tensor.op for tensor in one.inputs), *one.control_inputs} - found
        found |= before
        new += before
    return found


def test_resumes_between_snapshot_and_exchange_in_the_same_bits(tmp_path):
    def make():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile(tfgradcomp.LocalSteps("adam", dist_ef(), 4, delay=3), "mse")
        return model

    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(4, 8)), rng.normal(size=(4, 4))) for _ in range(14)]
    whole, first = make(), make()
    for batch in batches:
        whole.train_on_batch(*batch)
    for batch in batches[:10]:
        first.train_on_batch(*batch)
    # The second exchange waits since the eighth step.
    assert first.optimizer.outers[0].iterations == 1
    first.save(tmp_path / "model.keras")
    second = keras.saving.load_model(tmp_path / "model.keras")
    for batch in batches[10:]:
        second.train_on_batch(*batch)
    for one, other in zip(whole.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_variables_without_a_gradient_keep_their_values():
    optimizer = tfgradcomp.LocalSteps(SGD(0.125), dist_ef(), 3, delay=2)
    variables = [keras.Variable(v) for v in split(start(GROUPED), GROUPED)]
    optimizer.build(variables)
    frozen = variables[1].numpy()
    for gradients in gradients_of(8, 1, GROUPED):
        parts = split(gradients[0], GROUPED)
        del parts[1]
        optimizer.apply(parts, variables[:1] + variables[2:])
    assert int(optimizer.outer.iterations) == 2
    optimizer.synchronize()
    np.testing.assert_array_equal(variables[1], frozen)
    assert not np.array_equal(variables[0], split(start(GROUPED), GROUPED)[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delay": -1}, "delay"),
        ({"every": 4, "delay": 4}, "before the next one is due"),
        ({"every": "auto", "delay": 1}, "before the next one is due"),
        ({"mix": 0.5}, "`mix` is the share"),
        ({"delay": 1, "mix": 1.0}, "`mix` is the share"),
    ],
)
def test_bad_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfgradcomp.LocalSteps("sgd", dist_ef(), **arguments)
