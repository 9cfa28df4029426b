"""The watchdog names workers for which others wait."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
import tensorflow as tf

from tests.collectives import stall_cases
from tfgradcomp.collectives import stalls
from tfgradcomp.collectives.call_sites import CallSites

NEVER = float("inf")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("where", "says"),
    [
        # The main thread waits for TensorFlow, which waits for the dataset.
        ("data", "has not arrived, it is at stall_cases.py:"),
        # The same in another loop.
        pytest.param(
            *("evaluate", "has not arrived, it is at stall_cases.py:"),
            marks=pytest.mark.slow,
        ),
        ("stopped", "does not answer (stopped or out of reach)"),
    ],
)
def test_a_late_worker_is_named_once_and_training_continues(pools, where, says):
    pool = pools(2)
    if where == "stopped":
        threading.Thread(target=continue_once_said, args=(pool, says)).start()
    answers, output = pool.run(stall_cases.train, where, (1.0, NEVER))
    assert answers[0] == answers[1]
    lines = [line for line in output.splitlines() if "has waited" in line]
    assert len(lines) == 1, output
    assert lines[0].startswith("[0] tfgradcomp: worker 0 has waited")
    assert f": worker 1 {says}" in lines[0]
    assert " in the sum of " in lines[0]


def continue_once_said(pool, says):
    """Continues worker 1; TensorFlow considers it lost if it is stopped for 10 s."""
    end = time.monotonic() + 60
    while says not in pool.read_output() and time.monotonic() < end:
        time.sleep(0.2)
    os.kill(pool.process_ids[1], signal.SIGCONT)


def test_a_process_that_has_waited_too_long_ends(pools):
    with pytest.raises(AssertionError) as caught:
        pools(2).run(stall_cases.train, "callback", (1.0, 2.0))
    text = str(caught.value)
    assert f"worker 0: died: exit code {stalls.EXIT_CODE}" in text
    assert "[0] tfgradcomp: worker 0 has waited 1 s" in text
    assert "Received: TFGRADCOMP_STALL_TIMEOUT=2" in text


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
@pytest.mark.parametrize("name", [stalls.WARNING, stalls.TIMEOUT])
def test_invalid_limits_raise(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must be a number of seconds"):
        stalls.Limits.of_environment()


@pytest.mark.parametrize("value", ["abc", "99999", "-1", ""])
def test_a_port_that_is_none_raises(monkeypatch, value):
    monkeypatch.setenv(stalls.WATCH_PORT, value)
    watchdog = stalls.StallWatchdog(0, stalls.Limits(60.0, NEVER))
    with pytest.raises(ValueError, match=f"{stalls.WATCH_PORT} must be a port"):
        watchdog.listen("127.0.0.1")


@pytest.mark.parametrize("answer", [b"no JSON", b"[1]", b"{}", b'{"entered": {}}'])
def test_another_program_at_the_port_of_a_worker_is_no_worker(answer):
    def serve(listener):
        link, _ = listener.accept()
        with link:
            link.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        assert stalls._ask(listener.getsockname()) is None


def test_limits_by_default(monkeypatch):
    monkeypatch.delenv(stalls.WARNING, raising=False)
    assert stalls.Limits.of_environment() == (60.0, NEVER)


def test_a_call_that_an_error_ended_counts_as_left():
    sites = CallSites()

    @tf.function
    def step(x):
        return sites.around("a sum", lambda y: tf.debugging.check_numerics(y, "no"), x)

    for value in (1.0, float("nan"), float("nan"), 1.0):
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            step(tf.constant(value))
    assert sites.calls() == {"a sum": (4, 2)}
    sites.leave()
    assert sites.calls() == {"a sum": (4, 4)}
    step(tf.constant(1.0))
    assert sites.calls() == {"a sum": (5, 5)}
