"""Mutual TLS between the hosts of a cluster, by the proxy stunnel.

The task of this host moves to a network namespace with loopback alone. There each task
of the cluster has a port of 127.0.0.1, the same on all hosts. Two proxies connect it to
the host's network; a socket stays in the namespace in which it was opened:

    outward: accepts inside, at the ports of the other tasks, and connects to their
        hosts by TLS, outside
    inward: accepts by TLS outside, at the host's own address in the cluster, and
        connects to the task, inside

Both require a certificate of the cluster's authority, so that nobody else reaches
TensorFlow's servers.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from tfgradcomp.addresses import listen_everywhere, split_address
from tfgradcomp.certificates import CA, CERTIFICATE, CLIENT, KEY, SERVER, check
from tfgradcomp.launch.network import enter_private_network
from tfgradcomp.launch.output import say

Cluster = Mapping[str, Sequence[str]]

WATCH_PORT = "TFGRADCOMP_WATCH_PORT"
"""Environment variable: where other workers ask for the progress of this one."""
CARRIER_PORT = "TFGRADCOMP_CARRIER_PORT"
"""Environment variable: where other workers connect for `carrier="tcp"`."""

# The other ports of a task, in order behind its own. Connections to them are told from
# others by the name that they ask for.
_OTHERS = {"watch": WATCH_PORT, "carrier": CARRIER_PORT}
_PORTS = 1 + len(_OTHERS)
# Below the ports that the kernel gives to outgoing connections.
_FIRST_PORT = 10000
# A line of stunnel's log on a certificate that one of the two sides refuses.
_REFUSAL = re.compile(
    r"SSL_(accept|connect): .*SSL routines:[^:]*:(.*(?:cert|alert).*)"
)
# The proxy may still hold the last bytes of a task that has ended.
_LAST_BYTES_SECONDS = 0.2

# Receives sockets that listen and becomes stunnel, which takes them as if from systemd.
# Ends with the launcher, as a worker does.
_BOOTSTRAP = """
import ctypes, os, socket, sys
launcher, count, stunnel, settings = sys.argv[1:]
ctypes.CDLL(None).prctl(1, ctypes.c_ulong(9))  # PR_SET_PDEATHSIG, SIGKILL
link, listeners = socket.socket(fileno=0), []
while len(listeners) < int(count):
    data, received, *_ = socket.recv_fds(link, 1, 250)
    if not data:
        sys.exit("the launcher has ended")
    listeners += received
for number in listeners:
    os.set_inheritable(number, True)
file = os.memfd_create("stunnel")
os.write(file, settings.encode())
os.lseek(file, 0, os.SEEK_SET)
os.dup2(file, link.detach())
env = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count}
if os.getppid() == int(launcher):
    os.execve(stunnel, ["stunnel", "-fd", "0"], env)
