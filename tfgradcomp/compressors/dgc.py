"""Deep Gradient Compression: top-k of accumulated momentum."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compat.xla import in_xla
from tfgradcomp.compressors.base import Compressed, Compressor, Identity, all_finite
from tfgradcomp.compressors.momentum import check_momentum
from tfgradcomp.compressors.top_k import check_ratio, check_size
from tfgradcomp.core import Context, Field, Fields, Layout, Vector
from tfgradcomp.core.arguments import check_integer


@dataclass(frozen=True)
class DGC(Compressor):
    r"""Sends the largest elements of the momentum that it has accumulated.

    \( u \leftarrow \mu u + g \), \( v \leftarrow v + u \). The k elements of v with the
    largest magnitude are sent, with their indices. There both u and v are zero again
    (momentum factor masking).

    With `clip_norm` c, g is first multiplied by \( \min(1, \sqrt{N} c / \|g\|) \).

    With `density_steps` s, step t sends the share \( \max(4^{-1 - \lfloor t / s
    \rfloor}, ratio) \) of the elements: 25 %, 6.25 %, 1.56 %, 0.39 %, ... for s steps
    each.

    Attributes:
        ratio: Share of the elements that is sent, in (0, 1]; at least one element.
        momentum: \( \mu \) in [0, 1).
        clip_norm: c, positive, in the units of a mean gradient; None for no clipping.
        density_steps: s, or 0 for the same density in all steps.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1)
        optimizer = CompressedOptimizer(inner, DGC(0.01), Mean(DGC(0.01)))
        ```

    References:
        Lin, Han, Mao, Wang, Dally, Deep Gradient Compression: Reducing the
        Communication Bandwidth for Distributed Training, 2018, Section 3, Appendix C.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip_norm: float | None = None
    density_steps: int = 0

    is_blockwise: ClassVar[bool] = False

    def __post_init__(self):
        check_ratio(self.ratio)
        check_momentum(self.momentum)
        check_integer("density_steps", self.density_steps, 0)
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ValueError(
                "clip_norm must be positive and finite, or None for no clipping. "
                f"Received: clip_norm={self.clip_norm!r}"
            )

    @property
    def densities(self) -> tuple[float, ...]:
        """Shares of the elements that are sent, one after the other."""
        powers = (0.25**stage for stage in itertools.count(1))
        ramp = itertools.takewhile(lambda share: share > self.ratio, powers)
        return (*(ramp if self.density_steps else ()), self.ratio)

    def _counts(self, layout: Layout) -> list[int]:
        """Returns the number of elements for each of `densities`."""
        return [max(1, math.ceil(share * layout.size)) for share in self.densities]

    @override
    def fields(self, layout):
        check_size(self, layout)
        most, *less = self._counts(layout)
        # Pairs of an index and the bits of a float32.
        return {"pairs": Field(2 * most, dtype="int32", variable_length=bool(less))}

    @override
    def init(self, layout):
        return {name: tf.zeros([layout.size]) for name in ("momentum", "residual")}

    def velocity(
        self, x: Vector, state: Fields, layout: Layout, context: Context
    ) -> tf.Tensor:
        """Returns the new u."""
        if self.clip_norm is not None:
            squares = ops.block_statistics(
                x, (0, layout.size), ("sum_of_squares",)
            ).sum_of_squares[0]
            most = self.clip_norm * math.sqrt(context.num_workers)
            norm = tf.maximum(tf.sqrt(squares), most)
            x = x * tf.cast(tf.math.divide_no_nan(most, norm), tf.float32)
        return ops.add_scaled(x, state["momentum"], tf.constant(self.momentum))

    @override
    def compress(self, x, state, layout, context):
        u = self.velocity(x, state, layout, context)
        v = ops.add_scaled(u, state["residual"], tf.constant(1.0))
        indices = self._largest(v, layout, context.step)
        values = tf.gather(v, tf.maximum(indices, 0))
        pairs = tf.stack([indices, tf.bitcast(values, tf.int32)], 1)
        new = {"momentum": u, "residual": v}
        state = {
            name: context.unless_zero_lr(ops.clear_elements(new[name], indices), old)
            for name, old in state.items()
        }
        # A step sends the largest element. NaN and infinities are larger than numbers.
        is_finite = all_finite([values])
        return Compressed({"pairs": tf.reshape(pairs, [-1])}, state, is_finite)

    def _largest(self, v: tf.Tensor, layout: Layout, step: tf.Tensor) -> tf.Tensor:
        """Returns the indices of this step's elements, int32 `[k]`."""
        counts = self._counts(layout)
        if len(counts) == 1:
            return ops.find_largest(v, counts[0])
        stage = tf.minimum(step // self.density_steps, len(counts) - 1)
        k = tf.gather(counts, stage)
        if not in_xla():
            return ops.find_largest(v, k)
        # Sizes are static in XLA.
        magnitude = tf.bitcast(v, tf.int32) & (2**31 - 1)
        indices = tf.math.top_k(magnitude, counts[0]).indices
        return tf.where(tf.range(counts[0]) < k, indices, ops.NOTHING)

    @override
    def elements_sent(self, payload, layout):
        indices = payload["pairs"][::2]
        return tf.math.count_nonzero(indices != ops.NOTHING, dtype=tf.int32)

    @override
    def decompress(self, payload, layout):
        return self.mean({k: v[tf.newaxis] for k, v in payload.items()}, layout)

    @override
    def mean(self, payloads, layout):
        pairs = payloads["pairs"]
        indices, bits = tf.unstack(tf.reshape(pairs, [pairs.shape[0], -1, 2]), axis=2)
        return ops.mean_of_pairs(indices, tf.bitcast(bits, tf.float32), layout.size)

    @override
    def uncompressed(self):
        return _Velocity(compressor=self)

    @override
    def uncompressed_step(self):
        return _Velocity(compressor=self, has_residual=True)


@dataclass(frozen=True)
class _Velocity(Identity):
    """Sends u, the momentum itself; a residual waits."""

    compressor: DGC = field(kw_only=True)
    has_residual: bool = field(default=False, kw_only=True)

    @override
    def init(self, layout):
        state = self.compressor.init(layout)
        return state if self.has_residual else {"momentum": state["momentum"]}

    @override
    def compress(self, x, state, layout, context):
        u = self.compressor.velocity(x, state, layout, context)
        payload, _, is_finite = super().compress(u, (), layout, context)
        momentum = context.unless_zero_lr(u, state["momentum"])
        return Compressed(payload, {**state, "momentum": momentum}, is_finite)
