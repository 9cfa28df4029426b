"""What every compressor promises of its kind: exact, unbiased, contracting, ..."""

import numpy as np
import pytest

from tests import reference
from tests.compressors.contracts import decoded, every_layout, of_kind
from tests.helpers import bits
from tests.selection import rows_by_compressor
from tfgradcomp.callbacks import measures
from tfgradcomp.core import Layout
from tfgradcomp.testing.inputs import LAYOUTS, first_step, gradient_of, make_context
from tfgradcomp.testing.promises import draw


@of_kind("unbiased")
def test_random_numbers_differ_by_step_rank_and_seed(row):
    layout = LAYOUTS["model"]
    x = gradient_of(layout)
    contexts = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)]
    seen = {
        bits(decoded(row, x, layout, step=step, rank=rank, seed=seed))
        for step, rank, seed in contexts
    }
    assert len(seen) == len(contexts)


@rows_by_compressor(lambda row: not row.is_random)
def test_deterministic_rows_ask_for_no_random_numbers(row):
    layout = LAYOUTS["tensors"]
    x = gradient_of(layout)
    one = decoded(row, x, layout, step=0, rank=0, seed=0)
    assert bits(one) == bits(decoded(row, x, layout, step=9, rank=2, seed=8))


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


@of_kind("sign or zero")
@every_layout
def test_abstaining_rows_keep_the_sign_or_send_zero(row, layout):
    x = gradient_of(layout)
    votes = decoded(row, x, layout)
    np.testing.assert_array_equal(votes[votes != 0], np.sign(x)[votes != 0])
    # Someone votes, and in a block of many elements someone abstains.
    assert votes.any()
    assert layout.size < 10 or (votes == 0).any()


@pytest.mark.sample(14)
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


@rows_by_compressor(lambda row: "residual" in row.state and row.kind != "late")
def test_error_feedback_rows_lose_nothing(row):
    layout = LAYOUTS["tensors"]
    payload, state, _ = first_step(row.compressor, gradient_of(layout), layout)
    if row.compressor.hears_reply:
        update = row.compressor.decompress(payload, layout)
        state = row.compressor.received(state, update, layout, make_context())
    (residual,) = measures.residuals(row.compressor, state, layout)
    v = row.target(gradient_of(layout), layout.row_splits).astype(np.float32)
    # One rounding: that of the subtraction, whose operands both sides have.
    np.testing.assert_allclose(
        row.compressor.decompress(payload, layout) + residual,
        v,
        rtol=1e-6,
        atol=1e-6 * np.abs(v).max(),
    )


@pytest.mark.sample(2)
@of_kind("unbiased")
def test_unbiased_rows_are_unbiased(row):
    layout, draws = Layout.from_sizes([40, 1, 27]), 4000
    x = gradient_of(layout, 7)
    x[3], x[41] = 0.0, -0.0
    splits = layout.row_splits
    samples = draw(row.method, x, layout, draws)
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
