"""Operations that apply what they decode to variables at once."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ops import cases
from tests.ops.implementations import native, needs_library, on_tensors, reference
from tfgradcomp.ops import SplitVector, apply_decoded, apply_vector
from tfgradcomp.ops.registry import OPERATIONS

pytestmark = needs_library

APPLICABLE = [name for name, op in OPERATIONS.items() if op.applicable]
RULES = {
    "sgd": [0.03],
    "momentum": [0.03, 0.9],
    "nesterov": [0.03, 0.9],
    "adam": [0.01, 0.1, 0.001, 1e-7],
    "frozen_adam": [0.01, 1e-7],
}
# Parts within a group, at its borders and across several; one is empty.
SIZES = [33, 5, 1, 0, 90, 32, 64, 775]
SPLITS = cases.row_splits(sum(SIZES), "ragged")


# Of each part; 0 leaves the root as it is.
FLOORS = [0.7, 0, 1.5, 0.3, 0.2, 0, 0.9, 0.4]


def floors_of(rule, sizes):
    """A floor for each of some parts, if the rule has any."""
    return FLOORS[: len(sizes)] if rule == "frozen_adam" else None


def stepped(rule, c, u, w, m, v, sizes=SIZES):
    """The rules as Keras and 1-bit Adam write them, in float32."""
    c = [np.float32(one) for one in c]
    if rule == "sgd":
        return w - u * c[0], m, v
    if rule == "adam":
        m = m + (u - m) * c[1]
        v = v + (u * u - v) * c[2]
        return w - (m * c[0]) / (np.sqrt(v) + c[3]), m, v
    if rule == "frozen_adam":
        floors = np.repeat(np.float32(floors_of(rule, sizes)), sizes)
        return w - (u * c[0]) / (np.maximum(np.sqrt(v), floors) + c[1]), u, v
    m = m * c[1] - u * c[0]
    return w + (m * c[1] - u * c[0] if rule == "nesterov" else m), m, v


def decoders():
    """For each operation its arguments, without `sizes`."""
    count, workers, blocks = sum(SIZES), 3, len(SPLITS) - 1
    rng = np.random.default_rng(3)
    scale = rng.uniform(0.5, 2, [workers, blocks]).astype(np.float32)
    levels = rng.normal(size=[workers, blocks, 5]).astype(np.float32)
    return {
        "sum_levels": (cases.words(3, workers, count), scale[0], SPLITS, 3, 1, 3),
        "mean_of_signs": (cases.words(2, workers, count), scale, SPLITS),
        "mean_of_levels": (cases.words(5, workers, count), levels, SPLITS),
        "multiply_factors": factors(rng),
    }


def factors(rng, rank=3):
    """Factors of matrices whose rows begin and end anywhere, and other elements."""
    rows, columns = [3, 10, 33, 2, 5], [100, 33, 0, 31, 0]
    rows[-1] = sum(SIZES) - 300 - 330 - 33 - 62
    left = rng.normal(size=rank * (3 + 10 + 2)).astype(np.float32)
    count = rank * (100 + 33 + 31) + 33 + rows[-1]
    right = rng.normal(size=count).astype(np.float32)
    return left, right, rows, columns, rank


def values_of(name):
    return on_tensors(reference, name, decoders()[name]).numpy()


def vectors():
    """w, m and v, of which v is not negative, whether a rule has them or not."""
    w, m, v = np.random.default_rng(5).normal(size=[3, sum(SIZES)])
    return [w.astype(np.float32), m.astype(np.float32), (v * v).astype(np.float32)]


def used(rule):
    return {"sgd": 1, "adam": 3, "frozen_adam": 3}.get(rule, 2)


def test_all_that_decode_are_tested():
    assert set(decoders()) == set(APPLICABLE)


@pytest.mark.parametrize("name", APPLICABLE)
def test_every_instruction_set_takes_every_step(kernels, name):
    u = values_of(name)
    for index, (rule, c) in enumerate(RULES.items()):
        given = vectors()
        for sizes in (SIZES, [sum(SIZES)]):
            expected = stepped(rule, c, u, *given, sizes)
            cut = [np.split(vector, np.cumsum(sizes)[:-1]) for vector in given]
            cut[used(rule) :] = [[]] * (3 - used(rule))
            floors = floors_of(rule, sizes)
            args = decoders()[name]
            found = kernels.updating(name, args, index, c, cut, floors=floors)
            for parts, vector in zip(found[: used(rule)], expected, strict=False):
                cases.same(np.concatenate(parts), vector, f"{name}, {rule}, {sizes}")


def test_every_instruction_set_takes_a_step_with_a_vector(kernels):
    u = np.random.default_rng(6).normal(size=sum(SIZES)).astype(np.float32)
    for index, (rule, c) in enumerate(RULES.items()):
        given = vectors()
        expected = stepped(rule, c, u, *given)
        cut = [np.split(vector, np.cumsum(SIZES)[:-1]) for vector in (u, *given)]
        cut[1 + used(rule) :] = [[]] * (3 - used(rule))
        floors = floors_of(rule, SIZES)
        found = kernels.updating(None, cut[0], index, c, cut[1:], floors=floors)
        for parts, vector in zip(found[: used(rule)], expected, strict=False):
            cases.same(np.concatenate(parts), vector, rule)


def decayed(w, decays, sizes, rate):
    """Keras' decay of weights, part by part; a part with 0 is excluded."""
    parts = np.split(w.copy(), np.cumsum(sizes)[:-1])
    for part, decay in zip(parts, np.float32(decays), strict=True):
        if decay:
            part -= part * decay * np.float32(rate)
    return np.concatenate(parts)


