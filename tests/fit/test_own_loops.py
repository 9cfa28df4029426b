"""Models and loops as users write them, on real workers."""

import keras
import pytest
import tensorflow as tf

from tests.fit import own_loop_cases
from tests.fit.fit_models import X, Y, assert_close, sequential, two_layers

TWO_WORKERS = pytest.mark.parametrize(
    "cluster", [(2,), (2, "mirrored")], ids=["two", "mirrored"]
)
pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow  # Noise without a seed is in the models of `tests/callbacks`.
@TWO_WORKERS
def test_random_numbers_without_a_seed_go_on_from_step_to_step(pools, cluster):
    _, *drawn_in_one_process = own_loop_cases.train_with_noise()
    answers, _ = pools(*cluster).run(own_loop_cases.case_noise)
    for answer in answers:
        assert answer == answers[0]
        for _, *drawn in answer["drawn"]:
            assert drawn == drawn_in_one_process
        loops, _, again = answer["drawn"]
        assert loops == again


@pytest.mark.parametrize(
    "way", ["loops", pytest.param("eagerly", marks=pytest.mark.slow)]
)
def test_model_without_call_trains_as_in_one_process(pools, way):
    answers, _ = pools(2).run(own_loop_cases.case_without_call, way)
    expected = own_loop_cases.train_adversaries(lambda: keras.optimizers.SGD(0.1))
    for answer in answers:
        assert answer == answers[0]
        assert_close(answer, expected)


def loop_in_one_process():
    """Plain TensorFlow on the global batches."""
    model = sequential(two_layers)
    total = 0.0
    for begin in range(0, 60, 12):
        x, y = X[begin : begin + 12], Y[begin : begin + 12]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(
            model.trainable_variables, gradients, strict=True
        ):
            variable.assign_sub(0.1 * gradient)
        total += float(loss)
    return total, model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [(2,), (2, "mirrored")], ids=["two", "mirrored"])
def test_loop_by_hand_is_that_of_one_process(pools, cluster):
    answers, _ = pools(*cluster).run(own_loop_cases.case_by_hand)
    loss, weights = loop_in_one_process()
    for answer in answers:
        assert answer == answers[0]
        for run in answer.values():
            assert run["loss"] == pytest.approx(loss, rel=1e-4)
            assert_close(run["weights"], weights)


@TWO_WORKERS
def test_xla_with_several_replicas_is_refused(pools, cluster):
    for message in pools(*cluster).run(own_loop_cases.case_xla).answers:
        assert "jit_compile=False" in message
        assert "Received: jit_compile=True" in message


def test_batches_of_unknown_rank_build_a_model(pools):
    pool = pools(2, "mirrored")
    ((first, second),) = pool.run(own_loop_cases.case_unknown_rank).answers
    assert second < first
