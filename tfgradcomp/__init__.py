"""Compressed gradients for multi-worker Keras training.

Wrap the optimizer and change nothing else:

```python
model.compile(tfgradcomp.TernGrad(keras.optimizers.SGD(0.01, momentum=0.9)), ...)
```
"""

import importlib.util
import sys

from tfgradcomp.version import __version__

if importlib.util.find_spec("tensorflow") is None:
    raise ImportError(
        "tfgradcomp needs TensorFlow 2.20 or 2.21 and found none. Install one of: "
        "pip install 'tfgradcomp[cpu]' or pip install 'tfgradcomp[gpu]'"
    )

# The launcher starts processes and files are resharded without TensorFlow, which
# would take seconds to import.
_TOOLS = ("tfgradcomp.launch", "tfgradcomp.reshard", "tfgradcomp-launch")
if not any(argument.endswith(_TOOLS) for argument in sys.orig_argv[1:3]):
    from tfgradcomp import callbacks, compressors, servers, transports
    from tfgradcomp.optimizers import (
        CompressedOptimizer,
        DistEFBlockSGD,
        DistEFBlockSGDM,
        DistEFSGD,
        HalfPrecision,
        SignSGD,
        Signum,
        TernGrad,
    )
    from tfgradcomp.seam.multi_worker_fit import enable_multi_worker_fit

__all__ = [
    "CompressedOptimizer",
    "DistEFBlockSGD",
    "DistEFBlockSGDM",
    "DistEFSGD",
    "HalfPrecision",
    "SignSGD",
    "Signum",
    "TernGrad",
    "__version__",
    "callbacks",
    "compressors",
    "enable_multi_worker_fit",
    "servers",
    "transports",
]
