"""The usual baseline: half floats and an ordinary all-reduce."""

from __future__ import annotations

from tfgradcomp.compressors import Identity
from tfgradcomp.core.arguments import check_choice
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import Mean

DTYPES = ("bfloat16", "float16")


def half_precision(dtype: str = "bfloat16") -> Method:
    r"""Sixteen bits an element: gradients are cast and added up in half precision.

    Args:
        dtype: `"bfloat16"` (the range of float32) or `"float16"` (more digits;
            magnitudes above 65504 overflow).

    Raises:
        ValueError: If `dtype` is neither.

    Example:
        ```python
        method = tfgradcomp.methods.half_precision()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.Adam(), method
        )
        ```
    """
    check_choice("dtype", dtype, DTYPES)
    compressor = Identity(dtype)
    return Method(compressor, Mean(compressor), name="HalfPrecision")
