"""quantization_error.py: closed forms against sums over all outcomes, and its files."""

import csv

import numpy as np
import pytest

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

from tests.benchmarks.scripts import import_script, run  # noqa: E402

script = import_script("quantization_error")
METHODS = script.methods()
SIZE = 2048


def random_source():
    """A full bucket and a short one, heavy-tailed and off centre."""
    rng = np.random.default_rng(3)
    values = rng.standard_t(3, SIZE + 700) + 0.2
    return script.Source.of([values.astype(np.float32)])


def buckets_of(source):
    values = source.values.astype(np.float64)
    return [values[:SIZE], values[SIZE:]]


def outcomes(v, levels):
    """The error of v, and the probability of each level, one element at a time."""
    error, used = 0.0, np.zeros(len(levels))
    for x in v:
        probability = np.zeros(len(levels))
        if not levels[0] < x < levels[-1]:
            probability[0 if x <= levels[0] else -1] = 1
        else:
            above = int(np.argmax(levels > x))
            share = (x - levels[above - 1]) / (levels[above] - levels[above - 1])
            probability[above - 1 : above + 1] = 1 - share, share
        error += (probability * (levels - x) ** 2).sum()
        used += probability
    return error, used


def even(norm):
    def levels(v, s):
        return np.linspace(-norm(v), norm(v), s)

    return levels


def clipped(v, s):
    limit = min(2.5 * v.std(), np.abs(v).max())
    return np.linspace(-limit, limit, s)


def quantiles(v, s):
    ranks = np.floor(np.arange(s) * (v.size - 1) / (s - 1) + 0.5).astype(int)
    return np.sort(v)[ranks]


def best_of_three(v, s):
    """The middle level with the smallest error, of all elements."""
    low, high = v.min(), v.max()
    inside = np.sort(v)

    def error(b):
        below, above = v[v < b], v[v >= b]
        return ((below - low) * (b - below)).sum() + (
            (above - b) * (high - above)
        ).sum()

    return np.array([low, min(inside, key=error), high])


def rooted(v):
    return np.sqrt((v**2).sum())


def largest(v):
    return np.abs(v).max()


LEVELS = {
    "ORQ-3": best_of_three,
    "QSGD-3, max": even(largest),
    "QSGD-9, max": even(largest),
    "QSGD-5, l2": even(rooted),
    "Linear-5": quantiles,
    "TernGrad": clipped,
    "TernGrad, not clipped": even(largest),
}


@pytest.mark.parametrize("name", LEVELS)
def test_random_rounding_against_a_sum_over_outcomes(name):
    source, method = random_source(), METHODS[name]
    found = script.measure(method, source)
    expected = [outcomes(v, LEVELS[name](v, method.levels)) for v in buckets_of(source)]
    errors, used = (np.array(part) for part in zip(*expected, strict=True))
    np.testing.assert_allclose(found.errors, errors, rtol=1e-5)
    # A level may be any of two elements that are as good; errors tell, counts do not.
    if name != "ORQ-3":
        frequencies = used.sum(0) / used.sum()
        np.testing.assert_allclose(found.frequencies, frequencies, atol=1e-5)


def test_two_levels_without_chance():
    source = random_source()
    sides, signs = [], []
    for v in buckets_of(source):
        above = v >= v.mean()
        sides.append(above.sum() * v[above].var() + (~above).sum() * v[~above].var())
        signs.append(((v - np.where(v >= 0, 1, -1) * np.abs(v).mean()) ** 2).sum())
    found = script.measure(METHODS["BinGrad-b"], source)
    np.testing.assert_allclose(found.errors, sides, rtol=1e-5)
    found = script.measure(METHODS["scaled sign"], source)
    np.testing.assert_allclose(found.errors, signs, rtol=1e-5)
    share = np.mean(source.values >= 0)
    np.testing.assert_allclose(found.frequencies, [1 - share, share])
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    assert found.utilisation == pytest.approx(entropy)


@pytest.mark.parametrize("name", ["ORQ-9", "Linear-3", "BinGrad-pb", "BinGrad-b"])
def test_closed_form_is_the_mean_of_what_is_decoded(name):
    # One element many times over: each bucket decodes it anew.
    v = np.tile(random_source().values[:SIZE], 64)
    source = script.Source.of([v])
    errors = np.add.reduceat(
        (script.quantized(METHODS[name], source) - v.astype(np.float64)) ** 2,
        source.layout.row_splits[:-1],
    )
    expected = script.measure(METHODS[name], source).errors
    if not METHODS[name].is_random:
        np.testing.assert_allclose(errors, expected, rtol=1e-5)
    deviation = errors.std() / np.sqrt(errors.size)
    assert abs(errors.mean() - expected.mean()) < 4 * deviation + 1e-5 * errors.mean()


def test_every_vector_has_buckets_of_its_own():
    source = script.Source.of([np.zeros(SIZE), np.zeros(SIZE + 1), np.zeros(3)])
    assert source.layout.row_splits == (0, SIZE, 2 * SIZE, 2 * SIZE + 1, 2 * SIZE + 4)


@pytest.mark.slow
def test_the_files_and_what_they_say(tmp_path):
    few = ("--elements", 40960, "--images", 256, "--epochs", 1)
    code, output, errors = run("quantization_error.py", *few, "--output", tmp_path)
    assert code == 0, errors
    with open(tmp_path / "quantization_error.csv", newline="") as file:
        rows = {(row["source"], row["method"]): row for row in csv.DictReader(file)}
    names = {source for source, _ in rows}
    assert set(rows) == {(source, method) for source in names for method in METHODS}
    assert {name for name in names if "," in name} == {
        f"{network}, {when}"
        for network in ("CNN", "ResNet")
        for when in ("start", "early", "end")
    }
    # One bit of a normal number: what is lost is 1 - 2 / pi.
    lost = float(rows["normal", "scaled sign"]["error"])
    assert lost == pytest.approx(1 - 2 / np.pi, abs=0.01)
    # What three levels between -max and max lose of a number: max |v| - v^2.
    rng = np.random.default_rng(0)
    v = rng.standard_normal(40960).reshape(-1, SIZE)
    lost = (np.abs(v).max(1, keepdims=True) * np.abs(v) - v**2).sum() / (v**2).sum()
    assert float(rows["normal", "QSGD-3, max"]["error"]) == pytest.approx(lost, 1e-4)
    for row in rows.values():
        assert 0 <= float(row["utilisation"]) <= 1 + 1e-9
    assert int(rows["ResNet, end", "ORQ-3"]["elements"]) == 2 * 77_754
    assert "| ORQ-3 | QSGD-3, max | 9 of 9 | 100.00 % of" in output
