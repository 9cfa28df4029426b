"""Makes short lives of processes that import TensorFlow shorter by a half."""

import atexit
import gc
import sys

# Keras imports them if they exist.
for name in ("matplotlib", "sklearn"):
    sys.modules[name] = None
# Hundreds of thousands of objects are made by the imports, and stay until the end.
gc.set_threshold(50_000, 20, 50)
atexit.register(gc.freeze)
