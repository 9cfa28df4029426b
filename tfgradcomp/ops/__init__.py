"""The operations of compression: native where they can be, else pure TensorFlow.

Both give the same bits. `python -m tfgradcomp.ops --info` shows which library is in
use; `tfgradcomp.ops.reference` explains the arguments that operations share. The
environment variable `TFGRADCOMP_OPS` is read at each call or trace:

- `auto` (default): native if the library loads and has the operation; else the
  reference, with one warning that says what to do.
- `native`: the library, or an error that says why there is none.
- `python`: the reference, which is pure TensorFlow.

Inside XLA (`jit_compile`) the reference runs: XLA cannot compile custom operations.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfgradcomp.ops.registry import *  # noqa: F403
else:
    # The registry imports TensorFlow, and `python -m tfgradcomp.ops` must be able to
    # silence TensorFlow before that.
    def __getattr__(name: str) -> Any:
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        public = importlib.import_module("tfgradcomp.ops.registry").PUBLIC
        if name == "__all__":
            return [*public]
        if name not in public:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}. It has: {[*public]}"
            )
        globals()[name] = public[name]
        return public[name]

    def __dir__() -> list[str]:
        return [*importlib.import_module("tfgradcomp.ops.registry").PUBLIC]
