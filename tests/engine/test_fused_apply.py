"""Steps in one pass over memory, beside stock Keras and NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.harness import Replicas, Worker
from tests.helpers import bits, make_variables, split
from tests.reference import operations as oracle
from tfgradcomp.compressors import residuals
from tfgradcomp.engine import fused_apply, local_update, update_rules
from tfgradcomp.transports import AllGather, Loopback

SHAPES = [(7, 30), (33,), (1,), (6, 40)]
SIZE = 210 + 33 + 1 + 240
STEPS = 3
INNER = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    # What comes before and after the step stays Keras' own.
    "decay and averages": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5),
        weight_decay=0.1,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=2,
    ),
    "decay with exceptions": lambda: excluding(
        keras.optimizers.AdamW(0.01, weight_decay=0.1), "1"
    ),
    "decay of SGD": lambda: excluding(
        keras.optimizers.SGD(0.05, weight_decay=0.1), "0"
    ),
    # Keras subtracts zeros.
    "decay of 0": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.0),
}


def excluding(optimizer, name):
    optimizer.exclude_from_weight_decay(var_names=[name])
    return optimizer


def gradients(workers):
    return (
        np.random.default_rng(workers).normal(size=[STEPS, workers, SIZE]).astype("f")
    )


def alone(inner, updates):
    """The weights and the state of stock Keras after updates by itself."""
    variables = make_variables(SHAPES)
    inner.build(variables)
    for update in updates:
        inner.apply([tf.constant(part) for part in split(update, SHAPES)], variables)
    return [bits(v.numpy()) for v in [*variables, *inner.variables]]


def on_two_workers(make):
    """The same of both workers of a wrapper, which are fed different gradients."""

    def run(rank, collectives):
        worker = Worker(make(AllGather(collectives)), SHAPES)
        for step in gradients(2):
            worker.step(step[rank] / 2)
        state = worker.optimizer.inner_optimizer.variables
        return [bits(v.numpy()) for v in [*worker.variables, *state]]

    return Loopback(2, timeout=60).run(run)


def rules_given_to(ops, name, monkeypatch):
    """The last argument but one of each call from now on: of updates, the rule."""
    rules, original = [], getattr(ops, name)

    def observed(*args):
        rules.append(args[-2])
        return original(*args)

    monkeypatch.setattr(ops, name, observed, raising=False)
    return rules


@pytest.fixture
def applied(monkeypatch):
    """The rules of the updates that were taken from words."""
    return rules_given_to(fused_apply.ops, "apply_decoded", monkeypatch)


@pytest.fixture
def applied_vectors(monkeypatch):
    """The rules of the updates that were taken from a worker's own vectors."""
    return rules_given_to(local_update.ops, "apply_vector", monkeypatch)


@pytest.mark.sample(4)
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_votes_move_weights_as_stock_keras_does(inner, applied):
    votes = [np.sign(np.sign(step).sum(0)) for step in gradients(2)]
    found = on_two_workers(
        lambda transport: tfgradcomp.SignSGD(inner(), min_size=1, transport=transport)
    )
    assert len(applied) == 2 * STEPS
    assert found == [alone(inner(), votes)] * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("inner", ["SGD", "Nesterov", "decay of SGD"])
def test_products_go_into_weights_and_residuals(inner, applied, monkeypatch):
    summed = rules_given_to(residuals.ops, "multiply_sum", monkeypatch)
    subtracted = rules_given_to(residuals.ops, "subtract_factors", monkeypatch)

    def trained():
        return on_two_workers(
            lambda transport: tfgradcomp.PowerSGD(
                INNER[inner](), rank=2, min_size=1, transport=transport
            )
        )

    found = trained()
    assert len(applied) == len(summed) == 2 * STEPS and not subtracted
    # In pure TensorFlow the product is a vector, and so is the residual.
    monkeypatch.setenv("TFGRADCOMP_OPS", "python")
    assert trained() == found
    assert len(applied) == len(summed) == len(subtracted) == 2 * STEPS


def scaled_signs(step_gradients, block):
    """The updates of dist-EF-SGD at one learning rate."""
    splits = [*range(0, SIZE, block), SIZE]
    one, yes = np.float32(1), np.array(True)
    residuals, left, first = np.zeros([2, SIZE], "f"), np.zeros(SIZE, "f"), True
    for step in step_gradients:
        ratio, first = one * (not first), False
        words, scales = [], []
        for i, x in enumerate(step):
            sent = oracle.sign_error_feedback(
                x, None, residuals[i], 0.0, ratio, yes, splits
            )
            words.append(sent[0])
            scales.append(sent[1])
            residuals[i] = sent[3]
        word, scale, left = oracle.mean_sign_error_feedback(
            np.stack(words), np.stack(scales), left, ratio, yes, splits
        )
        yield oracle.mean_of_signs(word[np.newaxis], scale[np.newaxis], splits)


def test_variables_that_buckets_cut_are_updated_in_pieces(applied):
    found = on_two_workers(
        lambda transport: tfgradcomp.DistEFSGD(
            INNER["Nesterov"](),
            block_size=48,
            min_size=1,
            bucket_bytes=480,
            transport=transport,
            allow_inner_momentum=True,
        )
    )
    # Several buckets, of which all but one begin with padding.
    assert len(applied) >= 3 * 2 * STEPS
    updates = list(scaled_signs(gradients(2), 48))
    assert found == [alone(INNER["Nesterov"](), updates)] * 2


