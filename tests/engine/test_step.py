"""One optimizer's step: what comes before the method, and what is left alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import Rates, bits, flat, make_variables, stable_id, state_of
from tests.pairwise import parametrize_pairwise
from tests.selection import rows_by_needs, rows_in_turns, select
from tfgradcomp.transports import Loopback
from tfgradcomp.transports.all_gather import AllGather

SHAPES = [(7, 5), (4,), (2, 3)]


def sgd(**arguments):
    return keras.optimizers.SGD(0.1, **arguments)


def apply(optimizer, gradients, variables):
    """A step, with second moments where the method needs some."""
    moments = {}
    if optimizer.needs_second_moments:
        values = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
        moments["second_moments"] = [g if g is None else g * g / 2 for g in values]
    optimizer.apply(gradients, variables, **moments)


def exact(inner, **arguments):
    """A method that loses nothing: steps are the inner optimizer's own."""
    return tfgradcomp.DistEFSGD(inner, "identity", min_size=1, **arguments)


def gradients_of(step, shapes=tuple(SHAPES)):
    rng = np.random.default_rng([1, step])
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def values_of(variables):
    return [v.numpy() for v in variables]


def assert_alike(variables, others, rtol=1e-6, atol=1e-6):
    for one, other in zip(variables, others, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol, atol)


# Gradients that are not finite.


@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", 7e4), ("bfloat16", 3.4e38)], ids=str
)
def test_overflow_in_half_precision_changes_nothing(dtype, value):
    variables = make_variables(SHAPES)
    before = [bits(v) for v in values_of(variables)]
    optimizer = tfgradcomp.HalfPrecision(sgd(), dtype, min_size=1)
    gradients = gradients_of(0)
    gradients[1][3] = value
    message = r"(?s)NaN or Inf in the compressed gradient.*on worker.*0"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        optimizer.apply(gradients, variables)
    assert [bits(v) for v in values_of(variables)] == before
    assert optimizer.iterations == 0


@pytest.mark.sample(10)
@parametrize_pairwise(
    row=select(by=lambda row: row.needs),
    bad=[np.nan, np.inf, -np.inf],
    min_size=[1, 6, 1024],
)
def test_a_bad_gradient_raises_and_changes_nothing(row, bad, min_size):
    variables = make_variables(SHAPES)
    optimizer = row.make(sgd(), min_size=min_size)
    for step in range(2):
        apply(optimizer, gradients_of(step), variables)
    before = [bits(v) for v in values_of(variables)]
    state = [item for item in state_of(optimizer) if "skipped_steps" not in item[0]]
    gradients = gradients_of(2)
    gradients[1][3] = bad
    path = variables[1].path
    message = rf"(?s){path}.*on worker.*0.*nonfinite='skip'"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message) as error:
        apply(optimizer, gradients, variables)
    assert f"{variables[0].path}" not in str(error.value)
    assert [bits(v) for v in values_of(variables)] == before
    assert state == [i for i in state_of(optimizer) if "skipped_steps" not in i[0]]
    assert optimizer.iterations == 2


@pytest.mark.sample(2)
@rows_by_needs()
def test_skipped_step_is_counted_and_changes_nothing(row):
    runs = []
    for bad_at in ((), (0, 2, 3)):
        variables = make_variables(SHAPES)
        optimizer = row.make(sgd(), min_size=5, nonfinite="skip")
        assert optimizer.skipped_steps == 0
        for step in range(4):
            if step in bad_at:
                bad = gradients_of(77)
                bad[2][1, 1] = np.nan
                apply(optimizer, bad, variables)
            apply(optimizer, gradients_of(step), variables)
        assert optimizer.skipped_steps == len(bad_at)
        assert optimizer.iterations == 4
        state = [i for i in state_of(optimizer) if "skipped_steps" not in i[0]]
        runs.append(([bits(v) for v in values_of(variables)], [s for _, s in state]))
    assert runs[0] == runs[1]


