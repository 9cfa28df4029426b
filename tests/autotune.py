"""Runs datasets without TensorFlow's thread that tunes their buffers.

TensorFlow 2.21 wakes this thread when an iterator is deleted, but sets the flag that
ends it only afterwards. The thread may then sleep for another period, which grows to
60 s with the iterator's age, and the deletion waits for it. Of 60 iterators that were
10 s old, eight waited, for up to 60 s. Garbage collection deletes old iterators, so any
test could be the one that waited.
"""

import tensorflow as tf


def disable() -> None:
    """Disables it for all iterators that this process creates from now on."""
    options = tf.data.Options()
    options.autotune.enabled = False
    # All kinds of iterators call this function, distributed ones included.
    tf.data.Dataset._apply_debug_options = lambda data: data.with_options(options)
