"""Start the workers of one training run, show their output and end them together.

Standard library only, as importing TensorFlow would cost seconds and memory. Linux
only: process sessions, core affinity and the parent-death signal are used freely.
"""

import argparse
import contextlib
import json
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque

TAIL_LINES = 20
CHUNK = 1 << 16

# A progress bar goes back with \r or \b to draw itself anew: each ends a line too.
_LINE_END = re.compile(rb"([\r\n\x08])")

# Written before TensorFlow reads TF_CPP_MIN_LOG_LEVEL, so nothing switches them off.
_START_NOTICE = re.compile(
    rb"All log messages before absl::InitializeLog|oneDNN custom operations are on"
)

# A worker must not outlive a launcher that was killed hard, and only the kernel can
# see to that. `preexec_fn` would set it between fork and exec, where Python code can
# deadlock; this tiny program sets it in a clean process, and exec keeps it (and the
# process id). The parent check covers a launcher that died before the prctl.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, ctypes.c_ulong(9))  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

_EXAMPLES = """\
examples:
  python -m tfgradcomp.launch --workers 4 train.py --epochs 3
  python -m tfgradcomp.launch --workers 2 -m my_package.train --epochs 3
  python -m tfgradcomp.launch --workers 2 --ps 1 train.py   (with a chief besides)
  python -m tfgradcomp.launch --cluster a:4000,b:4000 --index 0 train.py   (on host a)

Each worker gets TF_CONFIG, TFGRADCOMP_RESTART_COUNT (0 at first) and
PYTHONUNBUFFERED=1. Unless you set them yourself, it also gets its share of the cores
(TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS, OMP_NUM_THREADS) and
TF_CPP_MIN_LOG_LEVEL=2, which hides TensorFlow's C++ INFO and WARNING lines; its two
notices at every start are left out as well.
Where TF_CONFIG or Slurm already describes the cluster, the script runs as one
process with the environment as it is.

With --ps the chief decides: when it ends, the workers and parameter servers are ended.
A worker that dies is started anew, alone, up to K times with --max-restarts K.

exit code: 0 when all workers ended with 0, else that of the worker that failed first;
with --ps that of the chief (128 + signal when a signal ended it, or the launcher).
"""


def main(argv=None) -> int:
    """Run the command line `argv` and return the exit code."""
    options = _parse(argv)
    if found := _cluster_in(os.environ):
        given = ("workers", "ps", "cluster", "max_restarts")
        ignored = [f"--{n.replace('_', '-')}" for n in given if getattr(options, n)]
        _say(
            f"{found}, so the script runs as one process in the environment as it is"
            + (f"; {' and '.join(ignored)} ignored" if ignored else "")
        )
        os.execv(sys.executable, [sys.executable, *options.command])
    # Kept until the launcher ends, so that a restart gets ports never used before.
    locks = []
    with _signal_socket() as signals:
        if options.ps:
            return _run_with_servers(options, signals)
        for attempt in range(options.max_restarts + 1):
            if options.cluster:
                cluster, indices = options.cluster, [options.index]
            else:
                indices = range(options.workers)
                locks += (fresh := reserve_ports(options.workers))
                cluster = [f"127.0.0.1:{lock.getsockname()[1]}" for lock in fresh]
            envs = {
                index: worker_env(
                    os.environ,
                    {"worker": cluster},
                    {"type": "worker", "index": index},
                    len(indices),
                    attempt,
                )
                for index in indices
            }
            group = _Group(options.grace, signals)
            code = group.run(options.command, envs)
            if code == 0 or group.told_to_stop or attempt == options.max_restarts:
                return code
            _say(f"restart {attempt + 1} of {options.max_restarts}")


def _run_with_servers(options, signals):
    """Run a chief, workers and parameter servers; return the chief's exit code."""
    counts = {"chief": 1, "worker": options.workers, "ps": options.ps}
    locks = reserve_ports(sum(counts.values()))
    addresses = iter([f"127.0.0.1:{lock.getsockname()[1]}" for lock in locks])
    cluster = {job: [next(addresses) for _ in range(n)] for job, n in counts.items()}
    envs = {}
    for job, count in counts.items():
        for index in range(count):
            task = {"type": job, "index": index}
            label = job if job == "chief" else f"{job} {index}"
            envs[label] = worker_env(os.environ, cluster, task, len(locks), 0)
    group = _Group(options.grace, signals, "chief", options.max_restarts)
    return group.run(options.command, envs)


