"""Adapters, the only folder that uses private names of Keras and TensorFlow.

An adapter wraps a private name. Its docstring, or its file's, says what the public API
lacks, so that the adapter can go when a later version has it. Features are in the
folders above. `versions.py` has the versions that were tested.
"""

import keras
import tensorflow as tf

from tfgradcomp.compat import versions

versions.check(keras.backend.backend(), keras.__version__, tf.__version__)
