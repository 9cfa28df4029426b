"""The pool of workers that other tests run in: what fails, fails alone.

Without TensorFlow, for the workers import this file.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.pool import WorkerPool


@pytest.fixture(scope="module")
def bare():
    pool = WorkerPool(2, "bare")
    yield pool
    pool.close()


def say(text):
    print(text, flush=True)
    return os.getpid(), "tensorflow" in sys.modules


def fail_on_second(how):
    """Ends in some way on one worker, while the other waits for it."""
    rank = int(os.environ["TF_CONFIG"][-3])
    print(f"I am {rank}", flush=True)
    if rank == 0:
        time.sleep(600)
    elif how == "raise":
        raise ValueError("on purpose")
    elif how == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def is_alive(process_id):
    with contextlib.suppress(FileNotFoundError):
        with open(f"/proc/{process_id}/stat") as file:
            # A zombie has ended.
            return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def test_processes_persist_and_output_is_that_of_the_call(bare):
    first, output = bare.run(say, "one")
    assert output == "[0] one\n[1] one\n"
    second, output = bare.run(say, "two")
    assert output == "[0] two\n[1] two\n"
    assert first == second
    assert [pid for pid, _ in first] == bare.process_ids
    assert not any(has_tensorflow for _, has_tensorflow in first)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "ValueError: on purpose"),
        ("die", "worker 1: died: SIGKILL"),
        ("hang", "worker 0: still running after 2 s"),
    ],
)
def test_failure_ends_the_pool_and_the_next_call_starts_another(bare, how, message):
    before = [pid for pid, _ in bare.run(say, "here")[0]]
    with pytest.raises(AssertionError) as error:
        bare.run(fail_on_second, how, timeout=2)
    assert message in str(error.value)
    assert "[0] I am 0\n[1] I am 1\n" in str(error.value)
    assert not any(map(is_alive, before))
    after = [pid for pid, _ in bare.run(say, "anew")[0]]
    assert not {*before} & {*after}


def test_workers_end_with_a_killed_pytest():
    code = (
        "import time\nfrom tests import test_pool\nfrom tests.pool import WorkerPool"
        "\npool = WorkerPool(2, 'bare'); pool.run(test_pool.say, 'here')"
        "\nprint(*pool.process_ids, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        workers = [int(word) for word in process.stdout.readline().split()]
        assert len(workers) == 2 and all(map(is_alive, workers))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    deadline = time.monotonic() + 20
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
