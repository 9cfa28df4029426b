"""Worker processes that live as long as the tests, and run functions together.

TensorFlow's import and the start of a cluster take longer than most tests that need
one. A pool pays for both once: its processes are started for the first test that asks
for them and are handed one function after the other, as those of TensorFlow's
`multi_process_runner.MultiProcessPoolRunner` are.

    def sum_of_ranks(offset):
        strategy, rank = strategy_and_rank()
        ...

    answers, output = pools(2).run(sum_of_ranks, 10)

A process keeps one strategy. A test that kills, stops or restarts workers
needs processes of its own: see `cluster.run_workers`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, NamedTuple

from tests.cluster import light_environment, strategy_and_rank
from tfgradcomp.launch.environment import worker_env
from tfgradcomp.launch.ports import local_address, reserve_ports

# What a loaded machine takes to import TensorFlow in every process at once.
_START_SECONDS = 180
# What the others get to answer once one has failed; they may wait for it for ever.
_GRACE_SECONDS = 5

KINDS = ("multi_worker", "mirrored", "virtual", "bare")
# Those of a single process.
_DEVICES = ("mirrored", "virtual")

_BOOTSTRAP = "from tests.pool import _serve; _serve()"


class Results(NamedTuple):
    """What the workers of a pool returned, by rank, and what they printed meanwhile."""

    answers: list
    output: str


class WorkerPool:
    """N processes that run a function at the same time, again and again.

    They are started by the first `run`, and anew by the next one after a failure: a
    worker that raised may have left half of a collective behind.

    Args:
        num_workers: N.
        kind: `"multi_worker"`: N processes, each with the one strategy
            `MultiWorkerMirroredStrategy` of its TF_CONFIG. `"mirrored"`: one process
            with N devices under `MirroredStrategy`. `"virtual"`: one process with
            `tfgradcomp.virtual_workers(N)`. `"bare"`: N processes with a
            TF_CONFIG that import no TensorFlow by themselves.
    """

    def __init__(self, num_workers: int, kind: str = "multi_worker"):
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}. Received: {kind=}")
        self.num_workers, self.kind = num_workers, kind
        self._processes: list[_Process] = []
        self._locks = []

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the living workers, by rank; empty where none is started."""
        return [process.popen.pid for process in self._processes]

    def run(self, function: Callable, *args, timeout: float = 240) -> Results:
        """Calls `function(*args)` in every process.

        Args:
            function: Function of a module, which the workers import by its name. What
                it returns must be picklable.
            *args: Picklable arguments, the same for all workers.
            timeout: Seconds for the call; the processes' start has its own.

        Raises:
            AssertionError: If a worker raised, died or took too long. It shows the
                traceback and the output of each.
        """
        try:
            if not self._processes:
                self._start()
            # Where the output of this call begins.
            for process in self._processes:
                process.seek_end()
            message = pickle.dumps((function, args))
            for process in self._processes:
                with contextlib.suppress(BrokenPipeError):
                    process.connection.send_bytes(message)
            return Results(self._collect(timeout), self.read_output())
        except BaseException:
            # The keyboard's interrupt and pytest-timeout's included.
            self.close()
            raise

    def close(self) -> None:
        """Kills the processes and all that they started."""
        for process in self._processes:
            process.kill()
        for lock in self._locks:
            lock.close()
        self._processes, self._locks = [], []

    def _start(self):
        count = 1 if self.kind in _DEVICES else self.num_workers
        # Virtual workers have as many threads as processes would.
        sharing = 1 if self.kind == "mirrored" else self.num_workers
        base = light_environment(
            TESTS_POOL_KIND=self.kind, TESTS_DEVICES=str(self.num_workers)
        )
        base.pop("TF_CONFIG", None)
        # Held for as long as the workers live, so that nobody beside takes the ports.
        self._locks = reserve_ports(count)
        cluster = [local_address(lock) for lock in self._locks]
        for index in range(count):
            task = {"type": "worker", "index": index}
            env = worker_env(base, {"worker": cluster}, task, sharing, 0)
            if self.kind in _DEVICES:
                del env["TF_CONFIG"]
            self._processes.append(_Process(index, env))
        # Each sends one answer when it is ready.
        self._collect(_START_SECONDS)

    def _collect(self, timeout):
        """The answers of all workers, which are good."""
        deadline = time.monotonic() + timeout
        waiting = {process.connection: process for process in self._processes}
        answers, failures = {}, {}
        while waiting:
            ready = connection.wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                break
            for one in ready:
                process = waiting.pop(one)
                try:
                    is_good, answer = process.connection.recv()
                except (EOFError, ConnectionResetError):
                    is_good, answer = False, f"died: {process.end()}"
                (answers if is_good else failures)[process.rank] = answer
                if not is_good:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        for process in waiting.values():
            late = f"still running after {timeout} s"
            failures[process.rank] = "waits for the others" if failures else late
        if failures:
            lines = [f"worker {rank}: {text}" for rank, text in failures.items()]
            raise AssertionError("\n".join([*lines, "Output:", self.read_output()]))
        return [answers[process.rank] for process in self._processes]

    def read_output(self) -> str:
        """What was printed since the call began, each line behind its worker's rank."""
        return "".join(
            f"[{process.rank}] {line}\n"
            for process in self._processes
            for line in process.read_output().splitlines()
        )


