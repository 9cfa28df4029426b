"""The native operations against the reference, bit for bit."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster import light_environment
from tests.ops import cases
from tests.ops.implementations import (
    WHOLE,
    expected,
    expected_calls,
    made,
    native,
    needs_library,
    on_tensors,
    reference,
)
from tfgradcomp.ops import SplitVector

pytestmark = needs_library

# Shared by threads, and more chunks than one group adds up.
LARGE = 2**18 + 7
# From here on kernels write past the caches.
STREAMED = 2**22 + 7
# SplitVector that begin on a line of the cache, beside one and within one group.
PARTS_OF_STREAMED = [64, 96, 2**20, 0, 5, 59, 1, 2, 3, 2**21 - 70, 2**20 - 153]
SHAPES = [
    *((size, "one", 3, "normal") for size in cases.SIZES),
    *((size, "one", 2, "zeros") for size in (1, 33, 1000)),
    *((size, layout, 3, "normal") for size in (65, 6007) for layout in cases.LAYOUTS),
    *((1000, "ragged", workers, "zeros") for workers in cases.WORKERS),
    *((1000, "ragged", 2, kind) for kind in ("huge", "tiny", "special")),
    *((513, "ones", 2, kind) for kind in ("huge", "tiny", "special")),
]


# -- In TensorFlow ------------------------------------------------------------------


@pytest.mark.sample(7)
@pytest.mark.parametrize("base", cases.BASES)
def test_codes_of_a_large_vector(base):
    codes = tf.constant(cases.codes(base, LARGE))
    packed = reference.pack_codes(codes, base)
    cases.same(native.pack_codes(codes, base), packed, "words")
    cases.same(native.unpack_codes(packed, base, LARGE), codes, "codes")


@pytest.mark.parametrize(
    "shape",
    [
        shape if shape in WHOLE else pytest.param(shape, marks=pytest.mark.slow)
        for shape in SHAPES
    ],
    ids=str,
)
def test_every_operation(shape):
    for what, name, args, result in expected_calls(shape):
        cases.same_results(on_tensors(native, name, args), result, what)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "ragged", "buckets of 2048"])
def test_every_operation_on_a_large_vector(layout):
    shape = (LARGE, layout, 2, "normal")
    for what, name, args in made(shape):
        result = on_tensors(reference, name, args)
        cases.same_results(on_tensors(native, name, args), result, what)
    made.cache_clear()


@pytest.mark.slow
def test_results_that_go_past_the_caches():
    x, m, e = (tf.constant(cases.floats(STREAMED, seed=i)) for i in range(3))
    splits = cases.row_splits(STREAMED, "ragged")
    scale = tf.constant(cases.positive([2, len(splits) - 1]))
    signs = tf.constant(cases.words(2, 2, STREAMED))
    ternary = tf.constant(cases.words(3, 2, STREAMED))
    table = tf.constant(cases.positive([2, len(splits) - 1, 3]))
    sent = tf.constant(cases.sparse_words(2, STREAMED, 0.01))
    limits = cases.thresholds(splits, 0.8)
    stream = tf.constant([7, 3, 0], tf.int64)
    form = cases.CHUNKS[-1]
    ends = cases.chunks(splits, form.chunk)
    largest = tf.constant(cases.largest_words(2, ends, form))
    tops = tf.constant(cases.positive([2, len(ends) - 1, form.levels]))
    _, total, _, product, difference = cases.products(x.numpy(), 3)
    for name, args in (
        ("unpack_codes", (ternary[0], 3, STREAMED)),
        ("sum_levels", (signs[:1], scale[0], splits, 2, 2, 1)),
        ("sum_levels", (ternary, scale[0], splits, 3, 1, 2)),
        ("mean_of_signs", (signs, scale, splits)),
        ("pack_momentum_signs", (x, m, 0.9, False, stream)),
        ("sum_levels", (ternary, scale[0], splits, 3, 1, 2, PARTS_OF_STREAMED)),
        ("mean_of_levels", (ternary, table, splits)),
        ("mean_of_levels", (ternary, table, splits, PARTS_OF_STREAMED)),
        ("mean_of_signs", (signs, scale, splits, PARTS_OF_STREAMED)),
        ("sign_error_feedback", (x, m, e, 0.9, tf.constant(0.5), True, splits)),
        ("sign_error_feedback", (x, None, e, 0.0, tf.constant(0.5), False, splits)),
        ("mean_sign_error_feedback", (signs, scale, e, tf.constant(0.5), True, splits)),
        (
            "mean_sign_residual",
            (signs, scale, e, tf.constant(0.5), True, signs[0], scale[0], splits),
        ),
        ("pack_unambiguous", (x, m * m, e, m * m, 1.5, 0.9, splits)),
        ("pack_over_threshold", (x, m * m, e, m * m, limits, 1.5, 0.9, splits)),
        ("mean_of_sparse", (sent, scale, splits, PARTS_OF_STREAMED)),
        ("pack_largest", (x, ends, *form)),
        ("mean_of_largest", (largest, tops, ends, *form, PARTS_OF_STREAMED)),
        total,
        product,
        (product[0], (*product[1], PARTS_OF_STREAMED)),
        difference,
    ):
        cases.same_results(
            getattr(native, name)(*args), getattr(reference, name)(*args), name
        )


@pytest.mark.parametrize("size", [6007, pytest.param(STREAMED, marks=pytest.mark.slow)])
def test_a_difference_takes_the_memory_of_what_nobody_else_reads(size):
    x = cases.floats(size)
    _, *factors = dict(cases.products(x, 3))["subtract_factors"]

    @tf.function
    def differences(x, one, also_one):
        read_later, read_once = x + one, x + also_one
        first = native.subtract_factors(read_later, *factors)
        with tf.control_dependencies([first]):
            after = read_later * 1
        return first, native.subtract_factors(read_once, *factors), after

    one, also_one = tf.ones([]), tf.ones([])
    first, second, after = differences(tf.constant(x), one, also_one)
    expected = reference.subtract_factors(tf.constant(x + 1), *factors)
    cases.same_results((first, second, after), (expected, expected, x + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        (0, "one", 3, "normal"),
        (33, "ones", 1, "zeros"),
        (1000, "ragged", 3, "zeros"),
        (1000, "ragged", 9, "zeros"),
        (6007, "buckets of 100", 3, "normal"),
    ],
    ids=str,
)
def test_every_operation_in_a_function(shape):
    calls = made(shape)
    arrays = [[a for a in call[2] if isinstance(a, np.ndarray)] for call in calls]

    @tf.function
    def everything(arrays):
        results = []
        for (_, name, args), tensors in zip(calls, arrays, strict=True):
            rest = iter(tensors)
            args = [next(rest) if isinstance(a, np.ndarray) else a for a in args]
            results.append(getattr(native, name)(*args))
        return results

    given = tf.nest.map_structure(tf.constant, arrays)
    results = zip(calls, everything(given), expected(shape), strict=True)
    for (what, _, _), actual, result in results:
        cases.same_results(actual, result, what)


CHILD = """
import sys
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
from tests.ops import test_native
test_native.print_digests()
"""


def print_digests():
    """Prints `digests_of_results`."""
    print(json.dumps(digests_of_results()))


def digests_of_results():
    """Returns hashes of the results of native operations on a large vector."""
    shape = (LARGE, "ragged", 2, "zeros")
    digests = []
    x, momentum = (tf.constant(cases.floats(LARGE, seed=i)) for i in range(2))
    parts = SplitVector(tf.split(x, cases.cuts(LARGE)))
    splits, stream = cases.row_splits(LARGE, "ragged"), np.array([7, 3, 0])
    levels = cases.positive([len(splits) - 1, 9]).cumsum(1) - 5
    limits = cases.thresholds(splits, 0.8)
    cut = [
        ("pack_signs_checked", (parts, stream)),
        ("pack_momentum_signs", (parts, momentum, 0.9, False, stream)),
        ("block_statistics", (parts, splits)),
        ("find_levels", (parts, splits, "optimal", 9)),
        ("pack_levels", (parts, levels, splits, stream)),
        ("sign_error_feedback", (parts, momentum, x, 0.9, 0.5, True, splits)),
        ("pack_unambiguous", (parts, x * x, x, abs(momentum), 1.5, 0.9, splits)),
        ("pack_over_threshold", (x, parts, x, abs(momentum), limits, 1.5, 0.9, splits)),
        ("pack_largest", (parts, cases.chunks(splits, 512), 8, 512, 3)),
    ]
    for name, (_, *args) in cases.products(x.numpy(), 4)[:2]:
        cut.append((name, (parts, *args)))
    for what, name, args in [*made(shape), *(("cut " + c[0], *c) for c in cut)]:
        digest = hashlib.sha256()
        for array in cases.flat(on_tensors(native, name, args)):
            digest.update(b"" if array is None else array.tobytes())
        digests.append([what, digest.hexdigest()])
    return digests


@pytest.mark.slow
def test_the_same_bits_for_any_number_of_threads():
    # This process has as many threads as the machine has cores.
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "1" if os.cpu_count() > 1 else "2"],
        env=light_environment(TF_CPP_MIN_LOG_LEVEL="3"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    digests = digests_of_results()
    assert len(digests) > 30
    assert json.loads(done.stdout.splitlines()[-1]) == digests


# -- Without TensorFlow: each instruction set --------------------------------------


def test_an_unknown_instruction_set_changes_nothing(library):
    best = library.instruction_set()
    assert not library.set_instruction_set("none such")
    assert library.instruction_set() == best


# Off alignment, too: in TensorFlow a slice that would not be aligned is copied.
# Denormals are left out: TensorFlow takes them for zeros, a plain thread does not.
@pytest.mark.sample(4)
@pytest.mark.parametrize("offset", [0, 4, 12])
@pytest.mark.parametrize(
    "shapes", [WHOLE, pytest.param(SHAPES, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_instruction_set_is_the_reference(kernels, offset, shapes):
    kernels.offset = offset
    for shape in shapes:
        if shape[3] in ("tiny", "special"):
            continue
        for what, name, args, result in expected_calls(shape):
            cases.same_results(kernels.call(name, *args), result, f"{shape} {what}")


def test_codes_by_every_instruction_set(kernels):
    for base in cases.BASES:
        for size in (*cases.SIZES, 6007):
            codes = cases.codes(base, size)
            words = cases.flat(reference.pack_codes(tf.constant(codes), base))[0]
            cases.same(kernels.call("pack_codes", codes, base), words, (base, size))
            cases.same(
                kernels.call("unpack_codes", words, base, size), codes, (base, size)
            )


def test_digits_next_to_a_carry(kernels):
    """Where quotients are nearest to integers: words around multiples of powers."""
    rng = np.random.default_rng(0)
    for base in (3, 4, 5, 6, 7, 9, 11, 15, 23, 40, 84, 255, 256, 1625, 65535, 65536):
        digits = max(k for k in range(1, 33) if base**k <= 2**32)
        powers = base ** np.arange(digits, dtype=np.int64)
        multiples = powers * rng.integers(1, base**digits // powers + 1, [2000, digits])
        numbers = np.concatenate([multiples.ravel() - 1, multiples.ravel() % 2**32])
        numbers = numbers[numbers < base**digits]
        codes = (numbers[:, np.newaxis] // powers % base).astype(np.int32).ravel()
        words = numbers.astype(np.uint32).view(np.int32)
        cases.same(kernels.call("unpack_codes", words, base, codes.size), codes, base)


@pytest.mark.parametrize("kind", ["tiny", "special"])
def test_instruction_sets_agree_on_denormals_and_nan(kernels, kind):
    for layout in ("ragged", "ones"):
        for what, name, args in made((1000, layout, 2, kind)):
            actual = kernels.call(name, *args)
            best = kernels.instruction_set()
            kernels.set_instruction_set("portable")
            result = kernels.call(name, *args)
            kernels.set_instruction_set(best)
            cases.same_results(actual, result, what)