@pytest.mark.sample(2)
@parametrize_pairwise(
    row=select(by=lambda row: row.needs),
    where=["compressed", "plain"],
    bad_rank=[0, 2],
    nonfinite=["raise", "skip"],
)
def test_one_bad_worker_stops_all(row, where, bad_rank, nonfinite):
    # (7, 5) is compressed, (4,) is not.
    position = 0 if where == "compressed" else 1

    def worker(rank, collectives):
        variables = make_variables(SHAPES)
        optimizer = row.make(
            sgd(), min_size=10, nonfinite=nonfinite, transport=AllGather(collectives)
        )
        apply(optimizer, gradients_of(rank), variables)
        before = [bits(v) for v in values_of(variables)]
        state = [i for i in state_of(optimizer) if "skipped_steps" not in i[0]]
        bad = gradients_of(10 + rank)
        if rank == bad_rank:
            bad[position].flat[2] = np.nan
        message = None
        try:
            apply(optimizer, bad, variables)
        except tf.errors.InvalidArgumentError as error:
            message = str(error)
        assert before == [bits(v) for v in values_of(variables)]
        assert state == [i for i in state_of(optimizer) if "skipped_steps" not in i[0]]
        # Workers are still in step with each other.
        apply(optimizer, gradients_of(20 + rank), variables)
        assert before != [bits(v) for v in values_of(variables)]
        return message, optimizer.skipped_steps, flat(values_of(variables))

    results = Loopback(3, timeout=60).run(worker)
    assert len({bits(weights) for _, _, weights in results}) == 1
    for message, skipped, _ in results:
        if nonfinite == "skip":
            assert (message, skipped) == (None, 1)
        else:
            assert f"weight_{position}" in message
            assert f"weight_{1 - position}" not in message
            worker_of = message.split("on worker")[1].split("; the step")[0]
            assert [int(c) for c in worker_of if c.isdigit()] == [bad_rank]


def test_nonfinite_steps_under_xla_raise_at_the_end_of_fit():
    variables = make_variables(SHAPES)
    optimizer = tfgradcomp.SignSGD(sgd(), min_size=1)
    optimizer.apply(gradients_of(0), variables)

    @tf.function(jit_compile=True, autograph=False)
    def step(gradients):
        optimizer.apply(gradients, variables)

    bad = gradients_of(1)
    bad[0][0, 0] = np.nan
    before = [bits(v) for v in values_of(variables)]
    step([tf.constant(g) for g in bad])
    assert [bits(v) for v in values_of(variables)] == before
    assert optimizer.skipped_steps == 1
    with pytest.raises(FloatingPointError, match="1 steps were skipped"):
        optimizer.finalize_variable_values(variables)
    optimizer.finalize_variable_values(variables)


# Types and shapes of gradients.


class SeesTypes(keras.optimizers.SGD):
    """SGD that remembers the types of the gradients it is given."""

    def build(self, variables):
        super().build(variables)
        self.seen = []

    def update_step(self, gradient, variable, learning_rate):
        self.seen.append(gradient.dtype.name)
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.sample(6)
@rows_in_turns(
    "dtype",
    ["float16", "bfloat16", "float64"],
    where=lambda row: True,
    by=lambda row: row.needs,
)
def test_gradients_of_other_types_move_weights_of_that_type(row, dtype):
    rng = np.random.default_rng(3)
    start = [rng.normal(size=shape) for shape in SHAPES]
    weights = {
        kind: [keras.Variable(value, dtype=kind) for value in start]
        for kind in (dtype, "float32")
    }
    for kind, variables in weights.items():
        inner = SeesTypes(0.1)
        optimizer = row.make(inner, min_size=5)
        # Numbers that all types hold exactly.
        gradients = [np.round(g * 8) / 8 for g in gradients_of(0)]
        apply(optimizer, [tf.cast(g, kind) for g in gradients], variables)
        assert inner.seen == [kind] * len(SHAPES)
        assert {v.dtype for v in variables} == {kind}
    tolerance = {"float16": 4e-3, "bfloat16": 4e-2, "float64": 1e-6}[dtype]
    for one, other, begin in zip(*weights.values(), start, strict=True):
        found = one.numpy().astype(np.float64)
        np.testing.assert_allclose(found, other.numpy(), tolerance, tolerance)
        assert (found != begin).any()


@pytest.mark.sample(5)
@rows_by_needs()
def test_indexed_slices_equal_their_dense_gradient(row):
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(4, 5)).astype(np.float32)
    indices = [1, 6, 1, 3]
    dense = np.zeros((7, 5), np.float32)
    np.add.at(dense, indices, rows)
    results = []
    for gradient in (
        tf.IndexedSlices(tf.constant(rows), tf.constant(indices), (7, 5)),
        tf.constant(dense),
    ):
        variables = make_variables(SHAPES)
        optimizer = row.make(sgd(), min_size=5)
        for step in range(2):
            rest = gradients_of(step)[1:]
            apply(optimizer, [gradient, *rest], variables)
        results.append([bits(v) for v in values_of(variables)])
    assert results[0] == results[1]


