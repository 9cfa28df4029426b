"""Promises of some compressors: unbiased, or contracting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfgradcomp.core import Layout
from tfgradcomp.methods import Method
from tfgradcomp.testing.errors import require
from tfgradcomp.testing.inputs import decoded_step, gradient_of

Target = Callable[[np.ndarray, Layout], np.ndarray]
"""Function from a first gradient to the vector that its payload stands for."""

_DRAWS = 4000
# One in 30,000 runs of 60 elements is further off; the seed is fixed besides.
_DEVIATIONS = 5


def draw(method: Method, x: np.ndarray, layout: Layout, draws: int) -> np.ndarray:
    """Returns the decoded payloads of first steps that differ in their coins alone."""

    @tf.function(autograph=False)
    def samples():
        return tf.map_fn(
            lambda step: decoded_step(method.compressor, x, layout, step=step, seed=11),
            tf.range(draws),
            fn_output_signature=tf.float32,
        )

    return samples().numpy().astype(np.float64)


def decoded_payloads_are_unbiased(method: Method, target: Target) -> None:
    """Checks that the mean of many decoded payloads is the target."""
    layout = Layout.from_sizes([40, 1, 27])
    x = gradient_of(layout, 7)
    x[3], x[41] = 0.0, -0.0
    samples = draw(method, x, layout, _DRAWS)
    v = target(x, layout).astype(np.float64)
    largest = np.maximum.reduceat(np.abs(v), layout.row_splits[:-1])
    scale = np.repeat(largest, np.diff(layout.row_splits))
    error = samples.mean(0) - v
    # The second term is for values that are drawn too seldom to be seen.
    bound = _DEVIATIONS * samples.std(0) / _DRAWS**0.5 + _DEVIATIONS**2 * scale / _DRAWS
    worst = np.argmax(np.abs(error) - bound)
    require(
        np.abs(error[worst]) <= bound[worst],
        f"the mean of {_DRAWS} draws must be {v[worst]:.6g} at element {worst}, within "
        f"{bound[worst]:.2g}. Received: mean={samples[:, worst].mean():.6g}",
    )


def payloads_keep_a_part_of_the_gradient(
    method: Method, layout: Layout, target: Target
) -> None:
    """Checks that less than the target is lost, in squared length and on average."""
    lost = []
    for seed in range(5):
        x = gradient_of(layout, seed)
        v = target(x, layout).astype(np.float64)
        vector = decoded_step(method.compressor, x, layout, step=seed).numpy()
        lost.append(np.sum((vector - v) ** 2) / np.sum(v**2))
    require(
        np.mean(lost) <= 1 + 1e-6,
        "payloads must lose less than the gradient, in squared length and on average. "
        f"Received: lost={np.mean(lost):.4g} of its squared length",
    )
