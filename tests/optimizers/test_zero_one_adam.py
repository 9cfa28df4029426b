"""ZeroOneAdam against NumPy, within its rounds and over their ends."""

import unittest.mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.harness import Replicas, Worker
from tests.helpers import bits, flat, make_variables
from tests.optimizers.test_onebit_adam import (
    BETA_1,
    BETA_2,
    EPSILON,
    FLOOR,
    SHAPES,
    WARM_UP,
    check_resumed,
    floored,
    gradients_of,
    train,
)
from tests.reference.methods import scaled_sign
from tfgradcomp.engine import update_rules
from tfgradcomp.optimizers.zero_one_rounds import RoundSteps
from tfgradcomp.transports import AllGather, Loopback, Sharded

STEPS, DECAY = 14, 0.1
# Of steps 3 and 4 each is a round; then 5 and 6; then 7 to 9, 10 to 12, and 13 alone.
ENDS = {3, 4, 6, 9, 12}
REFRESHES = {4}


@pytest.fixture(autouse=True)
def eager_functions():
    """Workers of a loopback meet in Python."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that changes in each step."""

    def __call__(self, step):
        return 0.01 + 0.001 * tf.cast(step, tf.float32)


def adam():
    return keras.optimizers.AdamW(
        Rates(), weight_decay=DECAY, beta_1=BETA_1, beta_2=BETA_2, epsilon=EPSILON
    )


def zero_one(transport, **arguments):
    return tfgradcomp.ZeroOneAdam(
        adam(),
        WARM_UP,
        refresh=1,
        local_steps=3,
        double_every=2,
        variance_floor=FLOOR,
        transport=transport,
        min_size=100,
        **arguments,
    )


def train_with(workers, transport=AllGather, bad=(), assigned=(), **arguments):
    """Trains; returns the weights of each worker by steps and after the end.

    Args:
        workers: N.
        transport: Function from collectives to a transport.
        bad: Steps and ranks with an infinity.
        assigned: Steps and ranks before which the first variable becomes 2.
        arguments: More arguments of the optimizer.
    """

    def run(rank, collectives):
        worker = Worker(zero_one(transport(collectives), **arguments), SHAPES)
        seen = []
        for step in range(STEPS):
            gradients = [g / workers for g in gradients_of(step, rank)]
            if (step, rank) in bad:
                gradients[2][7] = np.inf
            if (step, rank) in assigned:
                worker.variables[0].assign(np.full(SHAPES[0], 2.0))
            worker.step(gradients)
            seen.append(worker.weights())
        for _ in range(2):
            worker.optimizer.synchronize()
        return np.stack([*seen, worker.weights()]), worker.optimizer

    return Loopback(workers, timeout=60).run(run)


def trajectory(workers, bad=(), assigned=()):
    """Lu et al. 2022, Algorithm 1, by mean momenta; the last round ends early."""
    x = flat(v.numpy() for v in make_variables(SHAPES)).astype(float)
    cuts = np.cumsum([0, *(int(np.prod(shape)) for shape in SHAPES)])
    m, v, e = np.zeros_like(x), np.zeros_like(x), np.zeros([workers, x.size])
    server, count = np.zeros_like(x), 0
    # The second variable is too small to be compressed.
    small = slice(cuts[1], cuts[2])
    alone, own, sums, total = None, None, 0, 0

    def step_by(x, m, root, rate, step):
        alpha = rate * np.sqrt(1 - BETA_2**count) / (1 - BETA_1 ** (step + 1))
        return (1 - rate * DECAY) * x - alpha * m / (root + EPSILON)

    for step in range(STEPS + 1):
        rate, root = 0.01 + 0.001 * step, floored(np.sqrt(v), cuts)
        if step < STEPS:
            g = np.stack([flat(gradients_of(step, r)) for r in range(workers)])
        if step < WARM_UP or step in REFRESHES:
            m = BETA_1 * m + (1 - BETA_1) * g.mean(0)
            v = BETA_2 * v + (1 - BETA_2) * g.mean(0) ** 2
            count += 1
            x = step_by(x, m, np.sqrt(v), rate, step)
            yield np.tile(x, [workers, 1])
            continue
        if alone is None:
            alone, own = np.tile(x, [workers, 1]), np.tile(m, [workers, 1])
            sums, total = 0, 0
        for rank in range(workers):
            if (step, rank) in assigned:
                alone = alone.copy()
                alone[rank, : cuts[1]] = 2.0
                # A round starts from the weights of worker 0.
                x = np.where((np.arange(x.size) < cuts[1]) & (rank == 0), 2.0, x)
        if step < STEPS:
            before = own
            own = BETA_1 * own + (1 - BETA_1) * g
            for rank in range(workers):
                if (step, rank) in bad:
                    own[rank] = before[rank]
            sums, total = sums + rate * own, total + rate
        if step not in ENDS and step < STEPS:
            alone = step_by(alone, own, root, rate, step)
            yield alone
            continue
        p = sums / total + e
        sent = np.stack([scaled_sign(one, cuts) for one in p])
        e, whole = p - sent, sent.mean(0) + server
        m = scaled_sign(whole, cuts)
        server = whole - m
        m[small] = (sums / total).mean(0)[small]
        e[:, small] = server[small] = 0
        x, alone = step_by(x, m, root, total, step), None
        yield np.tile(x, [workers, 1])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("workers", "transport", "bad"),
    [(3, AllGather, ()), (2, Sharded, ((8, 1), (9, 0)))],
)
def test_workers_are_alone_in_a_round_and_agree_at_its_end(workers, transport, bad):
    trained = train_with(workers, transport, bad, nonfinite="skip")
    expected = np.stack([*trajectory(workers, bad)], axis=1)
    for rank, (seen, optimizer) in enumerate(trained):
        np.testing.assert_allclose(seen, expected[rank], rtol=1e-4, atol=1e-5)
        assert int(optimizer.inner_optimizer.iterations.numpy()) == STEPS
        assert optimizer.skipped_steps == sum(one == rank for _, one in bad)
    for index in (*range(WARM_UP), *ENDS, -1):
        assert len({bits(seen[index]) for seen, _ in trained}) == 1
    assert len({bits(seen[7]) for seen, _ in trained}) == workers


