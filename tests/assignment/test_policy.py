"""Several methods in one optimizer: each variable moves as by its method alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests import reference
from tests.engine.test_summary import lines_of, rows_of
from tests.harness import Worker
from tests.helpers import bits, make_variables, named, state_of
from tests.methods import ROWS
from tests.optimizers.trajectories import SEED, SHAPES, Run, sgd
from tfgradcomp.checkpoint.state_file import join_groups
from tfgradcomp.collectives import LoopbackCollectives
from tfgradcomp.transports import Loopback
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.sharded import Sharded

strom = tfgradcomp.Strom.for_layers(threshold=0.5)
ternary = tfgradcomp.TernGrad.for_layers()


BY_NAME = [("weight_1", strom), ("weight_[12]", "float32"), ("weight_3", ternary)]


def four_ways(transport="auto", policy=BY_NAME, **arguments):
    """The variables of `SHAPES`, each by another method; the third as float32."""
    return tfgradcomp.DistEFBlockSGDM(
        sgd(),
        momentum=0.7,
        policy=policy,
        transport=transport,
        min_size=1,
        seed=SEED,
        **arguments,
    )


# In the flat vector of all variables. The vectors of a policy draw random numbers from
# places that are multiples of 512, after those before: 35 elements, 33.
KERNEL, BY_STROM, FLOAT32, BY_TERNGRAD = (
    slice(0, 35),
    slice(35, 68),
    slice(68, 69),
    slice(69, 99),
)


def test_each_variable_moves_as_by_its_method_alone():
    run = Run(four_ways, 3, SHAPES)
    own, by_terngrad = four_ways().method, ROWS["TernGrad"].method
    late = reference.Late(None, [0, 33], threshold=0.5)
    rules = [
        (KERNEL, reference.Workers(own, 3, [0, 35])),
        (BY_STROM, late),
        (FLOAT32, reference.Workers(own, 3, [0, 1], is_plain=True)),
        (BY_TERNGRAD, reference.Workers(by_terngrad, 3, [0, 30], SEED, offset=1024)),
    ]

    def update_of(step, gradients, weights, rate):
        parts = [
            rule.update(step, gradients[:, where], weights[where], rate)
            for where, rule in rules
        ]
        return np.concatenate(parts)

    run.follows(update_of, atol=1e-5)


class Counting(LoopbackCollectives):
    """Collectives that remember what they were asked for."""

    def __init__(self, loopback, rank):
        super().__init__(loopback, rank)
        self.calls = []

    def _meet(self, vector, call_site):
        self.calls.append((call_site, vector.shape[0]))
        return super()._meet(vector, call_site)


def test_gathered_vectors_share_a_message():
    loopback = Loopback(2, timeout=60)

    def worker(rank, _):
        collectives = Counting(loopback, rank)
        optimizer = four_ways(transport=AllGather(collectives))
        variables = make_variables(SHAPES)
        for step in range(2):
            collectives.calls.clear()
            optimizer.apply(gradients_of(step, rank), variables)
        return collectives.calls, optimizer.traffic

    for calls, traffic in loopback.run(worker):
        sites = [site for site, _ in calls]
        # Float32, Strom's two, whose length varies, the largest gradient, all others.
        assert sites == ["plain", "policy_0", "policy_0/variable", "policy_1", "shared"]
        sizes = dict(calls)
        # A flag, a scale and 35 bits; a flag and 30 codes, 20 to a word.
        assert sizes["shared"] == (1 + 1 + 2) + (1 + 2)
        assert traffic.elements_compressed == 98


def gradients_of(step, rank, shapes=tuple(SHAPES)):
    rng = np.random.default_rng([step, rank])
    return [tf.constant(rng.normal(size=shape), tf.float32) for shape in shapes]


def bits_of(variables):
    return [bits(v.numpy()) for v in variables]


@pytest.mark.sample(2)
@pytest.mark.parametrize("position", range(4))
def test_bad_gradient_of_any_method_skips_the_step(position):
    def worker(rank, collectives):
        variables = make_variables(SHAPES)
        optimizer = four_ways(nonfinite="skip", transport=AllGather(collectives))
        optimizer.apply(gradients_of(0, rank), variables)
        before = bits_of(variables), dict(state_of(optimizer))
        bad = gradients_of(1, rank)
        if rank == 1:
            bad[position] += np.nan
        optimizer.apply(bad, variables)
        after = bits_of(variables), dict(state_of(optimizer))
        changed = {path for path, value in after[1].items() if before[1][path] != value}
        assert before[0] == after[0]
        assert [path.rpartition("/")[2] for path in changed] == ["skipped_steps"]
        optimizer.apply(gradients_of(2, rank), variables)
        moved = [a != b for a, b in zip(after[0], bits_of(variables), strict=True)]
        return moved, optimizer.skipped_steps, bits_of(variables)

    one, other = Loopback(2, timeout=60).run(worker)
    assert one == other
    assert one[:2] == ([True] * 4, 1)


# State.


def test_resumed_workers_end_in_the_same_bits():
    # The length of Strom's messages varies, which shards cannot carry.
    policy = [("weight_1", ternary), ("weight_2", "float32"), ("weight_3", ternary)]

    def run(rank, collectives):
        worker = Worker(four_ways(AllGather(collectives), policy), SHAPES)
        for step in range(3):
            worker.step(gradients_of(step, rank))
        saved = worker.save()
        again = Worker(four_ways(Sharded(collectives), policy), SHAPES, saved)
        for step in range(3, 6):
            worker.step(gradients_of(step, rank))
            again.step(gradients_of(step, rank))
        assert bits(worker.weights()) == bits(again.weights())
        return saved.state

    states = Loopback(2, timeout=60).run(run)
    one, other = (state["compressed.worker.residual"][0] for state in states)
    assert bits(one) != bits(other)
    # As `python -m tfgradcomp.reshard` joins their files, for other workers.
    joined = join_groups(states)
    np.testing.assert_allclose(
        joined["compressed.worker.residual"][0], (one + other) / 2, atol=1e-7
    )
    alone = Worker(four_ways(policy=policy), SHAPES)
    together = {**states[0], **joined, "place": np.array([0, 1])}
    alone.optimizer.load_own_variables(together)
    alone.step(gradients_of(6, 0))


def model_of(policy):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            *(keras.layers.Dense(6, name=name) for name in ("one", "two", "three")),
        ]
    )
    optimizer = tfgradcomp.DistEFBlockSGD(
        keras.optimizers.SGD(0.1), policy=policy, min_size=1
    )
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def train(model, step):
    x, y = np.random.default_rng(step).normal(size=(2, 8, 6))
    model.train_on_batch(x, y)


BY_LAYER = [("one/", strom), ("two/bias", "float32"), ("two/", ternary)]


def test_saved_model_resumes_with_its_policy(tmp_path):
    model = model_of(BY_LAYER)
    for step in range(2):
        train(model, step)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    # Keras leaves the model's name out of the paths of one that it loads.
    rows = [rows_of(lines_of(one.optimizer)) for one in (model, loaded)]
    assert [*rows[0].values()] == [*rows[1].values()]
    assert {b.vector for b in loaded.optimizer.stepper.buckets} == {
        *("compressed", "plain", "policy_0", "policy_1")
    }
    assert np.any(named(loaded.optimizer, "policy_0.worker.residual"))
    for one in (model, loaded):
        train(one, 2)
    assert bits_of(model.variables) == bits_of(loaded.variables)
    # Paths have a number for each optimizer of a process.
    states = [
        [value for _, value in state_of(one.optimizer)] for one in (model, loaded)
    ]
    assert states[0] == states[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "policy",
    [
        # As large, and with the state of the same names.
        [("two/", strom), ("one/bias", "float32"), ("one/", ternary)],
        [
            ("one/", tfgradcomp.ScaledSign.for_layers(error_feedback=True)),
            *BY_LAYER[1:],
        ],
    ],
    ids=["others", "another"],
)
def test_state_of_another_policy_raises(policy, tmp_path):
    model = model_of(BY_LAYER)
    train(model, 0)
    model.save_weights(tmp_path / "run.weights.h5")
    other = model_of(policy)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "run.weights.h5")
    sentence = "a file of the same method, policy and.*another policy: .*Strom of varia"
    with pytest.raises(ValueError, match=sentence):
        train(other, 1)