"""

_SETTINGS = """\
foreground = yes
syslog = no
debug = err
sslVersionMin = TLSv1.3
CAfile = {folder}/{ca}
cert = {folder}/{certificate}
key = {folder}/{key}
verifyChain = yes
libwrap = no
delay = yes
TIMEOUTidle = 1000000000
socket = l:TCP_NODELAY=1
socket = r:TCP_NODELAY=1
"""


def inside(cluster: Cluster) -> dict[str, list[str]]:
    """Returns the addresses of the tasks as each task sees them: on loopback."""
    ports = _ports(cluster)
    return {
        job: [f"127.0.0.1:{ports[job, index]}" for index in range(len(addresses))]
        for job, addresses in cluster.items()
    }


def outward_settings(folder: Path, cluster: Cluster, own: tuple[str, int]) -> str:
    """Returns the configuration of the proxy to the other hosts."""
    text = _settings(folder) + "client = yes\n"
    for (job, index), port in _ports(cluster).items():
        if (job, index) != own:
            host, remote = split_address(cluster[job][index])
            to = f"connect = {host}:{remote}\n"
            text += f"[{job} {index}]\naccept = 127.0.0.1:{port}\n{to}sni =\n"
            for offset, name in enumerate(_OTHERS, 1):
                text += f"[{name} of {job} {index}]\naccept = 127.0.0.1:{port + offset}"
                text += f"\n{to}sni = {name}\n"
    return text


def inward_settings(folder: Path, cluster: Cluster, own: tuple[str, int]) -> str:
    """Returns the configuration of the proxy to the task of this host."""
    port, address = _ports(cluster)[own], cluster[own[0]][own[1]]
    others = [
        f"[{name}]\nsni = task:{name}\nconnect = 127.0.0.1:{port + offset}\n"
        for offset, name in enumerate(_OTHERS, 1)
    ]
    return (
        f"{_settings(folder)}"
        f"[task]\naccept = {address.rpartition(':')[2]}\nconnect = 127.0.0.1:{port}\n"
        f"{''.join(others)}"
    )


@contextlib.contextmanager
def private_links(
    folder: str, cluster: Cluster, own: tuple[str, int]
) -> Iterator[tuple[dict[str, list[str]], dict[str, str]]]:
    """Moves this process to a private network, joined to the other hosts by TLS.

    Args:
        folder: Folder with the files of `certificates.create_for_cluster`.
        cluster: Addresses of all tasks by job.
        own: Job and index of the task of this host.

    Yields:
        The addresses by which the task reaches all tasks, and environment variables.

    Raises:
        ImportError: If `cryptography` is not installed.
        ValueError: If the certificates cannot be used.
        OSError: If the kernel gives no private network, the address of this host is
            in use, or stunnel is not installed.
    """
    check(folder, SERVER, CLIENT)
    if own not in _ports(cluster) or len(_ports(cluster)) < 2:
        raise ValueError(
            "--tls connects this task to others: name the addresses of all of them. "
            f"Received: task={own}, cluster={dict(cluster)}"
        )
    stunnel = _find_stunnel()
    path, ports = Path(folder).resolve(), _ports(cluster)
    others = [ports[task] for task in ports if task != own]
    outside = _listen(cluster[own[0]][own[1]])
    with contextlib.ExitStack() as proxies:
        # Started before this process leaves the network in which it connects.
        count = _PORTS * len(others)
        outward = _Proxy(stunnel, outward_settings(path, cluster, own), count)
        proxies.callback(outward.close)
        _enter_private_network()
        inward = _Proxy(stunnel, inward_settings(path, cluster, own), 1)
        proxies.callback(inward.close)
        inside_ports = [port + offset for port in others for offset in range(_PORTS)]
        outward.serve([socket.create_server(("127.0.0.1", p)) for p in inside_ports])
        inward.serve([outside])
        yield (
            inside(cluster),
            {name: str(ports[own] + 1 + i) for i, name in enumerate(_OTHERS.values())},
        )
        time.sleep(_LAST_BYTES_SECONDS)


class _Proxy:
    """A stunnel in the network of this process, for sockets of any network."""

    def __init__(self, stunnel: str, settings: str, listeners: int):
        self._link, end = socket.socketpair()
        bootstrap = [sys.executable, "-I", "-S", "-c", _BOOTSTRAP]
        arguments = [str(os.getpid()), str(listeners), stunnel, settings]
        with end:
            self._process = subprocess.Popen(
                [*bootstrap, *arguments],
                stdin=end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                text=True,
            )
        self._is_closed = False

    def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Gives the proxy its listening sockets, upon which it begins."""
        for listener in listeners:
            with listener:
                socket.send_fds(self._link, [b"."], [listener.fileno()])
        # No earlier: a process with threads cannot enter a private network.
        threading.Thread(target=self._report, daemon=True).start()

    def close(self) -> None:
        """Ends the proxy."""
        self._is_closed = True
        self._link.close()
        self._process.kill()
        self._process.wait()

    def _report(self) -> None:
        """Shows each reason for a refused connection once, and an early end."""
        last, shown = "", set()
        for line in cast(IO[str], self._process.stderr):
            last = line.strip()
            if (found := _REFUSAL.search(line)) and found[0] not in shown:
                shown.add(found[0])
                way = {"accept": "from", "connect": "to"}[found[1]]
                say(f"refused a connection {way} another host by TLS: {found[2]}")
        if not self._is_closed:
            say(f"stunnel has ended, and with it the run: {last}")
            os.kill(os.getpid(), signal.SIGTERM)


def _find_stunnel() -> str:
    stunnel = shutil.which("stunnel") or shutil.which("stunnel4")
    if not stunnel:
        raise FileNotFoundError(
            "--tls needs the program stunnel. Run: apt-get install stunnel4"
        )
    # One that takes no sockets would open its own, outside.
    version = subprocess.run([stunnel, "-version"], capture_output=True, text=True)
    if "SYSTEMD" not in version.stdout + version.stderr:
        raise OSError(
            "--tls needs a stunnel that takes sockets as from systemd, such as that of "
            f"Debian. Received: {stunnel}"
        )
    return stunnel


def _listen(address: str) -> socket.socket:
    port = int(split_address(address)[1])
    try:
        return listen_everywhere(port)
    except OSError as error:
        raise OSError(
            f"port {port} of this host cannot be used: end the program that listens "
            f"there. Received: {address}, {error.strerror}"
        ) from None


def _enter_private_network() -> None:
    try:
        enter_private_network()
    except OSError as error:
        raise OSError(
            "the kernel gives this user no private network, which --tls needs. Run as "
            f"root, or allow user namespaces. Received: {error.strerror}"
        ) from None


def _ports(cluster: Cluster) -> dict[tuple[str, int], int]:
    """Returns the port of each task inside; the next ones are its others."""
    # The order of jobs may differ between hosts.
    tasks = [(job, i) for job in sorted(cluster) for i in range(len(cluster[job]))]
    return {task: _FIRST_PORT + _PORTS * number for number, task in enumerate(tasks)}


def _settings(folder: Path) -> str:
    return _SETTINGS.format(folder=folder, ca=CA, certificate=CERTIFICATE, key=KEY)
