"""No compression, or only that of a number format."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfgradcomp.compressors.base import Compressor, Field, all_finite


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends the vector as it is, in the format `dtype`.

    Attributes:
        dtype: `"float32"`, or `"bfloat16"` / `"float16"`: rounded to nearest.
    """

    dtype: str = "float32"

    def __post_init__(self):
        choices = ("float32", "bfloat16", "float16")
        if self.dtype not in choices:
            raise ValueError(
                f"dtype must be one of {choices}. Received: dtype={self.dtype!r}"
            )

    def fields(self, layout):
        """See `Compressor.fields`."""
        return {"values": Field(layout.size, dtype=self.dtype, per="element")}

    def compress(self, x, state, layout, context):
        """See `Compressor.compress`."""
        return {"values": tf.cast(x, self.dtype)}, state

    def compress_checked(self, x, state, layout, context):
        """See `Compressor.compress_checked`."""
        payload, state = self.compress(x, state, layout, context)
        # Every format keeps infinities and NaN.
        return payload, state, all_finite([payload["values"]])

    def decompress(self, payload, layout):
        """See `Compressor.decompress`."""
        return tf.cast(payload["values"], tf.float32)
