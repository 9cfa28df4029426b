"""Compressed gradients for multi-worker Keras training.

Wrap the optimizer and change nothing else:

```python
model.compile(tfgradcomp.TernGrad(keras.optimizers.SGD(0.01, momentum=0.9)), ...)
```
"""

import importlib.util
import os
import sys

from tfgradcomp.version import __version__

if importlib.util.find_spec("tensorflow") is None:
    raise ImportError(
        "tfgradcomp needs TensorFlow 2.20 or 2.21 and found none. Install one of: "
        "pip install 'tfgradcomp[cpu]' or pip install 'tfgradcomp[gpu]'"
    )


_TOOLS = ("tfgradcomp.launch", "tfgradcomp.ops", "tfgradcomp.reshard")


def _tool() -> str | None:
    """Name of the tool that this process is, None if it is none.

    Tools need nothing of what is imported below; it would cost them seconds. Python's
    own `sys.argv[0]` is "-m" while it looks for the module to run.
    """
    if sys.argv[:1] == ["-m"]:
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
        return module if module in _TOOLS else None
    is_launcher = os.path.basename("".join(sys.argv[:1])) == "tfgradcomp-launch"
    return "tfgradcomp.launch" if is_launcher else None


if _tool() == "tfgradcomp.ops":
    # It prints a few lines; TensorFlow's greetings would be most of them.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")

if _tool() is None:
    from tfgradcomp import callbacks, compressors, servers, transports
    from tfgradcomp.parameter_server.trainer import ParameterServerTrainer
    from tfgradcomp.optimizers import (
        ORQ,
        QSGD,
        BinGrad,
        CompressedOptimizer,
        DistEFBlockSGD,
        DistEFBlockSGDM,
        DistEFSGD,
        HalfPrecision,
        Hybrid,
        LinearQuantization,
        ScaledSign,
        SignSGD,
        Signum,
        Strom,
        TernGrad,
        VarianceBased,
    )
    from tfgradcomp.compat.multi_worker_fit import enable_multi_worker_fit

__all__ = [
    "ORQ",
    "QSGD",
    "BinGrad",
    "CompressedOptimizer",
    "DistEFBlockSGD",
    "DistEFBlockSGDM",
    "DistEFSGD",
    "HalfPrecision",
    "Hybrid",
    "LinearQuantization",
    "ParameterServerTrainer",
    "ScaledSign",
    "SignSGD",
    "Signum",
    "Strom",
    "TernGrad",
    "VarianceBased",
    "__version__",
    "callbacks",
    "compressors",
    "enable_multi_worker_fit",
    "servers",
    "transports",
]