class Pools:
    """The pools of a test session by kind and size, closed together."""

    def __init__(self):
        self._pools: dict[tuple, WorkerPool] = {}

    def __call__(self, num_workers: int, kind: str = "multi_worker") -> WorkerPool:
        """Returns the pool of a kind and size, the same one each time."""
        key = num_workers, kind
        if key not in self._pools:
            self._pools[key] = WorkerPool(num_workers, kind)
        return self._pools[key]

    def close(self) -> None:
        """Closes all pools."""
        for pool in self._pools.values():
            pool.close()


class _Process:
    """One worker process in a session of its own."""

    def __init__(self, rank, env):
        self.rank = rank
        self._log = tempfile.TemporaryFile()
        self._start_of_call = 0
        self.connection, theirs = connection.Pipe()
        with theirs:
            fd = theirs.fileno()
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(fd), str(os.getpid())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[fd],
                start_new_session=True,
            )

    def seek_end(self):
        self._start_of_call = os.fstat(self._log.fileno()).st_size

    def read_output(self):
        size = os.fstat(self._log.fileno()).st_size - self._start_of_call
        # pread leaves the offset alone, which the worker shares and writes at.
        data = os.pread(self._log.fileno(), size, self._start_of_call)
        return data.decode(errors="replace")

    def end(self):
        """Says how the process ended, which has closed its connection."""
        # Not reaped: its id stays its own until `kill` has ended what it started.
        end = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOWAIT)
        if end.si_code == os.CLD_EXITED:
            return f"exit code {end.si_status}"
        return signal.Signals(end.si_status).name

    def kill(self):
        # The session's id is the process id; it is nobody else's before the wait.
        if self.popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
        self.connection.close()
        self._log.close()


def _serve() -> None:
    """A worker process' whole life: receives functions, sends what they return."""
    fd, parent = map(int, sys.argv[1:])
    # Nothing else ends a worker whose pytest was killed hard.
    ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return
    link = connection.Connection(fd)
    kind = os.environ["TESTS_POOL_KIND"]
    _send(link, *_attempt(_begin, kind))
    while True:
        try:
            message = link.recv_bytes()
        except EOFError:
            # Threads of TensorFlow's server would keep the process.
            os._exit(0)
        _send(link, *_attempt(_call, kind, message))


def _begin(kind):
    if kind != "bare":
        # Not above: it imports TensorFlow.
        from tests import autotune, fixed_costs

        autotune.disable()
        fixed_costs.use()
        strategy_and_rank()
        # TensorFlow's own objects never go; each collection would visit them.
        gc.collect()
        gc.freeze()


def _call(kind, message):
    if kind != "bare":
        _forget()
    function, args = pickle.loads(message)
    return function(*args)


def _forget():
    """Sets back what a test may have left in the process' global state."""
    import keras
    import tensorflow as tf

    # Garbage is collected below.
    keras.backend.clear_session(free_memory=False)
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    keras.utils.set_random_seed(0)
    tf.config.run_functions_eagerly(False)
    # Whoever logs by the root logger configures it.
    logging.getLogger().handlers.clear()
    # Whole models of the last call hang in circles; each is searched for by the next.
    gc.collect()


def _attempt(function, *args) -> tuple[bool, Any]:
    try:
        return True, function(*args)
    except BaseException:
        return False, traceback.format_exc()


def _send(link, is_good, answer):
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        link.send((is_good, answer))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        link.send((False, f"an answer that cannot be pickled: {error}"))
