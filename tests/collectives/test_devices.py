"""Workers of several devices: the mean inside, then the method between the parts."""

from pathlib import Path

import numpy as np
import pytest

from tests.cluster import run_workers
from tests.collectives import devices_cases as cases
from tests.methods import ROWS

PROGRAM = Path(__file__).with_name("devices_program.py")

DIVIDED = [row.name for row in ROWS.values() if row.method.is_blockwise]
# A first round and random numbers; second moments and messages of varying length.
SOME = ["TernGrad", "VarianceBased"]


def bits(array):
    return np.ascontiguousarray(array).tobytes()


def scaled_signs(vector, splits):
    result = np.empty_like(vector)
    for begin, end in zip(splits[:-1], splits[1:], strict=True):
        own = vector[begin:end]
        result[begin:end] = np.mean(np.abs(own)) * np.where(own >= 0, 1, -1)
    return result


def test_two_hosts_of_two_devices_follow_the_method(pools):
    ((answer),) = pools(4, "mirrored").run(cases.follow).answers
    weights = answer["weights"]
    # Device 0 has elements 0 to 56, four at a time; a tensor is cut there.
    splits = [0, 56, 60, 110]
    gradients = cases.gradients_of(5).astype(np.float64)
    means = gradients.reshape(5, 2, 2, -1).mean(2)
    x, residual, server_residual = np.zeros(121), np.zeros((2, 110)), np.zeros(110)
    for step, mean in enumerate(means):
        if step != cases.SKIPPED:
            p = mean[:, :110] + residual
            sent = np.stack([scaled_signs(own, splits) for own in p])
            residual = p - sent
            p = sent.mean(0) + server_residual
            reply = scaled_signs(p, splits)
            server_residual = p - reply
            x[:110] -= cases.RATE * reply
            x[110:] -= cases.RATE * mean[:, 110:].mean(0)
        assert len({bits(device) for device in weights[step]}) == 1
        np.testing.assert_allclose(weights[step, 0], x, rtol=0, atol=2e-6)
    assert answer["skipped"] == 1
    # One row per host, of whole vectors.
    state = answer["state"]
    assert state["compressed.worker.residual"].shape == (2, 110)
    np.testing.assert_allclose(state["compressed.worker.residual"], residual, atol=2e-6)
    np.testing.assert_allclose(
        state["compressed.server.residual"][0], server_residual, atol=2e-6
    )
    # Each device has half of it, rounded to four elements. The second half follows 56
    # zeros, so that its random numbers are those of its place.
    assert answer["sizes"] == [(110,), (110,)]
    traffic = answer["traffic"]
    assert traffic.num_workers == 2
    assert (traffic.elements_compressed, traffic.elements_plain) == (110, 11)
    # To the other host: signs of 56 and of 56 + 54 elements, scales, a flag each.
    assert answer["words"][0] == (2 + 1 + 1) + (4 + 3 + 1)
    assert traffic.words_sent == sum(answer["words"])
    assert bits(answer["resumed"]) == bits(weights[3:])
    # A worker of one device loads the state of a worker of two devices.
    before, after = answer["narrow"]
    for name, values in before.items():
        if name.startswith("compressed"):
            np.testing.assert_array_equal(after[name], values, err_msg=name)
    for hosts, message in zip(cases.NO_HOSTS, answer["errors"], strict=True):
        assert f"Received: hosts={hosts}" in message


def check_equal(answers):
    ((results),) = answers
    assert results
    different = []
    for name, (two, one) in results.items():
        assert np.any(two), name
        for step, (devices, workers) in enumerate(zip(two, one, strict=True)):
            if len({bits(row) for row in [*devices, *workers]}) > 1:
                different.append((name, step))
    assert not different


@pytest.mark.slow
def test_a_sharded_server_gives_the_same_bits(pools):
    (((everywhere, spread)),) = pools(4, "mirrored").run(cases.by_shards).answers
    assert bits(everywhere) == bits(spread)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_every_method_has_the_bits_of_workers_of_one_device(pools):
    run = pools(4, "mirrored").run
    answers = run(cases.compare_with_one_device, DIVIDED, timeout=400).answers
    check_equal(answers)


@pytest.mark.slow
def test_eager_steps_have_the_bits_of_compiled_steps(pools):
    run = pools(4, "mirrored").run
    answers = run(cases.compare_with_one_device, SOME, True).answers
    check_equal(answers)


@pytest.mark.slow
def test_uncompressed_steps_have_the_bits_of_workers_of_one_device(pools):
    (((two, one)),) = pools(4, "mirrored").run(cases.uncompressed_steps).answers
    for devices, workers in zip(two, one, strict=True):
        assert len({bits(row) for row in [*devices, *workers]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("local_steps", [0, 4])
def test_fit_leaves_equal_weights(pools, local_steps):
    ((answer),) = pools(4, "mirrored").run(cases.fit, local_steps).answers
    weights, losses = answer
    assert np.isfinite(losses).all()
    for replicas in weights:
        assert len({bits(replica) for replica in replicas}) == 1
    if not local_steps:
        return
    # Each device takes four separate steps of SGD; then weights are averaged.
    ends = []
    for device in range(4):
        kernel, bias = np.full((6, 2), np.float64(np.float32(0.1))), np.zeros(2)
        for step in range(4):
            rows = cases.X[8 * step + 2 * device : 8 * step + 2 * device + 2]
            error = (rows @ kernel + bias - rows[:, :2]) * 2 / 4
            kernel, bias = (
                kernel - cases.RATE * rows.T @ error,
                bias - cases.RATE * error.sum(0),
            )
        ends.append((kernel, bias))
    for replicas, expected in zip(weights, zip(*ends, strict=True), strict=True):
        np.testing.assert_allclose(replicas[0], np.mean(expected, 0), atol=2e-6)


@pytest.mark.slow
def test_two_processes_of_two_devices_take_the_steps_of_one_process(pools, tmp_path):
    first, second = run_workers(PROGRAM, 2, tmp_path)[0]
    ((weights, residuals),) = pools(4, "mirrored").run(cases.in_one_process).answers
    assert first["replicas"] == second["replicas"] == 4
    for answer, residual in zip((first, second), residuals, strict=True):
        np.testing.assert_array_equal(np.float32(answer["weights"]), weights[:, :2])
        np.testing.assert_array_equal(np.float32(answer["residual"][0]), residual)
    assert first["losses"] == second["losses"]
    for replicas, others in zip(first["fitted"], second["fitted"], strict=True):
        assert replicas == others
        np.testing.assert_array_equal(replicas[0], replicas[1])
