"""OneBitAdam against NumPy, over the warm-up's end and refreshes of the variance."""

import functools
from itertools import pairwise

import keras
import numpy as np
import pytest

import tfgradcomp
from tests.harness import Worker
from tests.helpers import bits, flat, make_variables
from tests.reference.methods import scaled_sign
from tfgradcomp.optimizers.onebit_adam import VarianceSteps
from tfgradcomp.transports import AllGather, Loopback, Sharded

SHAPES = [(40, 30), (30,), (700,)]
RATE, BETA_1, BETA_2, EPSILON, DECAY = 0.01, 0.9, 0.99, 1e-7, 0.1
# Some of the squares lie below it.
FLOOR = 0.5
WARM_UP, STEPS = 3, 9


def gradients_of(step, rank):
    rng = np.random.default_rng([5, step, rank])
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def adam():
    return keras.optimizers.AdamW(
        RATE, weight_decay=DECAY, beta_1=BETA_1, beta_2=BETA_2, epsilon=EPSILON
    )


def onebit(transport, refresh=None):
    return tfgradcomp.OneBitAdam(
        adam(), WARM_UP, refresh, FLOOR, transport=transport, min_size=100
    )


def train(
    workers,
    make=onebit,
    steps=range(STEPS),
    saved=None,
    transport=AllGather,
    gradients_of=gradients_of,
):
    """Trains; returns what each worker saves, and its weights by steps.

    Args:
        workers: N.
        make: Function from a transport to an optimizer.
        steps: Numbers of the steps.
        saved: What each worker goes on from.
        transport: Function from collectives to a transport.
        gradients_of: Function of a step and a rank.
    """

    def run(rank, collectives):
        own = saved and saved[rank]
        worker = Worker(make(transport(collectives)), SHAPES, own)
        seen = []
        for step in steps:
            # Keras has divided the loss.
            worker.step([g / workers for g in gradients_of(step, rank)])
            seen.append(worker.weights())
        return worker.save(), np.stack(seen)

    return Loopback(workers, timeout=60).run(run)


def floored(root, cuts):
    """Returns square roots, no smaller than a part of their variable's mean."""
    parts = [root[a:b] for a, b in pairwise(cuts)]
    floors = [FLOOR * np.sqrt(np.mean(part**2)) for part in parts]
    return np.concatenate(list(map(np.maximum, parts, floors)))


def trajectory(workers, refreshes=()):
    """Tang et al. 2021, Algorithm 1, with the corrections of Keras' Adam."""
    x = flat(v.numpy() for v in make_variables(SHAPES)).astype(float)
    cuts = np.cumsum([0, *(int(np.prod(shape)) for shape in SHAPES)])
    m, v, e = np.zeros_like(x), np.zeros_like(x), np.zeros([workers, x.size])
    server, count = np.zeros_like(x), 0
    # The second variable is too small to be compressed.
    small = slice(cuts[1], cuts[2])

    for step in range(STEPS):
        g = np.stack([flat(gradients_of(step, r)) for r in range(workers)])
        x -= RATE * DECAY * x
        if step < WARM_UP or step in refreshes:
            m = BETA_1 * m + (1 - BETA_1) * g.mean(0)
            v = BETA_2 * v + (1 - BETA_2) * g.mean(0) ** 2
            count += 1
        else:
            own = BETA_1 * m + (1 - BETA_1) * g
            p = own + e
            sent = np.stack([scaled_sign(one, cuts) for one in p])
            e, whole = p - sent, sent.mean(0) + server
            m = scaled_sign(whole, cuts)
            server = whole - m
            m[small] = own.mean(0)[small]
            e[:, small] = server[small] = 0
        alpha = RATE * np.sqrt(1 - BETA_2**count) / (1 - BETA_1 ** (step + 1))
        root = np.sqrt(v)
        if step >= WARM_UP and step not in refreshes:
            root = floored(root, cuts)
        x -= alpha * m / (root + EPSILON)
        yield x.copy()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("workers", "transport", "refresh", "refreshes"),
    [(3, AllGather, None, ()), (2, Sharded, 1, (4, 6))],
)
def test_the_momentum_travels_once_the_variance_is_frozen(
    workers, transport, refresh, refreshes
):
    make = functools.partial(onebit, refresh=refresh)
    trained = train(workers, make, transport=transport)
    for index, expected in enumerate(trajectory(workers, refreshes)):
        for _, seen in trained:
            np.testing.assert_allclose(seen[index], expected, rtol=1e-4, atol=1e-5)
    assert len({bits(seen) for _, seen in trained}) == 1


