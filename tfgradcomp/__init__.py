"""Compressed gradients for multi-worker Keras training.

Wrap the optimizer and change nothing else:

```python
model.compile(tfgradcomp.Auto(keras.optimizers.SGD(0.01, momentum=0.9)), ...)
```
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from tfgradcomp.version import __version__ as __version__

if importlib.util.find_spec("tensorflow") is None:
    raise ImportError(
        "tfgradcomp needs TensorFlow 2.20 or 2.21 and found none. Install one of: "
        "pip install 'tfgradcomp[cpu]' or pip install 'tfgradcomp[gpu]'"
    )

# Imported at their first use: the tools of this package need no TensorFlow.
_SUBPACKAGES = (
    *("callbacks", "compressors", "federated", "optimizers", "planning"),
    *("servers", "transports"),
)
_ORIGINS = {
    "ParameterServerTrainer": "tfgradcomp.parameter_server",
    "enable_multi_worker_fit": "tfgradcomp.fit",
    "virtual_workers": "tfgradcomp.launch.virtual_workers",
    "Auto": "tfgradcomp.planning.auto",
    "tune": "tfgradcomp.planning.tuning",
}


def _public_names() -> list[str]:
    optimizers = importlib.import_module("tfgradcomp.optimizers")
    return sorted([*_SUBPACKAGES, *_ORIGINS, *optimizers.__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _public_names()
    if name.startswith("_"):
        raise AttributeError(f"module 'tfgradcomp' has no attribute {name!r}")
    if importlib.util.find_spec(f"tfgradcomp.{name}") is not None:
        # Also within `from tfgradcomp import ops`, which asks for the attribute first.
        return importlib.import_module(f"tfgradcomp.{name}")
    module = importlib.import_module(_ORIGINS.get(name, "tfgradcomp.optimizers"))
    try:
        value = getattr(module, name)
    except AttributeError:
        raise AttributeError(
            f"module 'tfgradcomp' has no attribute {name!r}. It has: {_public_names()}"
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return _public_names()


if "keras" in sys.modules:
    # Keras finds the classes in a saved model by their registered names.
    importlib.import_module("tfgradcomp.planning.auto")
