"""The pool of workers that other tests run in: what fails, fails alone.

Without TensorFlow, for the workers import this file.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import LAUNCHES, POOLS
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
    elif how == "exit":
        os._exit(3)


def cannot_be_pickled():
    return lambda: None


def leave_a_child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def is_alive(process_id):
    with contextlib.suppress(FileNotFoundError):
        with open(f"/proc/{process_id}/stat") as file:
            # A zombie has ended.
            return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def assert_ends(process_ids):
    deadline = time.monotonic() + 20
    while any(map(is_alive, process_ids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, process_ids))


def test_processes_live_on_and_output_is_that_of_the_call(bare):
    first, output = bare.run(say, "one")
    assert output == "[0] one\n[1] one\n"
    second, output = bare.run(say, "two")
    assert output == "[0] two\n[1] two\n"
    assert first == second
    assert [pid for pid, _ in first] == bare.process_ids
    assert not any(has_tensorflow for _, has_tensorflow in first)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "ValueError: on purpose"),
        ("die", "worker 1: died: SIGKILL"),
        ("exit", "worker 1: died: exit code 3"),
        ("hang", "worker 0: still running after 2 s"),
    ],
)
def test_a_failure_ends_the_pool_and_the_next_call_has_a_new_one(bare, how, message):
    before = [pid for pid, _ in bare.run(say, "here")[0]]
    with pytest.raises(AssertionError) as error:
        bare.run(fail_on_second, how, timeout=2)
    assert message in str(error.value)
    assert "worker 0: " in str(error.value)
    assert "[0] I am 0\n[1] I am 1\n" in str(error.value)
    assert not any(map(is_alive, before))
    after = [pid for pid, _ in bare.run(say, "anew")[0]]
    assert not {*before} & {*after}


def test_an_answer_that_cannot_be_pickled_says_so(bare):
    with pytest.raises(AssertionError, match="cannot be pickled"):
        bare.run(cannot_be_pickled)


def test_what_a_worker_started_ends_with_it():
    pool = WorkerPool(1, "bare")
    (child,), _ = pool.run(leave_a_child)
    assert is_alive(child)
    pool.close()
    assert_ends([child])


def test_workers_end_with_a_pytest_that_is_killed():
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
    assert_ends(workers)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind must be one of .*'some'"):
        WorkerPool(2, "some")


def test_files_that_start_or_share_clusters_are_listed():
    root = Path(__file__).parent.parent
    starts = re.compile(r"\bpools\(|\brun_workers\(|\bpools\b.*\):")
    using = [
        path.relative_to(root).as_posix()
        for path in sorted((root / "tests").rglob("test_*.py"))
        if starts.search(path.read_text())
    ]
    assert len(using) > 5
    assert [path for path in using if not path.startswith(LAUNCHES + POOLS)] == []
