"""Zero codes, and the length and angle of clipped gradients, layer by layer."""

import functools

import numpy as np
import tensorflow as tf
from terngrad_workers import encode

import tfgradcomp
from tfgradcomp.compressors import Clip, Ternary
from tfgradcomp.core import Context, Layout

CLIP = 2.5
# The kernels among the weights of LeNet.
LAYERS = {"conv 1": 0, "conv 2": 2, "dense 1": 4, "last": 6}
MEASURED = ("zeros", "zeros_unclipped", "idle", "length", "degrees")
NORMAL_SIZE = 65_536  # About as many as dense 1 has.


def describe(vectors, layout):
    """Return TernGrad's effect on the gradients of workers, block by block.

    Args:
        vectors: The gradient of each worker, float32 `[layout.size]`.
        layout: The blocks.

    Returns:
        Dict of arrays `[num_blocks]`, means over the workers: the shares of codes that
        are zero, with clipping and without, and of elements that are zero before; the
        length of the clipped gradient over that of the gradient, and the angle
        between the two in degrees.
    """
    splits = layout.row_splits[:-1]
    widths = np.diff(layout.row_splits)
    clip = Clip(Ternary(), CLIP)
    context = _context(0, len(vectors))
    found = {name: [] for name in MEASURED}
    found["zeros"] = [np.add.reduceat(c, splits) for c in _zeros(clip, vectors, layout)]
    found["zeros_unclipped"] = [
        np.add.reduceat(c, splits) for c in _zeros(Ternary(), vectors, layout)
    ]
    found["idle"] = [
        np.add.reduceat(v.numpy() == 0, splits, dtype=float) for v in vectors
    ]
    for name in ("zeros", "zeros_unclipped", "idle"):
        found[name] = [counts / widths for counts in found[name]]
    for vector in vectors:
        clipped = clip.transform(vector, (), layout, context)
        g, f = vector.numpy().astype(float), clipped.numpy().astype(float)
        gg, ff, fg = (np.add.reduceat(p, splits) for p in (g * g, f * f, f * g))
        # A layer may have no gradient from one image: no length, and no direction.
        with np.errstate(invalid="ignore"):
            found["length"].append(np.sqrt(ff / gg))
            cosine = np.minimum(fg / np.sqrt(ff * gg), 1)
            found["degrees"].append(np.degrees(np.arccos(cosine)))
    return {name: np.nanmean(values, 0) for name, values in found.items()}


def _zeros(compressor, vectors, layout):
    """Yield 1.0 for each element whose code is zero, of one worker after the other."""
    compressor = compressor.fused()
    contexts = [_context(rank, len(vectors)) for rank in range(len(vectors))]
    for payload in encode(compressor, vectors, layout, contexts):
        codes = tfgradcomp.ops.unpack_codes(payload["codes"], 3, layout.size)
        yield (codes.numpy() == 1).astype(float)


def _context(rank, workers):
    zero, one = tf.constant(0, tf.int64), tf.constant(1.0)
    return Context(zero, zero, rank, workers, one, one)


@functools.cache
def normal():
    """Return the figures of a block of normal numbers."""
    drawn = np.random.default_rng(0).standard_normal(NORMAL_SIZE).astype(np.float32)
    found = describe([tf.constant(drawn)], Layout((0, NORMAL_SIZE)))
    return {name: float(values[0]) for name, values in found.items()}
