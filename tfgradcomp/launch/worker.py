"""One worker process and all that it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque

from tfgradcomp.launch.output import TAIL_LINES

# A worker must not outlive a launcher that was killed with SIGKILL, and only the kernel
# can ensure that. `preexec_fn` would ask for it between fork and exec, where Python
# code can deadlock; this tiny program asks in a clean process, and exec keeps the
# setting (and the process id). The parent check covers a launcher that died before the
# prctl.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, ctypes.c_ulong(9))  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Worker:
    """One worker process in its own session; starts when it is created.

    Args:
        label: Name in the output: an index, or job and index.
        command: Arguments of the process after the Python executable.
        env: Environment of the process.

    Attributes:
        label: Name in the output.
        env: Environment of the process.
        tail: The last lines of its output.
        process: The process.
    """

    def __init__(self, label: str, command: list[str], env: dict[str, str]):
        python, launcher = sys.executable, str(os.getpid())
        # -I -S: the bootstrap needs no site packages and no user settings.
        bootstrap = [python, "-I", "-S", "-c", _DIE_WITH_PARENT, launcher]
        self.label, self.env = label, env
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        # The session's id is the process id: signals reach the worker's children too,
        # and Ctrl-C in the terminal reaches the launcher alone, which passes it on.
        self.process = subprocess.Popen(
            [*bootstrap, python, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def send(self, signum: int) -> None:
        """Sends a signal to the worker and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def kill(self) -> None:
        """Kills the worker and all that it started, and waits for its end."""
        self.send(signal.SIGKILL)
        self.process.wait()

    def has_ended(self) -> bool:
        """Returns whether the worker has ended; if so, kills all that it started."""
        if self.is_running:
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.process.pid, how):
                # Before the wait, which frees the process id for another process.
                self.kill()
        return not self.is_running

    @property
    def is_running(self) -> bool:
        """True if the worker had not ended when `has_ended` was last called."""
        return self.process.returncode is None

    @property
    def exit_code(self) -> int:
        """Exit code as a shell gives it: 128 + signal if a signal ended the worker."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def __str__(self):
        code = self.process.returncode
        names = {s.value: s.name for s in signal.Signals}
        how = f"exit code {code}" if code >= 0 else names.get(-code, f"signal {-code}")
        name = f"worker {self.label}" if self.label.isdigit() else self.label
        return f"{name} (pid {self.process.pid}) died: {how}"