@pytest.mark.parametrize(
    "kind, arguments, steps_alone",
    [
        (tfgradcomp.OneBitAdam, {}, 0),
        # A round of one step, then a step alone.
        (tfgradcomp.ZeroOneAdam, {"local_steps": 2, "double_every": 1}, 1),
    ],
)
def test_a_frozen_variance_has_the_bits_of_keras_operations(
    kind, arguments, steps_alone, applied, applied_vectors, monkeypatch
):
    def make(transport):
        inner = excluding(keras.optimizers.AdamW(0.01, weight_decay=0.1), "1")
        return kind(
            inner,
            1,
            refresh=None,
            variance_floor=0.9,
            min_size=1,
            transport=transport,
            **arguments,
        )

    found = on_two_workers(make)
    frozen = ["frozen_adam"] * 2
    assert applied_vectors == frozen * steps_alone
    assert applied == frozen * (STEPS - 1 - steps_alone)
    monkeypatch.setattr(update_rules, "rule_of", lambda inner: None)
    assert on_two_workers(make) == found
    assert len(applied) == 2 * (STEPS - 1 - steps_alone)


class OwnStep(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(-gradient, variable, learning_rate)


@pytest.mark.parametrize(
    "inner, change",
    [
        (lambda: keras.optimizers.RMSprop(0.01), 1),
        (lambda: keras.optimizers.Adam(0.01, amsgrad=True), 1),
        (lambda: OwnStep(0.05), -1),
    ],
    ids=["RMSprop", "amsgrad", "of a user"],
)
def test_other_steps_stay_keras_own(inner, change, applied):
    votes = [np.sign(np.sign(step).sum(0)) for step in gradients(2)]
    found = on_two_workers(
        lambda transport: tfgradcomp.SignSGD(inner(), min_size=1, transport=transport)
    )
    assert not applied
    assert found == [alone(inner(), votes)] * 2


# Gradients that are not exchanged.

PLAIN_ONLY = {
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "clipped": lambda: keras.optimizers.SGD(0.05, clipnorm=0.5),
    "accumulated": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    "of a user": lambda: OwnStep(0.05),
}


@pytest.mark.parametrize("name", [*INNER, *PLAIN_ONLY])
def test_own_gradients_move_weights_as_stock_keras_does(name, applied_vectors):
    inner = (INNER | PLAIN_ONLY)[name]
    variables, optimizer = make_variables(SHAPES), inner()
    optimizer.build(variables)
    whole = np.arange(SHAPES[0][0])

    def step(gradient):
        first, *others = map(tf.constant, split(gradient, SHAPES))
        # Rows of a table take Keras' way.
        rows = tf.IndexedSlices(first, whole, tf.constant(SHAPES[0]))
        local_update.take_own_step(optimizer, [rows, *others], variables, 3)

    for gradient in gradients(1)[:, 0]:
        step(gradient)
    assert len(applied_vectors) == (STEPS if name in INNER else 0)
    state = [bits(v.numpy()) for v in [*variables, *optimizer.variables]]
    assert state == alone(inner(), np.float32(3) * gradients(1)[:, 0])


# In graphs, on workers.

MIXED = ("Nesterov", "decay and averages")
SPOILED = 1


def on_replicas():
    """Weights of each replica, and the operations of a step, by optimizers.

    Two variables travel as float32; a step with a NaN on one worker comes in between.
    """
    results = []
    for name in MIXED:
        replicas = Replicas(
            lambda name=name: tfgradcomp.SignSGD(
                INNER[name](), min_size=100, nonfinite="skip", transport="all_gather"
            ),
            [v.numpy() for v in make_variables(SHAPES)],
        )
        steps = list(gradients(2))
        steps.insert(SPOILED, steps[0].copy())
        steps[SPOILED][1, 4] = np.nan
        for step in steps:
            replicas.step(step)
        function = replicas.function.get_concrete_function(tf.constant(steps[0]))
        graph = function.graph.as_graph_def()
        nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
        count = sum(node.op.startswith("Tfgradcomp>Apply") for node in nodes)
        results.append(([bits(own) for own in replicas.weights()], count))
    return results


@pytest.mark.parametrize(
    "kind", ["multi_worker", pytest.param("mirrored", marks=pytest.mark.slow)]
)
def test_replicas_move_as_stock_keras_does_in_a_graph(pools, kind):
    updates = []
    for step in gradients(2):
        vote, mean = np.sign(np.sign(step).sum(0)), np.sign(step.mean(0))
        # The two small variables move by the sign of the mean.
        updates.append(np.r_[vote[:210], mean[210:244], vote[244:]].astype("f"))
    workers = pools(2, kind).run(on_replicas).answers
    for index, name in enumerate(MIXED):
        expected = b"".join(alone(INNER[name](), updates)[: len(SHAPES)])
        for worker in workers:
            weights, operations = worker[index]
            # One for the signs, and one for what travels as float32.
            assert operations == 2 * len(weights)
            assert weights == [expected] * len(weights), name
