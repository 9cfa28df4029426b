"""One table of compressors, one battery: what every method promises."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from tests.helpers import bits, make_context
from tfgradcomp.compressors import (
    ORQ,
    QSGD,
    BinGrad,
    Clip,
    Codebook,
    Compressor,
    ErrorFeedback,
    Hybrid,
    Identity,
    Layout,
    LinearQuantization,
    Momentum,
    NesterovMomentum,
    ScaledSign,
    Sign,
    Strom,
    Ternary,
    TopK,
    UniformLevels,
    VarianceBased,
    fused,
)
from tfgradcomp.ops import SplitVector
from tfgradcomp.transports import messages


class Row(NamedTuple):
    """A compressor and what it promises of the first step.

    kind: `exact`; `rounded` to `digits` bits; `unbiased`; `contracting`, with the
    share of the squared length that at least goes; `sign`: nothing but the sign;
    `late`: an element at its time.
    target: What the payload stands for, of the input (the clipped, m, ...).
    levels: What an unbiased row rounds a block of the target to.
    largest: Magnitude up to which the format stays finite.
    """

    name: str
    compressor: Compressor
    kind: str
    target: Callable = lambda x, splits: x
    kept: Callable | None = None
    levels: Callable = lambda v: reference.even_levels(v, 3)
    digits: int = 24
    largest: float = 1e30
    is_random: bool = False


def kept_by_signs(v, splits):
    """Sum over blocks of ||v||_1^2 / d: what a scaled sign takes of ||v||_2^2."""
    return sum(np.sum(np.abs(v[b])) ** 2 / len(v[b]) for b in reference.blocks(splits))


def kept_by_top(v, splits, ratio):
    return np.sum(v**2) * max(1, np.ceil(ratio * len(v))) / len(v)


def kept_by_means(v, splits):
    """Sum over blocks of the squared length of the means of two sides."""
    return np.sum(reference.bingrad_b(v, splits) ** 2)


def saturated(x, splits):
    """BinGrad-pb stands for what is clipped to its levels."""
    clipped = [np.clip(x[b], *reference.symmetric_levels(x[b])) for b in blocks(splits)]
    return np.concatenate(clipped)


def in_float16(levels):
    """The ends outward, the others to nearest."""
    down, up = np.float16([-np.inf, np.inf])
    table = levels.astype(np.float16)
    table[0] = np.nextafter(table[0], down) if table[0] > levels[0] else table[0]
    table[-1] = np.nextafter(table[-1], up) if table[-1] < levels[-1] else table[-1]
    return table.astype(np.float64)


blocks = reference.blocks
TOP = functools.partial(kept_by_top, ratio=0.1)
ROWS = [
    Row("identity", Identity(), "exact"),
    Row("bfloat16", Identity("bfloat16"), "rounded", digits=8),
    Row("float16", Identity("float16"), "rounded", digits=11, largest=6e4),
    Row("sign", Sign(), "sign", is_random=True),
    Row(
        "signum",
        Momentum(Sign(), 0.9),
        "sign",
        lambda x, splits: np.float32(0.1) * x,
        is_random=True,
    ),
    Row("signum in warm-up", Momentum(Sign(), 0.9, 54), "sign", is_random=True),
    Row("scaled sign", ScaledSign(), "contracting", kept=kept_by_signs),
    Row("top-k", TopK(0.1), "contracting", kept=TOP),
    Row("all of top-k", TopK(1.0), "exact"),
    Row("ternary", Ternary(share_scaler=False), "unbiased", is_random=True),
    Row("shared ternary", Ternary(), "unbiased", is_random=True),
    Row("terngrad", Clip(Ternary(), 2.5), "unbiased", reference.clip, is_random=True),
    Row(
        "ORQ-3",
        ORQ(3),
        "unbiased",
        levels=lambda v: reference.optimal_levels(v, 3),
        is_random=True,
    ),
    Row(
        "ORQ-9",
        ORQ(9, refine=2, table_dtype="float16"),
        "unbiased",
        levels=lambda v: in_float16(reference.optimal_levels(v, 9, 2)),
        largest=6e4,
        is_random=True,
    ),
    Row(
        "clipped ORQ-5",
        Clip(ORQ(5), 1.5),
        "unbiased",
        lambda x, splits: reference.clip(x, splits, 1.5),
        levels=lambda v: reference.optimal_levels(v, 5),
        is_random=True,
    ),
    Row(
        "BinGrad-pb",
        BinGrad("pb"),
        "unbiased",
        saturated,
        levels=lambda v: np.abs(v).max() * np.array([-1, 1]),
        is_random=True,
    ),
    Row("BinGrad-b", BinGrad(), "contracting", kept=kept_by_means),
    Row(
        "BinGrad-b, half",
        BinGrad("b", "bfloat16"),
        "contracting",
        kept=lambda v, splits: 0.99 * kept_by_means(v, splits),
    ),
    Row(
        "QSGD-5",
        QSGD(5),
        "unbiased",
        levels=lambda v: reference.even_levels(v, 5),
        is_random=True,
    ),
    Row(
        "QSGD-9, l2",
        QSGD(9, "l2"),
        "unbiased",
        levels=lambda v: reference.even_levels(v, 9, "l2"),
        is_random=True,
    ),
    Row(
        "linear-7",
        LinearQuantization(7),
        "unbiased",
        levels=lambda v: reference.quantile_levels(v, 7),
        is_random=True,
    ),
    Row(
        "dist-EF BinGrad-b", ErrorFeedback(BinGrad()), "contracting", kept=kept_by_means
    ),
    Row(
        "dist-EF ORQ-9",
        ErrorFeedback(ORQ(9)),
        "unbiased",
        levels=lambda v: reference.optimal_levels(v, 9),
        is_random=True,
    ),
    Row(
        "clip",
        Clip(Identity(), 1.5),
        "exact",
        lambda x, splits: reference.clip(x, splits, 1.5),
        digits=22,
    ),
    Row("dist-EF", ErrorFeedback(ScaledSign()), "contracting", kept=kept_by_signs),
    Row("dist-EF top-k", ErrorFeedback(TopK(0.1)), "contracting", kept=TOP),
    Row("dist-EF ternary", ErrorFeedback(Ternary(False)), "unbiased", is_random=True),
    Row(
        "dist-EF momentum",
        NesterovMomentum(ErrorFeedback(ScaledSign()), 0.9),
        "contracting",
        lambda x, splits: np.float32(0.9) * x + x,
        kept=kept_by_signs,
    ),
    # A second moment overflows long before.
    Row("variance", VarianceBased(), "late", largest=1e15),
    Row("variance, gaps", VarianceBased(1.1, 0.9, "delta"), "late", largest=1e15),
    Row("Strom", Strom(0.5), "late"),
    Row("hybrid, gaps", Hybrid(0.5, index_coding="delta"), "late", largest=1e15),
    Row(
        "Nesterov",
        NesterovMomentum(ErrorFeedback(Identity()), 0.5),
        "exact",
        lambda x, splits: np.float32(0.5) * x + x,
    ),
]
LAYOUTS = {
    "one": Layout.from_sizes([1]),
    "ones": Layout.from_sizes([1, 1, 1]),
    "tensors": Layout.from_sizes([35, 33, 1, 30, 1, 1, 2, 64, 64]),
    "buckets": Layout.from_sizes([100, 31], 32),
    "model": Layout.from_sizes([7, 90], "model"),
}

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def gradient_of(layout, seed=0):
    x = np.random.default_rng(seed).normal(size=layout.size).astype(np.float32)
    return x * reference.spread(
        np.float32(10.0) ** np.arange(-1, layout.num_blocks - 1).clip(-1, 2),
        layout.row_splits,
    ).astype(np.float32)


def moments_of(x):
    """Sums of squares of three terms, or of a hundred that cancel."""
    x = tf.convert_to_tensor(x)
    shares = tf.where(tf.range(x.shape[0]) % 5 > 0, 1 / 3, 100.0)
    return tf.minimum(shares * x * x, 1e38)


def compress(row, x, layout, **context):
    return row.compressor.compress(
        tf.constant(x),
        row.compressor.init(layout),
        layout,
        make_context(moments=moments_of(x), **context),
    )


def decoded(row, x, layout, **context):
    payload, _ = compress(row, x, layout, **context)
    return row.compressor.decompress(payload, layout).numpy()


def test_the_layouts_are_ragged():
    assert LAYOUTS["buckets"].row_splits == (0, 32, 64, 96, 128, 131)
    assert LAYOUTS["model"].row_splits == (0, 97)
    assert LAYOUTS["tensors"].row_splits[:4] == (0, 35, 68, 69)


@every_row
@every_layout
def test_payloads_are_as_declared_and_survive_the_wire(row, layout):
    payload, state = compress(row, gradient_of(layout), layout)
    fields = row.compressor.fields(layout)
    assert payload.keys() == fields.keys()
    for name, field in fields.items():
        if field.base is None:
            assert field.varies or payload[name].shape == [field.count], name
            assert payload[name].shape[0] <= field.count
            assert payload[name].dtype == field.dtype, name
        else:
            assert payload[name].dtype == tf.int32, name
            codes = reference.unpack(payload[name].numpy(), field.base, field.count)
            np.testing.assert_array_equal(
                payload[name], reference.pack(codes, field.base), name
            )
    words = messages.pack(payload, fields)
    if not messages.varies(fields):
        assert words.shape == [messages.message_words(fields)]
    again = messages.unpack(words, fields)
    for name, value in payload.items():
        assert bits(again[name]) == bits(value), name
    vector = row.compressor.decompress(again, layout)
    assert vector.dtype == tf.float32
    assert vector.shape == [layout.size]
    assert bits(vector) == bits(row.compressor.decompress(payload, layout))
    tf.nest.assert_same_structure(state, row.compressor.init(layout))
    for new, old in zip(
        tf.nest.flatten(state),
        tf.nest.flatten(row.compressor.init(layout)),
        strict=True,
    ):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)


@every_row
@every_layout
def test_what_is_agreed_on_is_declared(row, layout):
    asked = []

    def maximum(vector):
        asked.append(vector.shape[0])
        return vector

    compress(row, gradient_of(layout), layout, maximum=maximum)
    declared = [field.count for field in row.compressor.agreed(layout).values()]
    assert asked == declared


EXTREMES = {
    "zeros": lambda size, top: np.zeros(size),
    "negative zeros": lambda size, top: np.full(size, -0.0),
    "ones": lambda size, top: np.ones(size),
    "a constant": lambda size, top: np.full(size, -0.37),
    "largest": lambda size, top: np.resize([top, -top], size),
    "largest constant": lambda size, top: np.full(size, top),
    "smallest": lambda size, top: np.resize([1e-30, -1e-30], size),
    "denormals": lambda size, top: np.resize([1e-40, -1e-44, 0.0], size),
    "both ends": lambda size, top: np.resize([top, 1e-30, -0.0, 1e-40], size),
}


@every_row
@every_layout
@pytest.mark.parametrize("make", EXTREMES.values(), ids=EXTREMES)
def test_extremes_stay_finite(row, layout, make):
    x = make(layout.size, row.largest).astype(np.float32)
    state = row.compressor.init(layout)
    for step in range(3):
        context = make_context(
            step=step, previous_rate=0.1 if step else 0.0, moments=moments_of(x)
        )
        payload, state = row.compressor.compress(x, state, layout, context)
        vector = row.compressor.decompress(payload, layout).numpy()
        assert np.isfinite(vector).all()
        assert all(np.isfinite(part).all() for part in tf.nest.flatten(state))
        if row.kind != "sign":
            # Nothing grows: twenty times covers momentum (1.9 + 0.81 + ...).
            assert np.abs(vector).max() <= 20 * np.abs(x).max()


@every_row
def test_the_same_step_has_the_same_bits(row):
    layout = LAYOUTS["tensors"]
    x = gradient_of(layout)
    one, again = (decoded(row, x, layout, step=5, seed=3, rank=1) for _ in range(2))
    assert bits(one) == bits(again)


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.kind == "unbiased"], ids=lambda row: row.name
)
def test_random_numbers_differ_by_step_rank_and_seed(row):
    layout = LAYOUTS["model"]
    x = gradient_of(layout)
    contexts = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)]
    seen = {
        bits(decoded(row, x, layout, step=step, rank=rank, seed=seed))
        for step, rank, seed in contexts
    }
    assert len(seen) == len(contexts)


@pytest.mark.parametrize(
    "row", [r for r in ROWS if not r.is_random], ids=lambda row: row.name
)
def test_deterministic_rows_ask_for_no_random_numbers(row):
    layout = LAYOUTS["tensors"]
    x = gradient_of(layout)
    one = decoded(row, x, layout, step=0, rank=0, seed=0)
    assert bits(one) == bits(decoded(row, x, layout, step=9, rank=2, seed=8))


def of_kind(*kinds):
    rows = [row for row in ROWS if row.kind in kinds]
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


@of_kind("exact", "rounded")
@every_layout
def test_exact_rows_keep_everything(row, layout):
    x = gradient_of(layout)
    expected = row.target(x, layout.row_splits)
    np.testing.assert_allclose(
        decoded(row, x, layout), expected, rtol=2.0 ** (1 - row.digits), atol=0
    )
    if row.kind == "rounded":
        # Rounded to nearest: half a unit in the last place, and not exact.
        error = np.abs(decoded(row, x, layout) - x) / np.abs(x)
        assert error.max() <= 2.0**-row.digits
        assert layout.size < 10 or error.max() > 0


@of_kind("sign")
@every_layout
def test_sign_rows_keep_the_sign(row, layout):
    x = gradient_of(layout)
    np.testing.assert_array_equal(decoded(row, x, layout), np.sign(x))


@of_kind("contracting")
@every_layout
def test_contracting_rows_contract(row, layout):
    splits = layout.row_splits
    for seed in range(5):
        x = gradient_of(layout, seed)
        v = row.target(x, splits).astype(np.float64)
        left = np.sum((decoded(row, x, layout) - v) ** 2)
        whole, kept = np.sum(v**2), row.kept(v, splits)
        assert 0 < kept <= whole * (1 + 1e-12)
        assert left <= whole - kept + 1e-6 * whole


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if "ErrorFeedback" in repr(row.compressor)],
    ids=lambda row: row.name,
)
def test_error_feedback_rows_lose_nothing(row):
    layout = LAYOUTS["tensors"]
    payload, state = compress(row, gradient_of(layout), layout)
    while "residual" not in state:
        state = state["inner"]
    v = row.target(gradient_of(layout), layout.row_splits).astype(np.float32)
    # One rounding: that of the subtraction, whose operands both sides have.
    np.testing.assert_allclose(
        row.compressor.decompress(payload, layout) + state["residual"],
        v,
        rtol=1e-6,
        atol=1e-6 * np.abs(v).max(),
    )


@of_kind("unbiased")
def test_unbiased_rows_are_unbiased(row):
    draws = 4000
    layout = Layout.from_sizes([40, 1, 27], None)
    x = gradient_of(layout, 7)
    x[3], x[41] = 0.0, -0.0
    splits = layout.row_splits

    @tf.function
    def means(start):
        def draw(step):
            payload, _ = row.compressor.compress(
                tf.constant(x),
                row.compressor.init(layout),
                layout,
                make_context(step=step, seed=11),
            )
            return row.compressor.decompress(payload, layout)

        return tf.map_fn(draw, start + tf.range(draws), fn_output_signature=tf.float32)

    samples = means(0).numpy().astype(np.float64)
    target = row.target(x, splits).astype(np.float64)
    scale = reference.spread(reference.largest(target, splits), splits)
    beside = []
    for block in reference.blocks(splits):
        levels = np.asarray(row.levels(target[block]), np.float64)
        k = np.searchsorted(levels[1:-1], target[block], side="right")
        beside.append([levels[k], levels[k + 1]])
    low, high = np.concatenate(beside, 1)
    # Only the two levels beside an element are ever sent for it.
    distance = np.minimum(np.abs(samples - low), np.abs(samples - high))
    assert (distance <= 1e-6 * scale).all()
    deviation = np.sqrt(np.maximum((target - low) * (high - target), 0))
    error = samples.mean(0) - target
    sure = deviation < 1e-3 * scale
    assert (np.abs(error[sure]) <= 1e-4 * scale[sure]).all()
    z = error[~sure] / (deviation[~sure] / np.sqrt(draws))
    # 5 deviations: one in 30,000 runs of 60 elements; the seed is fixed besides.
    assert len(z) > 10
    assert np.abs(z).max() < 5
    # A wrong variance shows in the sum of squares, chi-square of len(z) degrees.
    assert abs(np.sum(z**2) - len(z)) < 5 * np.sqrt(2 * len(z))
    variance = samples[:, ~sure].var(0) / deviation[~sure] ** 2
    assert abs(variance.mean() - 1) < 0.05


@every_row
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_compiled_steps_equal_eager_ones_and_trace_once(row, jit_compile):
    layout = LAYOUTS["tensors"]
    compressor = row.compressor

    @tf.function(jit_compile=jit_compile)
    def step_of(x, state, step, rank, previous_rate):
        context = make_context(
            step, 5, rank, previous_rate=previous_rate, moments=moments_of(x)
        )
        payload, state = compressor.compress(x, state, layout, context)
        vector = compressor.decompress(payload, layout)
        words = messages.pack(payload, compressor.fields(layout))
        return payload, words, vector, state

    state = compressor.init(layout)
    for step in range(3):
        x = gradient_of(layout, step)
        x[[0, 5, 40]] = 0.0, -0.0, 0.0
        rate = tf.constant(0.1 if step else 0.0)
        payload, _, vector, new_state = step_of(
            tf.constant(x), state, tf.constant(step), tf.constant(1), rate
        )
        context = make_context(step, 5, 1, previous_rate=rate, moments=moments_of(x))
        expected, expected_state = compressor.compress(
            tf.constant(x), state, layout, context
        )
        for name, field in compressor.fields(layout).items():
            if name == "indices":
                # The order of the largest is free; what is decoded is not.
                sent = [
                    reference.unpack(p[name].numpy(), field.base, field.count)
                    for p in (payload, expected)
                ]
                assert set(sent[0]) == set(sent[1])
            elif field.base is not None:
                np.testing.assert_array_equal(payload[name], expected[name])
        np.testing.assert_allclose(
            vector, compressor.decompress(expected, layout), rtol=1e-5, atol=0
        )
        for new, old in zip(
            tf.nest.flatten(new_state), tf.nest.flatten(expected_state), strict=True
        ):
            np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-4)
        state = new_state
    assert step_of.experimental_get_tracing_count() == 1


@every_row
@every_layout
def test_a_gradient_in_parts_is_compressed_as_the_flat_one(row, layout):
    x = gradient_of(layout)
    parts = SplitVector(tf.split(tf.constant(x), layout.sizes))
    for compressor in {row.compressor, fused(row.compressor)}:
        state = compressor.init(layout)
        for step in range(2):
            context = make_context(step, 5, 1, previous_rate=0.1, moments=moments_of(x))
            payload, new_state = compressor.compress(parts, state, layout, context)
            expected, state = compressor.compress(x, state, layout, context)
            assert payload.keys() == expected.keys()
            for name, value in expected.items():
                assert bits(payload[name]) == bits(value), name
            for new, old in zip(
                tf.nest.flatten(new_state), tf.nest.flatten(state), strict=True
            ):
                assert bits(new) == bits(old)


@every_row
@every_layout
def test_parts_that_are_decoded_have_the_sizes_of_the_layout(row, layout):
    payload, _ = compress(row, gradient_of(layout), layout)
    vector = row.compressor.decompress(payload, layout)
    whole = Layout(layout.row_splits)
    assert bits(vector) == bits(row.compressor.decompress(payload, whole))
    assert isinstance(row.compressor.decompress(payload, whole), tf.Tensor)
    payloads = {name: tf.stack([value, value]) for name, value in payload.items()}
    mean = row.compressor.mean(payloads, layout)
    assert bits(mean) == bits(row.compressor.mean(payloads, whole))
    for decoded in (vector, mean):
        if isinstance(decoded, SplitVector):
            assert [t.shape for t in decoded] == [[size] for size in layout.sizes]
    inner = row.compressor
    while hasattr(inner, "compressor"):
        inner = inner.compressor
    if isinstance(inner, (UniformLevels, Codebook, ScaledSign)):
        assert isinstance(vector, SplitVector)


# An element that is not finite, or so large that something after it overflows.
BAD = {
    "fine": 1.0,
    "large": 1e5,
    "largest": 3.4e38,
    "infinite": np.inf,
    "minus infinite": -np.inf,
    "nan": np.nan,
}


@every_row
@pytest.mark.parametrize("layout", ["one", "tensors", "buckets"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_finite_is_said_of_the_gradient_and_of_the_payload(row, layout, in_parts):
    layout = LAYOUTS[layout]
    for number in BAD.values():
        for place in {0, layout.size // 2, layout.size - 1}:
            x = gradient_of(layout)
            x[place] = number
            given = tf.constant(x)
            if in_parts:
                given = SplitVector(tf.split(given, layout.sizes))
            for compressor in {row.compressor, fused(row.compressor)}:
                state = compressor.init(layout)
                context = make_context(1, 5, 1, moments=moments_of(x))
                arguments = given, state, layout, context
                payload, new_state, finite = compressor.compress_checked(*arguments)
                assert finite.shape == [] and finite.dtype == tf.bool
                assert finite == all_finite(x, payload)
                plain, plain_state = compressor.compress(*arguments)
                for a, b in zip(
                    tf.nest.flatten((payload, new_state)),
                    tf.nest.flatten((plain, plain_state)),
                    strict=True,
                ):
                    assert bits(a) == bits(b)


def all_finite(x, payload):
    floats = [
        v.numpy().astype(np.float64) for v in payload.values() if v.dtype != "int32"
    ]
    return all(np.isfinite(numbers).all() for numbers in [x, *floats])


@pytest.mark.parametrize("name", ["residual", "momentum"])
@pytest.mark.parametrize("number", [3.4e38, np.inf, np.nan])
def test_finite_is_said_where_the_state_overflows(name, number):
    compressor = NesterovMomentum(ErrorFeedback(ScaledSign()), 0.9)
    layout = LAYOUTS["tensors"]
    x = np.full(layout.size, 3e38, np.float32)
    state = compressor.init(layout)
    bad = tf.tensor_scatter_nd_update(tf.zeros([layout.size]), [[7]], [number])
    if name == "momentum":
        state = {**state, "momentum": bad}
    else:
        state = {**state, "inner": {**state["inner"], "residual": bad}}
    context = make_context(1, 5, 1, previous_rate=0.1)
    for alone in (compressor, fused(compressor)):
        # With the momentum alone, 0.9 * 3e38 + 3e38 overflows.
        for gradient, fits in ((x, False), (x / 3, number == np.float32(3.4e38))):
            payload, _, finite = alone.compress_checked(
                tf.constant(gradient), state, layout, context
            )
            assert finite == all_finite(gradient, payload)
            if not fits:
                assert not finite


def test_a_scale_that_another_worker_made_infinite_is_not_finite():
    layout = LAYOUTS["tensors"]
    context = make_context(maximum=lambda vector: vector + np.inf)
    for compressor in (Ternary(), fused(Clip(Ternary()))):
        arguments = gradient_of(layout), compressor.init(layout), layout, context
        assert not compressor.compress_checked(*arguments)[2]


@every_row
def test_finite_is_said_inside_functions(row):
    layout = LAYOUTS["tensors"]
    compressor = fused(row.compressor)

    @tf.function
    def finite(tensors):
        x, state = SplitVector(tensors), compressor.init(layout)
        context = make_context(1, 5, 1, moments=moments_of(x))
        return compressor.compress_checked(x, state, layout, context)[2]

    x = gradient_of(layout)
    assert finite(tf.split(x, layout.sizes))
    x[40] = np.nan
    assert not finite(tf.split(x, layout.sizes))


def test_the_table_has_every_compressor():
    def names_in(compressor):
        inner = getattr(compressor, "compressor", None)
        return {type(compressor).__name__} | (names_in(inner) if inner else set())

    tested = set().union(*(names_in(row.compressor) for row in ROWS))
    from tfgradcomp import compressors

    public = {
        name
        for name in compressors.__all__
        if isinstance(getattr(compressors, name), type)
        and issubclass(getattr(compressors, name), Compressor)
    }
    assert tested == public - {"Compressor", "UniformLevels", "Codebook"}


FUSED = [row for row in ROWS if fused(row.compressor) is not row.compressor]


def test_what_is_fused():
    assert {row.name for row in FUSED} == {
        "signum",
        "signum in warm-up",
        "terngrad",
        "dist-EF",
        "dist-EF momentum",
    }


@pytest.mark.parametrize("row", FUSED, ids=lambda row: row.name)
@every_layout
def test_fused_steps_equal_the_links_of_the_chain_bit_for_bit(row, layout):
    alone, chain = fused(row.compressor), row.compressor
    state = chain.init(layout)
    tf.nest.assert_same_structure(state, alone.init(layout))
    for step, rate in enumerate([0.1, 0.2, 0.0, 0.05]):
        x = gradient_of(layout, step)
        x[step % layout.size] = 0.0
        context = make_context(step, 5, 1, rate=rate, previous_rate=0.1)
        payload, new_state = alone.compress(tf.constant(x), state, layout, context)
        expected, state = chain.compress(tf.constant(x), state, layout, context)
        assert payload.keys() == expected.keys()
        for name, value in expected.items():
            assert bits(payload[name]) == bits(value), name
        tf.nest.assert_same_structure(new_state, state)
        for new, old in zip(
            tf.nest.flatten(new_state), tf.nest.flatten(state), strict=True
        ):
            assert bits(new) == bits(old)
