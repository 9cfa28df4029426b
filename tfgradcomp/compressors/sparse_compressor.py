"""The common part of compressors that send a word for each of a few elements."""

from __future__ import annotations

import abc
import numbers
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp import ops
from tfgradcomp.compressors import index_coding
from tfgradcomp.compressors.auto_threshold import AUTO, find_thresholds
from tfgradcomp.compressors.base import Compressed, Compressor, Identity
from tfgradcomp.core import Context, Field, Fields, Layout, Vector
from tfgradcomp.core.arguments import check_choice

_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True)
class SparseCompressor(Compressor):
    """Sends the elements that a rule selects; the others wait in the residual.

    Subclasses have an attribute `index_coding`: with `"fixed"` a word holds an
    element's index, with `"delta"` a shorter field holds the gap to the element before
    (`tfgradcomp.compressors.index_coding`).

    Attributes:
        value_bits: Bits of an element besides its index: 1, the sign, or 4.
    """

    value_bits: ClassVar[int] = 1
    most_elements: ClassVar[int | None] = 2**ops.INDEX_BITS - 1

    def __post_init__(self):
        check_choice("index_coding", self.index_coding, index_coding.CODINGS)

    @override
    def fields(self, layout):
        header = 1 if self.index_coding == "delta" else 0
        return {
            "words": Field(header + layout.size, dtype="int32", variable_length=True)
        }

    @override
    def init(self, layout):
        names = ("residual", "variance") if self.needs_second_moments else ("residual",)
        return {name: tf.zeros([layout.size]) for name in names}

    @override
    def uncompressed_step(self):
        return _Waiting(compressor=self)

    def message(self, words: tf.Tensor) -> tf.Tensor:
        """Returns the field `words` for the words of the elements that are sent."""
        return index_coding.encode(words, self.index_coding, self.value_bits)

    def words_of(self, messages: tf.Tensor) -> tf.Tensor:
        """Returns the words that messages `[N, any]` were made of."""
        return index_coding.decode(messages, self.index_coding, self.value_bits)

    @abc.abstractmethod
    def scale(self, payloads: Fields, layout: Layout) -> tf.Tensor:
        """Returns the magnitude of the value d = 0, float32 `[N, num_blocks]`."""

    @override
    def elements_sent(self, payload, layout):
        words = self.words_of(payload["words"][tf.newaxis])
        return tf.math.count_nonzero(words != ops.NOTHING, dtype=tf.int32)

    @override
    def decompress(self, payload, layout):
        return self.mean({k: v[tf.newaxis] for k, v in payload.items()}, layout)

    @override
    def mean(self, payloads, layout):
        return ops.mean_of_sparse(
            self.words_of(payloads["words"]),
            self.scale(payloads, layout),
            layout.row_splits,
            layout.sizes,
        )


@dataclass(frozen=True)
class ThresholdSparsifier(SparseCompressor):
    """Sends a signed threshold for each element that a rule selects.

    Subclasses have an attribute `threshold`: a number, or `"auto"` for a threshold of
    each block that `find_thresholds` computes in each step. Each worker computes
    them for itself; they travel as the field `thresholds`.
    """

    def __post_init__(self):
        super().__post_init__()
        threshold: float | str = self.threshold
        fits = threshold == AUTO
        if isinstance(threshold, numbers.Real):
            fits = float(_FLOAT32.tiny) <= threshold <= float(_FLOAT32.max)
        if not fits:
            raise ValueError(
                "threshold must be positive and finite in float32, in the units of a "
                f"gradient, or {AUTO!r}. Received: threshold={threshold!r}"
            )

    @property
    def is_automatic(self) -> bool:
        """True if thresholds grow with the residual."""
        return self.threshold == AUTO

    @override
    def fields(self, layout):
        fields = super().fields(layout)
        if not self.is_automatic:
            return fields
        return {"thresholds": Field(layout.num_blocks, per="block"), **fields}

    def pack(
        self,
        x: Vector,
        moments: Vector | None,
        state: Fields,
        layout: Layout,
        context: Context,
        alpha: float = 1.0,
        decay: float = 1.0,
    ) -> Compressed:
        """Returns the result of `tfgradcomp.ops.pack_over_threshold`."""
        payload, splits = {}, layout.row_splits
        residual, variance = state["residual"], state.get("variance")
        if self.is_automatic:
            thresholds = payload["thresholds"] = find_thresholds(
                x, residual, splits, moments, variance, alpha
            )
        else:
            thresholds = tf.fill([layout.num_blocks], np.float32(self.threshold))
        words, residual, variance, nonfinite = ops.pack_over_threshold(
            x, moments, residual, variance, thresholds, alpha, decay, splits
        )
        payload["words"] = self.message(words)
        new = {"residual": residual, "variance": variance}
        state = {k: context.unless_zero_lr(new[k], old) for k, old in state.items()}
        return Compressed(payload, state, tf.equal(nonfinite, 0))

    def is_due(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Returns which elements the rule selects by their residuals alone."""
        return np.abs(state["residual"]) > self.threshold

    def overdue_residuals(self, state: dict[str, np.ndarray]) -> np.ndarray:
        r"""Returns \( |r| / \tau \) of the elements that are due after a step.

        An element sends the same sign for as many steps, unless later gradients cancel
        its residual. Empty for an `"auto"` threshold, which grows with r.
        """
        if self.is_automatic:
            return np.zeros(0, np.float32)
        return np.abs(state["residual"][self.is_due(state)]) / self.threshold

    @override
    def scale(self, payloads, layout):
        if self.is_automatic:
            return payloads["thresholds"]
        return tf.fill([payloads["words"].shape[0], layout.num_blocks], self.threshold)


@dataclass(frozen=True)
class _Waiting(Identity):
    """Sends the input alone; the residual of a `SparseCompressor` waits."""

    compressor: SparseCompressor = field(kw_only=True)

    @override
    def init(self, layout):
        return self.compressor.init(layout)


def moments_missing(compressor: Compressor) -> str:
    """Returns an error message about second moments that were not given."""
    return (
        f"{type(compressor).__name__} needs second moments, the sums over examples of "
        "the squares of a gradient's terms. `model.fit` computes them for a model that "
        "is compiled with its optimizer; a custom loop calls "
        "`optimizer.apply(gradients, variables, second_moments=...)` with a tensor for "
        "each gradient, in its units squared. A compressor around it (Clip, "
        "Momentum, ...) cannot provide them. Received: second_moments=None"
    )


def check_unambiguity(alpha: float, zeta: float) -> None:
    """Raises ValueError unless alpha and zeta are in their ranges."""
    if not 1 <= alpha < float("inf"):
        raise ValueError(
            "alpha must be 1 or more and finite; 1 to 2 is good. "
            f"Received: alpha={alpha!r}"
        )
    if not 0 <= zeta <= 1:
        raise ValueError(f"zeta must be in [0, 1]. Received: zeta={zeta!r}")
