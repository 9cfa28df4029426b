"""Import TensorFlow without its notes on oneDNN; `data` imports this first.

TensorFlow writes them to standard error before it reads TF_CPP_MIN_LOG_LEVEL, so they
cannot be switched off. Whatever else is written during the import still appears.
"""

import os
import sys
import tempfile

NOTES = (b"WARNING: All log messages before absl::InitializeLog()", b"oneDNN custom op")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.stderr.flush()
# The file descriptor, since these lines come from C++ and pass sys.stderr by.
_stderr = os.dup(2)
with tempfile.TemporaryFile() as _written:
    os.dup2(_written.fileno(), 2)
    try:
        import tensorflow  # noqa: F401
    finally:
        sys.stderr.flush()
        os.dup2(_stderr, 2)
        os.close(_stderr)
        _written.seek(0)
        for _line in _written:
            if not any(note in _line for note in NOTES):
                os.write(2, _line)