def _parse(argv):
    """Read the command line; `command` is what follows the Python executable."""
    parser = argparse.ArgumentParser(
        prog="python -m tfgradcomp.launch",
        usage="%(prog)s (--workers N [--ps P] | --cluster HOST:PORT,... --index I)\n"
        "         [--max-restarts K] [--grace SECONDS] (SCRIPT | -m MODULE) [ARGS ...]",
        description="Start the workers of one training run, show their output as "
        "`[index] line`,\nand end all of them when one fails.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, rest = parser.add_argument, argparse.REMAINDER
    add("--workers", type=int, metavar="N", help="start N workers on this host")
    add("--ps", type=int, metavar="P", help="and P parameter servers with a chief")
    add(
        "--cluster",
        type=_addresses,
        metavar="HOST:PORT,...",
        help="every worker of a run on several hosts; starts one of them here",
    )
    add("--index", type=int, metavar="I", help="which one of --cluster, from 0")
    restarts = "start all workers anew up to K times after a failure (default 0)"
    add("--max-restarts", type=int, default=0, metavar="K", help=restarts)
    grace = "what workers told to end get before SIGKILL (default 5)"
    add("--grace", type=float, default=5.0, metavar="SECONDS", help=grace)
    add("-m", dest="module", nargs=rest, metavar="MODULE", help="run a module")
    add("script", nargs=rest, metavar="SCRIPT", help="run a script")
    options = parser.parse_args(argv)
    if sys.platform != "linux":
        parser.error(f"needs Linux, not {sys.platform}: set TF_CONFIG for each worker")
    if options.script[:1] == ["--"]:
        del options.script[0]
    if options.module:
        options.command = ["-m", *options.module]
    elif not options.script:
        parser.error("no script given: name a script.py, or a module with -m")
    elif not os.path.exists(options.script[0]):
        parser.error(f"script {options.script[0]!r} does not exist: check its path")
    else:
        options.command = options.script
    if options.max_restarts < 0:
        parser.error(f"--max-restarts is {options.max_restarts}: give 0 or more")
    if not 0 <= options.grace < float("inf"):
        parser.error(f"--grace is {options.grace}: give seconds, 0 or more")
    if options.workers is not None and options.workers < 1:
        parser.error(f"--workers is {options.workers}: give 1 or more")
    if options.ps is not None and options.ps < 1:
        parser.error(f"--ps is {options.ps}: give 1 or more, or leave it out")
    if options.ps and options.cluster:
        parser.error("--ps goes with --workers: on several hosts set TF_CONFIG")
    if not (options.workers or options.cluster or _cluster_in(os.environ)):
        parser.error("no workers given: say how many with --workers N, or --cluster")
    if options.workers and options.cluster:
        parser.error("--workers and --cluster exclude each other: give one of them")
    if bool(options.cluster) != (options.index is not None):
        parser.error("--cluster and --index belong together: give both or neither")
    if options.cluster and not 0 <= options.index < len(options.cluster):
        parser.error(
            f"--index is {options.index}, but --cluster has {len(options.cluster)} "
            f"workers: give 0 to {len(options.cluster) - 1}"
        )
    return options


def _addresses(text):
    """Split HOST:PORT,... and check each part."""
    addresses = [part.strip() for part in text.split(",")]
    for address in addresses:
        host, _, port = address.rpartition(":")
        bare_ipv6 = ":" in host and not re.fullmatch(r"\[.+\]", host)
        is_port = re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536
        if not host or bare_ipv6 or not is_port:
            raise argparse.ArgumentTypeError(
                f"{address!r} is not HOST:PORT: write for example 10.0.0.1:4000 or "
                "[fe80::1]:4000, ports 1 to 65535"
            )
        if addresses.count(address) > 1:
            raise argparse.ArgumentTypeError(f"{address} is there twice: name it once")
    return addresses


def _cluster_in(env):
    """Say what in `env` already describes a cluster; empty when nothing does."""
    if env.get("TF_CONFIG"):
        return "TF_CONFIG is set"
    tasks = env.get("SLURM_NTASKS", "")
    if "SLURM_PROCID" in env and tasks.isdecimal() and int(tasks) > 1:
        return f"Slurm started this as task {env['SLURM_PROCID']} of {tasks}"
    return ""


def reserve_ports(count):
    """Reserve `count` TCP ports; return the sockets to hold for as long as they serve.

    TensorFlow's gRPC server binds the wildcard address without SO_REUSEPORT, so a TCP
    socket held here would keep it out, and one closed just before would leave a gap.
    The lock is the UDP port of the same number: launchers on this machine exclude each
    other through it, in any container that shares the network, and it goes when the
    launcher does, however it ends. Numbers are drawn from outside the range of which
    the kernel gives ports to clients, so no outgoing connection takes one meanwhile.
    """
    low, high = 32768, 60999
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
    ports = range(10000, 30000)  # Kubernetes hands out the next 2768 itself.
    ports = [port for port in ports if not low <= port <= high] or list(ports)
    locks = []
    for port in random.sample(ports, len(ports)):
        lock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            lock.bind(("", port))
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            lock.close()
            continue
        locks.append(lock)
        if len(locks) == count:
            return locks
    raise RuntimeError(
        f"found {len(locks)} free ports between {ports[0]} and {ports[-1]}, but "
        f"{count} workers need {count}: end other servers or start fewer workers"
    )


def worker_env(base, cluster, task, on_this_host, attempt):
    """Return the environment of a task; what the user set in `base` wins."""
    share = max(1, len(os.sched_getaffinity(0)) // on_this_host)
    defaults = {
        "OMP_NUM_THREADS": share,
        "TF_NUM_INTRAOP_THREADS": share,
        # Not the share: an op that waits for other workers may hold its thread, and
        # were all held the workers would wait for ever. Waiting threads cost no core.
        "TF_NUM_INTEROP_THREADS": max(4, share),
        "TF_CPP_MIN_LOG_LEVEL": 2,
    }
    return {
        **{name: str(value) for name, value in defaults.items()},
        **base,
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        "TFGRADCOMP_RESTART_COUNT": str(attempt),
        "PYTHONUNBUFFERED": "1",
    }


class LineCutter:
    """Cut a stream of bytes into whole lines, a redrawn progress bar included."""

    def __init__(self):
        self._rest = b""
        self._redrawn = False  # A line was shown, its newline may follow.

    def feed(self, data):
        """Return the lines that `data` completes, without their ends."""
        lines = []
        *pieces, self._rest = _LINE_END.split(self._rest + data)
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            # Blank are the steps of a redraw, and the newline that ends one.
            if text.strip() or (end == b"\n" and not self._redrawn):
                lines.append(text)
                self._redrawn = end != b"\n"
            elif end == b"\n":
                self._redrawn = False
        return lines

    def close(self):
        """Return what is left when the stream ends, as a list of at most one line."""
        return [self._rest] if self._rest else []


class _Worker:
    """One worker process in a session of its own, and its last lines."""

    def __init__(self, label, command, env):
        python, launcher = sys.executable, str(os.getpid())
        # -I -S: the bootstrap needs no site packages and nothing of the user's.
        bootstrap = [python, "-I", "-S", "-c", _DIE_WITH_PARENT, launcher]
        self.label, self.env = str(label), env
        self.tail = deque(maxlen=TAIL_LINES)
        # The session's id is the process id: signals reach what the worker starts, and
        # Ctrl-C in the terminal reaches the launcher alone, which passes it on.
        self.process = subprocess.Popen(
            [*bootstrap, python, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def send(self, signum):
        """Send a signal to the worker and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def ended(self):
        """Say whether the worker has ended; when it just has, end what it started."""
        if self.process.returncode is None:
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.process.pid, how):
                # Before the wait that frees the process id for others to have.
                self.send(signal.SIGKILL)
                self.process.wait()
        return self.process.returncode is not None

    @property
    def code(self):
        """Exit code as a shell would give it."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def __str__(self):
        code = self.process.returncode
        names = {s.value: s.name for s in signal.Signals}
        how = f"exit code {code}" if code >= 0 else names.get(-code, f"signal {-code}")
        name = f"worker {self.label}" if self.label.isdigit() else self.label
        return f"{name} (pid {self.process.pid}) died: {how}"


class _Group:
    """The workers of one attempt, watched by one loop without threads."""

    def __init__(self, grace, signals, leader=None, restarts=0):
        self.grace, self.signals = grace, signals
        self.leader = leader  # Whose end is everybody's; None: the first failure is.
        self.restarts = restarts  # Of single workers, where there is a leader.
        self.selector = selectors.DefaultSelector()
        self.selector.register(signals, selectors.EVENT_READ)
        self.workers = []
        self.hides_notices = "TF_CPP_MIN_LOG_LEVEL" not in os.environ
        self.culprit = None  # The worker that failed first.
        self.told_to_stop = 0  # The first signal to the launcher.
        self.stopping = False
        self.deadline = None  # When those still running are killed.

    def run(self, command, envs):
        """Start a worker for each of `envs`, wait for all, return the exit code."""
        try:
            self.command = command
            for label, env in envs.items():
                self._start(_Worker(label, command, env))
            self._watch()
        finally:
            for worker in self.workers:
                if not worker.ended():
                    worker.send(signal.SIGKILL)
                    worker.process.wait()
            self._drain()
        if self.culprit:
            _say(f"{self.culprit}; its last lines:")
            self._show(2, self.culprit, self.culprit.tail)
            return self.culprit.code
        return 128 + self.told_to_stop if self.told_to_stop else 0

    def _start(self, worker):
        self.workers.append(worker)
        for fd, pipe in (1, worker.process.stdout), (2, worker.process.stderr):
            os.set_blocking(pipe.fileno(), False)
            data = fd, worker, LineCutter()
            self.selector.register(pipe, selectors.EVENT_READ, data)

    def _watch(self):
        while True:
            failed = [
                worker for worker in self.workers if worker.ended() and worker.code
            ]
            if self.leader and not self.stopping:
                failed = self._led(failed)
            if failed and not self.stopping:
                # The first seen dead; of several at once the one that a signal ended,
                # as a broken collective makes its peers raise rather than crash.
                self.culprit = min(failed, key=lambda w: w.process.returncode > 0)
                _say(f"{self.culprit}; ending the others")
                self._stop(signal.SIGTERM)
            if all(worker.process.returncode is not None for worker in self.workers):
                return
            if self.deadline and time.monotonic() >= self.deadline:
                self.deadline = None
                self._send(signal.SIGKILL)
            wait = self.deadline and max(0, self.deadline - time.monotonic())
            # Wakes as soon as a worker dies, for SIGCHLD is among the signals.
            for key, _ in self.selector.select(wait):
                self._read(key) if key.data else self._take_signals()

    def _led(self, failed):
        """Return the leader if it failed; bear with others, and start workers anew."""
        leader = next(w for w in self.workers if w.label == self.leader)
        for worker in failed:
            if worker is leader:
                continue
            self.workers.remove(worker)
            restart = self.restarts and worker.label.startswith("worker")
            _say(f"{worker}" + "; starting it anew" * bool(restart))
            if restart:
                self.restarts -= 1
                self._start(_Worker(worker.label, self.command, worker.env))
        if leader.ended() and not leader.code:
            self._stop(signal.SIGTERM)
        return [leader] if leader in failed else []

    def _take_signals(self):
        for signum in self.signals.recv(CHUNK):
            if signum == signal.SIGCHLD:
                continue
            name = signal.Signals(signum).name
            if signum == signal.SIGINT and self.told_to_stop:
                _say(f"{name} again: killing the workers")
                self._send(signal.SIGKILL)
                continue
            self.told_to_stop = self.told_to_stop or signum
            _say(f"{name}: passed on to the workers, killing them in {self.grace:g} s")
            self._stop(signum)

    def _stop(self, signum):
        self._send(signum)
        if not self.stopping:
            self.stopping = True
            self.deadline = time.monotonic() + self.grace

    def _send(self, signum):
        for worker in self.workers:
            if worker.process.returncode is None:
                worker.send(signum)

    def _read(self, key):
        """Show what has come; return False once there is no more to come."""
        fd, worker, cutter = key.data
        data = os.read(key.fd, CHUNK)
        lines = cutter.feed(data) if data else cutter.close()
        if self.hides_notices:
            lines = [line for line in lines if not _START_NOTICE.search(line)]
        worker.tail.extend(lines)
        self._show(fd, worker, lines)
        if not data:
            self.selector.unregister(key.fileobj)
            key.fileobj.close()
        return bool(data)

    def _drain(self):
        for key in list(self.selector.get_map().values()):
            # Blocks where a process that left the worker's session holds the pipe.
            with contextlib.suppress(BlockingIOError):
                while key.data and self._read(key):
                    pass
        self.selector.close()

    def _show(self, fd, worker, lines):
        label = worker.label.encode()
        data = b"".join(b"[%s] %s\n" % (label, line) for line in lines)
        if not _write(fd, data) and not self.stopping:
            # Nobody reads any more (`| head`, a closed terminal): end like any filter.
            self.told_to_stop = signal.SIGPIPE
            self._stop(signal.SIGTERM)


def _write(fd, data):
    """Write all of `data`, unbuffered; say whether somebody took it."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True


def _say(text):
    _write(2, f"tfgradcomp.launch: {text}\n".encode())


@contextlib.contextmanager
def _signal_socket():
    """Give a socket from which the numbers of arriving signals can be read."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signums = [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # As under nohup.
        signums.append(signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in signums}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        for signum in signums:
            signal.signal(signum, lambda *_: None)
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        reader.close()
        writer.close()
