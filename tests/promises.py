"""What the payload of a method's first step stands for, and what is kept of it.

Functions of a vector and its row splits, or of one block, for `tests/methods.py`.
"""

import numpy as np

from tests import reference


def clipped(factor):
    """Clips each block to a multiple of its deviation."""
    return lambda x, splits: reference.clip(x, splits, factor)


def clipped_to(norm):
    """Shortens a vector to a norm."""
    return lambda x, splits: reference.clip_norm(x, norm)


def nesterov(momentum):
    """The first step of Nesterov momentum."""
    return lambda x, splits: np.float32(momentum) * x + x


def damped(momentum):
    """The first step of a moving average."""
    return lambda x, splits: np.float32(1 - momentum) * x


def saturated(x, splits):
    """Clips each block to the levels of BinGrad-pb."""
    blocks = [x[block] for block in reference.blocks(splits)]
    return np.concatenate([np.clip(v, *reference.symmetric_levels(v)) for v in blocks])


def kept_by_signs(v, splits):
    """Sum over blocks of ||v||_1^2 / d: what a scaled sign takes of ||v||_2^2."""
    return sum(np.sum(np.abs(v[b])) ** 2 / len(v[b]) for b in reference.blocks(splits))


def kept_by_levels(bits):
    """A part of what signs keep, by the level nearest to the mean magnitude."""
    part = reference.kept_by_codebook(bits)
    return lambda v, splits: part * kept_by_signs(v, splits)


def kept_by_chunks(k, chunk):
    """The mean magnitude of the largest of each chunk, but for its last bits."""

    def kept(v, splits):
        sent = reference.largest_of_chunks(v, splits, k, chunk)
        return 0.9999 * sum(np.sum(np.abs(v[j])) ** 2 / len(j) for j in sent)

    return kept


def kept_by_a_tenth(v, splits):
    """A tenth of the elements, those of largest magnitude, has a tenth at least."""
    return np.sum(v**2) * max(1, np.ceil(0.1 * len(v))) / len(v)


def kept_by_means(v, splits):
    """Sum over blocks of the squared length of the means of two sides."""
    return np.sum(reference.bingrad_b(v, splits) ** 2)


def kept_by_two_means(v, splits):
    """The signs' two means of each column keep more than a scale of the vector."""
    return kept_by_signs(v, [0, len(v)])


def kept_by_a_fit(v, splits):
    """Whatever was drawn, a fit takes away nothing; `test_fitted.py` says how much."""
    return 1e-12 * np.sum(v**2)


def optimal(count, sweeps=0):
    """The levels of ORQ."""
    return lambda v: reference.optimal_levels(v, count, sweeps)


def in_float16(levels_of):
    """The levels as they travel in float16."""
    return lambda v: reference.float16_levels(levels_of(v))


def even(count, norm="max"):
    """Evenly spaced levels, up to a norm of the block."""
    return lambda v: reference.even_levels(v, count, norm)


def quantiles(count):
    """Levels at evenly spaced quantiles."""
    return lambda v: reference.quantile_levels(v, count)


def ends(v):
    """Two levels, plus and minus the largest magnitude."""
    return np.abs(v).max() * np.array([-1, 1])