def on_replicas():
    """Weights of each replica by steps, with Keras' operations and without them."""
    found = []
    for rule_of in (lambda inner: None, update_rules.rule_of):
        with unittest.mock.patch.object(update_rules, "rule_of", rule_of):
            first = [v.numpy() for v in make_variables(SHAPES)]
            replicas = Replicas(lambda: zero_one("all_gather"), first)
            seen = []
            for step in range(STEPS):
                given = [flat(gradients_of(step, r)) for r in range(replicas.number)]
                replicas.step(np.stack(given).astype(np.float32))
                seen.append(replicas.weights())
        replicas.optimizer.synchronize()
        found.append(np.stack([*seen, replicas.weights()], axis=1))
    return found


@pytest.mark.slow
def test_replicas_of_a_strategy_do_the_same(pools):
    (found,) = pools(2, "virtual").run(on_replicas).answers
    expected = np.stack([*trajectory(2)], axis=1)
    for seen in found:
        # TensorFlow reorders the factors of the decay in a graph.
        np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_starts_from_what_worker_0_has_assigned(rank):
    assigned = [(8, rank)]
    trained = train_with(2, assigned=assigned)
    expected = np.stack([*trajectory(2, assigned=assigned)], axis=1)
    for own, (seen, _) in zip(expected, trained, strict=True):
        np.testing.assert_allclose(seen, own, rtol=1e-4, atol=1e-5)
    assert bits(trained[0][0][-1]) == bits(trained[1][0][-1])


def test_one_step_a_round_is_one_bit_adam_to_the_bit():
    def make(optimizer, **arguments):
        return lambda transport: optimizer(
            adam(), WARM_UP, 2, transport=transport, **arguments
        )

    alone = make(tfgradcomp.ZeroOneAdam, local_steps=1, double_every=1)
    (_, one), _ = train(2, alone, range(STEPS))
    (_, other), _ = train(2, make(tfgradcomp.OneBitAdam), range(STEPS))
    assert bits(one) == bits(other)


@pytest.mark.slow
def test_a_run_resumed_within_a_round_has_the_same_bits():
    check_resumed(zero_one, 9, STEPS)


def test_a_bad_gradient_raises_on_all_workers_at_the_end_of_a_round():
    with pytest.raises(tf.errors.InvalidArgumentError, match="worker"):
        train_with(2, bad=((7, 1),))


def test_rounds_double_and_the_variance_rests_before_them():
    steps = RoundSteps(3, refresh=2, local_steps=3, double_every=5)
    ends = [step for step in range(3, 22) if steps.end_round(np.int64(step))]
    assert ends == [3, 4, 5, 6, 7, 9, 11, 12, 15, 18, 21]
    assert steps.refreshes() == [4, 5, 7]


def test_arguments_are_saved_and_traffic_is_a_mean():
    optimizer = tfgradcomp.ZeroOneAdam("adam", 7, double_every=64, min_size=1)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert again.uncompressed_steps == optimizer.uncompressed_steps
    one = tfgradcomp.OneBitAdam("adam", 7, min_size=1)
    for each in (one, optimizer):
        each.build(make_variables(SHAPES))
    assert optimizer.traffic.words_sent == one.traffic.words_sent / 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"local_steps": 0}, "local_steps=0"),
        ({"double_every": 0}, "double_every=0"),
        ({"inner": keras.optimizers.Adam(gradient_accumulation_steps=2)}, "steps=2"),
        ({"inner": keras.optimizers.Adam(use_ema=True)}, "use_ema=True"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    inner = arguments.pop("inner", "adam")
    with pytest.raises(ValueError, match=message):
        tfgradcomp.ZeroOneAdam(inner, 5, **arguments)
