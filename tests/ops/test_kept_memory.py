"""The state of a method keeps its memory from step to step, and gives it back."""

import gc
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.implementations import native, needs_library

pytestmark = needs_library

SIZE, ROWS = 2**24, 2**12
PAGES = 4 * SIZE // resource.getpagesize()


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def momentum(x, state):
    return native.pack_momentum_signs(x, state, 0.9, False, None)[1]


def feedback(x, state):
    left, right = tf.zeros([ROWS]), tf.zeros([SIZE // ROWS])
    form = [ROWS], [SIZE // ROWS], 1
    return native.multiply_sum(x, state, tf.constant(1.0), left, right, right, *form)[0]


def largest(x, state):
    """Top-k with the update of all workers beside p: two vectors beside a state."""
    one = tf.constant(1.0)
    p = native.add_scaled(x, state, one)
    update = native.mean_of_pairs(tf.constant([[0]]), one[tf.newaxis, tf.newaxis], SIZE)
    with tf.control_dependencies([update]):
        return native.clear_elements(p, tf.constant([0]))


def make_step(new_state):
    x = tf.constant(np.random.default_rng(0).standard_normal(SIZE, np.float32))
    state = tf.Variable(tf.zeros([SIZE]))

    @tf.function(autograph=False)
    def step():
        state.assign(new_state(x, state))

    return step, x, state


def faults_of_four_steps(new_state):
    """The pages that four steps fault in, and the ratio of the state to x."""
    step, x, state = make_step(new_state)
    for _ in range(3):
        step()
    begin = faults()
    for _ in range(4):
        step()
    return faults() - begin, state.numpy()[5] / float(x[5])


def pages_kept():
    """The pages that a state which is gone has left."""
    before = resident()
    made = make_step(momentum)
    for _ in range(3):
        made[0]()
    del made
    gc.collect()
    return resident() - before


@pytest.fixture(scope="module")
def run():
    """Runs a function where memory that TensorFlow frees goes back to the system.

    It does not with oneDNN's allocator, which TensorFlow takes on some processors.
    """
    spawn = multiprocessing.get_context("spawn")
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessPoolExecutor(1, spawn) as executor,
    ):
        patch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
        yield lambda *call: executor.submit(*call).result(timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    "new_state, expected", [(momentum, 1 - 0.9**7), (feedback, 7), (largest, 7)]
)
def test_steps_ask_the_system_for_no_memory(run, new_state, expected):
    pages, element = run(faults_of_four_steps, new_state)
    # Each step would fault in all pages of the new state.
    assert pages < PAGES
    assert element == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_no_more_waits_than_is_in_use(run):
    assert run(pages_kept) < PAGES / 2