def check_warm_up(stock, train, gradients_of):
    """Compares the steps of a warm-up with those of an optimizer of Keras'."""
    variables = make_variables(SHAPES)
    stock.build(variables)
    # Two workers: halves add up without a rounding.
    ((saved, _), _) = train(2, steps=range(WARM_UP))
    for step in range(WARM_UP):
        pairs = zip(gradients_of(step, 0), gradients_of(step, 1), strict=True)
        stock.apply([a / 2 + b / 2 for a, b in pairs], variables)
    assert list(map(bits, saved.weights)) == [bits(v.numpy()) for v in variables]


def test_the_warm_up_is_stock_adam_to_the_bit():
    check_warm_up(adam(), train, gradients_of)


def check_resumed(make, middle, last):
    """Compares a run with one that is saved in its middle and loaded again."""
    whole = train(3, make, range(last))
    first = [saved for saved, _ in train(3, make, range(middle))]
    resumed = train(3, make, range(middle, last), first)
    for (expected, _), (found, _) in zip(whole, resumed, strict=True):
        assert found.bits() == expected.bits()


def test_a_resumed_run_has_the_same_bits():
    check_resumed(onebit, 6, STEPS)


def test_distances_between_refreshes_double():
    steps = VarianceSteps(10, refresh=2)
    included = [step for step in range(40) if steps.include(np.int64(step))]
    assert included == [*range(10), 11, 12, 14, 16, 20, 24, 32]
    assert steps.count(np.int64(5)) == 6
    assert steps.count(np.int64(21)) == 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("adam", 0), "warmup_steps=0"),
        (("sgd", 5), "Received: inner_optimizer=SGD"),
        ((keras.optimizers.Adam(amsgrad=True), 5), "amsgrad=True"),
        (("adam", 5, 0), "refresh=0"),
        (("adam", 5, None, 1.5), "variance_floor=1.5"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfgradcomp.OneBitAdam(*arguments)


@pytest.mark.parametrize(
    "argument", [{"dense_every": 3}, {"sparse": "rows"}, {"policy": [("*", "float32")]}]
)
def test_arguments_of_other_methods_are_refused(argument):
    (name,) = argument
    with pytest.raises(ValueError, match=f"Received: {name}="):
        tfgradcomp.OneBitAdam("adam", 5, **argument)
    with pytest.raises(ValueError, match="OneBitAdam"):
        tfgradcomp.OneBitAdam.for_layers(warmup_steps=5)


def test_arguments_are_saved_and_nothing_is_warned_of(recwarn):
    optimizer = tfgradcomp.OneBitAdam(adam(), 7, refresh=16, block_size=64)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert (
        again.uncompressed_steps
        == optimizer.uncompressed_steps
        == VarianceSteps(7, refresh=16, variance_floor=0.1)
    )
    assert not [one for one in recwarn if "Error feedback" in str(one.message)]


def test_an_inner_optimizer_that_has_trained_is_refused():
    adam, variables = keras.optimizers.Adam(), make_variables([(4,)])
    adam.apply([np.ones(4, np.float32)], variables)
    with pytest.raises(ValueError, match="new, not one that has trained"):
        tfgradcomp.OneBitAdam(adam, 5).build(variables)


def test_a_file_of_another_warm_up_is_refused():
    def make(warmup_steps):
        variables = make_variables([(4,)])
        optimizer = tfgradcomp.OneBitAdam("adam", warmup_steps, min_size=0)
        optimizer.build(variables)
        return optimizer, variables

    (optimizer, variables), store = make(5), {}
    optimizer.apply([np.ones(4, np.float32)], variables)
    optimizer.save_own_variables(store)
    other, variables = make(6)
    other.load_own_variables({k: np.array(v) for k, v in store.items()})
    with pytest.raises(ValueError, match=r"variance_steps=\[5, 0\] in the file, \[6,"):
        other.apply([np.ones(4, np.float32)], variables)
