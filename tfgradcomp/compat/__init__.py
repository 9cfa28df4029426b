"""The only folder that touches private names of Keras and TensorFlow.

`versions.py` says which ones were tested.
"""

import keras
import tensorflow as tf

from tfgradcomp.compat import versions

versions.check(keras.backend.backend(), keras.__version__, tf.__version__)
