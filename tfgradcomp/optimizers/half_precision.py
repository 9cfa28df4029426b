"""The baseline that everybody has: half floats and an ordinary all-reduce."""

from __future__ import annotations

from typing import Any, ClassVar

from tfgradcomp.compressors import Identity
from tfgradcomp.core.arguments import check_choice
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.wrapper import InnerOptimizer
from tfgradcomp.servers import Mean

DTYPES = ("bfloat16", "float16")


class HalfPrecision(CompressedOptimizer):
    """Sixteen bits an element: gradients are cast and added up in half precision.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        dtype: `"bfloat16"` (the range of float32) or `"float16"` (more digits;
            magnitudes above 65504 overflow).
        **kwargs: Those of `CompressedOptimizer` from `transport` on.

    Raises:
        ValueError: If `dtype` is neither.

    Example:
        ```python
        model.compile(tfgradcomp.HalfPrecision("adam"), "mse")
        ```
    """

    config_arguments: ClassVar[tuple[str, ...]] = (
        "dtype",
        *CompressedOptimizer.common_arguments,
    )

    def __init__(
        self, inner_optimizer: InnerOptimizer, dtype: str = "bfloat16", **kwargs: Any
    ):
        check_choice("dtype", dtype, DTYPES)
        compressor = Identity(dtype)
        super().__init__(inner_optimizer, compressor, Mean(compressor), **kwargs)
        self.dtype = dtype
