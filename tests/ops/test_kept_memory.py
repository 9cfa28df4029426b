"""The state of a method keeps its memory from step to step, and gives it back."""

import gc
import resource
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tfgradcomp.ops import native
from tfgradcomp.ops.library import find_library

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and find_library() is None,
    reason="There is no library of native ops and no g++ to build one.",
)

SIZE = 2**24
PAGES = 4 * SIZE // resource.getpagesize()


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def make_step():
    x = tf.constant(np.random.default_rng(0).standard_normal(SIZE, np.float32))
    momentum = tf.Variable(tf.zeros([SIZE]))

    @tf.function(autograph=False)
    def step():
        words, new, _ = native.pack_momentum_signs(x, momentum, 0.9, False, None)
        momentum.assign(new)
        return tf.reduce_sum(words)

    return step, x, momentum


def test_steps_ask_the_system_for_no_memory():
    step, x, momentum = make_step()
    for _ in range(3):
        step()
    begin = faults()
    for _ in range(4):
        step()
    # Each step would fault in all pages of the new momentum.
    assert faults() - begin < PAGES
    assert momentum.numpy()[5] == pytest.approx(float(x[5]) * (1 - 0.9**7), rel=1e-5)


def test_no_more_waits_than_is_in_use():
    before = resident()
    made = make_step()
    for _ in range(3):
        made[0]()
    del made
    gc.collect()
    assert resident() - before < PAGES / 2