@rows_by_needs()
def test_a_variable_without_a_gradient_stays(row):
    variables = make_variables(SHAPES)
    before = values_of(variables)
    optimizer = row.make(sgd(), min_size=5)
    optimizer.build(variables)
    first, _, third = gradients_of(0)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        apply(optimizer, [first, None, third], variables)
    after = values_of(variables)
    assert bits(after[1]) == bits(before[1])
    assert (after[0] != before[0]).any()
    assert (after[2] != before[2]).any()
    assert optimizer.iterations == 1


# What is the inner optimizer's, comes before the method.


EMA = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("SGD", {"clipnorm": 0.5}),
        ("SGD", {"clipvalue": 0.2}),
        ("SGD", {"global_clipnorm": 0.7}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("SGD", {"loss_scale_factor": 128.0}),
        ("SGD", {"learning_rate": Rates([0.1, 0.0, 0.2, 0.01])}),
        ("SGD", {"gradient_accumulation_steps": 3, "use_ema": True, "clipnorm": 0.3}),
        ("AdamW", {"weight_decay": 0.1, **EMA}),
        ("AdamW", {"gradient_accumulation_steps": 2, "global_clipnorm": 0.7}),
    ],
    ids=stable_id,
)
def test_an_exact_method_steps_like_the_inner_optimizer(kind, arguments):
    arguments = {"learning_rate": 0.1, **arguments}
    results = []
    for wrap in (exact, lambda inner: inner):
        variables = make_variables(SHAPES)
        optimizer = wrap(getattr(keras.optimizers, kind)(**arguments))
        scale = arguments.get("loss_scale_factor", 1.0)
        assert optimizer.scale_loss(2.0) == 2.0 * scale
        trail = []
        for step in range(7):
            gradients = [g * np.float32(scale) for g in gradients_of(step)]
            optimizer.apply([tf.constant(g) for g in gradients], variables)
            trail.append(flat(values_of(variables)))
        iterations = int(optimizer.iterations)
        optimizer.finalize_variable_values(variables)
        results.append((np.stack([*trail, flat(values_of(variables))]), iterations))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    assert results[0][1] == results[1][1]


# Of second moments the squares add up: `test_variance_based`.
@pytest.mark.sample(3)
@rows_in_turns(
    "steps",
    [2, 3],
    where=lambda row: not row.needs_second_moments,
    by=lambda row: row.needs,
)
def test_accumulated_gradients_are_averaged_before_the_method(row, steps):
    by_hand = make_variables(SHAPES)
    optimizer = row.make(sgd(), min_size=5)
    for step in range(3):
        parts = [gradients_of(steps * step + k) for k in range(steps)]
        means = [
            np.sum(same, 0, np.float32) / np.float32(steps)
            for same in zip(*parts, strict=True)
        ]
        optimizer.apply(means, by_hand)
    variables = make_variables(SHAPES)
    accumulating = row.make(sgd(gradient_accumulation_steps=steps), min_size=5)
    for call in range(3 * steps):
        before = [bits(v) for v in values_of(variables)]
        accumulating.apply(gradients_of(call), variables)
        moved = [bits(v) for v in values_of(variables)] != before
        assert moved == ((call + 1) % steps == 0)
    assert accumulating.iterations == optimizer.iterations == 3
    assert_alike(variables, by_hand, rtol=1e-5)


def test_a_bad_gradient_drops_its_window_of_accumulation():
    runs = []
    for with_bad in (False, True):
        variables = make_variables(SHAPES)
        optimizer = tfgradcomp.DistEFBlockSGD(
            sgd(gradient_accumulation_steps=2), min_size=5, nonfinite="skip"
        )
        for window in range(3):
            if with_bad and window == 1:
                for k in range(2):
                    bad = gradients_of(50 + k)
                    if k == 0:
                        bad[0][0, 0] = np.nan
                    optimizer.apply(bad, variables)
                assert optimizer.skipped_steps == 1
            for k in range(2):
                optimizer.apply(gradients_of(2 * window + k), variables)
        assert optimizer.iterations == 3
        runs.append([bits(v) for v in values_of(variables)])
    assert runs[0] == runs[1]