# Parts side by side have another decay, or none.
DECAYS = [0.5, 0, 0.25, 0.5, 0.1, 0, 0.125, 0.3]


@pytest.mark.parametrize("rule", RULES)
def test_every_instruction_set_decays_weights_by_parts(kernels, rule):
    u = np.random.default_rng(6).normal(size=sum(SIZES)).astype(np.float32)
    given, rate = vectors(), 0.03
    # What is excluded keeps its bits.
    given[0][34], u[34] = -0.0, 0
    w = decayed(given[0], DECAYS, SIZES, rate)
    expected = stepped(rule, RULES[rule], u, w, *given[1:])
    cut = [np.split(vector, np.cumsum(SIZES)[:-1]) for vector in (u, *given)]
    cut[1 + used(rule) :] = [[]] * (3 - used(rule))
    order = [*RULES].index(rule)
    floors, c = floors_of(rule, SIZES), RULES[rule]
    found = kernels.updating(None, cut[0], order, c, cut[1:], DECAYS, rate, floors)
    for parts, vector in zip(found[: used(rule)], expected, strict=False):
        cases.same(np.concatenate(parts), vector, rule)


def test_a_vector_is_multiplied_as_it_updates_variables():
    u = np.random.default_rng(6).normal(size=[3, 40]).astype(np.float32)
    w = vectors()[0][:120].reshape([3, 40])
    weights = [tf.Variable(w[:1]), tf.Variable(w[1:])]
    handles = [[one.handle for one in weights], [], []]

    @tf.function
    def step(u):
        x = SplitVector([u[:1], u[1:]], 3.0)
        apply_vector(x, tf.constant(RULES["sgd"]), handles, [0, 0], "sgd")

    step(u)
    expected = w - np.float32(3) * u * np.float32(RULES["sgd"][0])
    cases.same(np.concatenate([one.numpy() for one in weights]), expected, "sgd")


def surrounded(part, offset):
    """A part with other elements before and after it."""
    return np.concatenate([np.full(offset, 7), part, np.full(3, 8)]).astype(np.float32)


@pytest.mark.parametrize("rule", ["adam", "frozen_adam"])
@pytest.mark.parametrize("name", APPLICABLE)
def test_pieces_of_variables_are_updated_in_a_graph(name, rule):
    c, offsets = RULES[rule], [0, 2, 31, 0, 64, 5, 0]
    given, decays = vectors(), [0.03, *DECAYS[1:]]
    w = decayed(given[0], [0, *DECAYS[1:]], SIZES, 0.03)
    expected = stepped(rule, c, values_of(name), w, *given[1:])
    c = [*c, *(floors_of(rule, SIZES) or [])[1:]]

    def pieces(vector):
        # The first part is padding: it has no variable.
        parts = np.split(vector, np.cumsum(SIZES)[:-1])[1:]
        return list(map(surrounded, parts, offsets))

    variables = [list(map(tf.Variable, pieces(vector))) for vector in given]
    # Somebody who has read a variable keeps what it was.
    read = variables[0][4].read_value()

    @tf.function
    def step(words):
        vector = getattr(native, name)(words, *decoders()[name][1:], sizes=SIZES)
        handles = [[one.handle for one in group] for group in variables]
        apply_decoded(vector.decoding, tf.constant(c), handles, offsets, rule, decays)

    step(decoders()[name][0])
    for group, vector in zip(variables, expected, strict=True):
        for variable, piece in zip(group, pieces(vector), strict=True):
            cases.same(variable.numpy(), piece, name)
    cases.same(read, pieces(given[0])[4])


def apply_to(
    rule="sgd", c=(0.1,), offsets=(0, 0), w=None, m=(), sizes=(32, 32), decays=()
):
    words = tf.zeros([1, 2], tf.int32)
    vector = native.mean_of_signs(words, [[1.0]], [0, 64], sizes=sizes)
    w = [tf.Variable(tf.zeros(32)) for _ in range(2)] if w is None else w
    lists = [[one.handle for one in group] for group in (w, m, [])]
    apply_decoded(vector.decoding, tf.constant(c), lists, offsets, rule, decays)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(rule="rmsprop"), "rule must be"),
        (dict(c=(0.1, 0.2)), "coefficients must be 1"),
        (dict(rule="frozen_adam", c=(0.1, 0.2)), "coefficients must be 4"),
        (dict(rule="momentum", c=(0.1, 0.2)), "m must be 2 variables"),
        (dict(offsets=(0,)), "w must be 1 variables"),
        (dict(sizes=(16, 16, 16, 16)), "w must be 2 variables"),
        (dict(offsets=(0, 1)), "hold elements 1 to 33"),
        (dict(decays=(0.1, 0.2)), "decays must be empty"),
        (dict(offsets=(0, -1)), "hold elements -1 to 31"),
        (dict(w=[tf.Variable(np.zeros(32)) for _ in range(2)]), "float32"),
    ],
)
def test_a_wrong_argument_is_an_error_never_a_crash(wrong, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{message}.*Received: "):
        apply_to(**wrong)
