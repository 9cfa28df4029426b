"""Hosts in network namespaces on one switch, each with a link of a given rate.

Linux, as root, with iproute2. Nothing is changed outside the namespaces: the switch, a
bridge, has one of its own, so that addresses and firewalls of this machine do not
matter, and two clusters beside each other may have the same addresses.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tfgradcomp.planning.network import bits_per_second

INTERFACE = "eth0"
_PREFIX = "tfgradcomp-"

_RECEIVE = """
import socket
server = socket.create_server(("", 5001))
print("listening", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 20):
    pass
connection.sendall(b".")
"""
_SEND = """
import socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
connection = socket.create_connection((address, 5001))
begin = time.perf_counter()
connection.sendall(bytes(size))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(size / (time.perf_counter() - begin))
"""


class Unavailable(RuntimeError):
    """This machine does not let us make a virtual cluster."""


class Counters(NamedTuple):
    """Bytes that have gone through an interface, Ethernet's headers included."""

    sent: int
    received: int


def interface_bytes(name: str) -> Counters:
    """Returns what an interface has moved, read within its namespace."""
    folder = Path("/sys/class/net", name, "statistics")
    return Counters(
        *(int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    )


class Host(NamedTuple):
    """A host of the cluster.

    Attributes:
        namespace: Name of its network namespace.
        address: Its IPv4 address. All ports are free.
        switch: Name of the switch's network namespace.
        port: Name of the interface at the switch's end of its link.
    """

    namespace: str
    address: str
    switch: str
    port: str

    def shape(self, rate: str) -> None:
        """Gives the host's link a rate, in each direction, as `tc` takes it."""
        # A millisecond at once, and at least ten packets; a switch's buffer of 50.
        per_millisecond = bits_per_second(rate) / 8000
        burst = max(16384, round(per_millisecond))
        limit = max(262144, round(50 * per_millisecond))
        for namespace, link in (
            (self.switch, self.port),
            (self.namespace, INTERFACE),
        ):
            _run(
                *("tc", "-n", namespace, "qdisc", "replace", "dev", link, "root"),
                *("handle", "1:", "tbf", "rate", rate),
                *("burst", str(burst), "limit", str(limit)),
            )

    def command(self, *arguments: str) -> list[str]:
        """Returns the command that runs another one on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def counters(self) -> Counters:
        """Returns what the host's interface has moved, read from outside."""
        text = _run("ip", "-n", self.namespace, "-s", "-j", "link", "show", INTERFACE)
        stats = json.loads(text)[0]["stats64"]
        return Counters(stats["tx"]["bytes"], stats["rx"]["bytes"])


@contextlib.contextmanager
def virtual_cluster(count: int, rate: str, delay: str = "0ms") -> Iterator[list[Host]]:
    """Makes a cluster; removes it, and all processes in it, at the end of the block.

    A cluster of a process that was killed hard is removed by the next one.

    Args:
        count: Number of hosts.
        rate: Of every link, in each direction, as `tc` takes it: `"1gbit"`.
        delay: What every packet waits on its way out of a host, as `tc` takes it.

    Raises:
        Unavailable: If it cannot be made here.
    """
    _remove_leftovers()
    own = f"{_PREFIX}{os.getpid()}-"
    switch = f"{own}switch"
    hosts = [
        Host(f"{own}{i}", f"10.0.0.{i + 1}", switch, f"port{i}") for i in range(count)
    ]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "addrgenmode", "none", "up")
        for host in hosts:
            _plug_in(host, rate, delay)
        yield hosts
    finally:
        for namespace in (*(host.namespace for host in hosts), switch):
            _remove(namespace)


def tcp_rate(sender: Host, receiver: Host, size: int) -> float:
    """Returns the bits a second of one TCP connection that carries `size` bytes."""
    receive = receiver.command(sys.executable, "-c", _RECEIVE)
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as server:
        try:
            server.stdout.readline()
            send = (sys.executable, "-c", _SEND, receiver.address, str(size))
            return 8 * float(_run(*sender.command(*send), timeout=120))
        finally:
            server.kill()


def _plug_in(host, rate, delay):
    name, _, switch, port = host
    _run("ip", "netns", "add", name)
    _run(
        *("ip", "link", "add", INTERFACE, "netns", name),
        *("type", "veth", "peer", "name", port, "netns", switch),
    )
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
    for namespace, link in ((switch, port), (name, INTERFACE)):
        # No address by itself: hosts that say hello would be counted.
        up = ("addrgenmode", "none", "up")
        _run("ip", "-n", namespace, "link", "set", link, *up)
    host.shape(rate)
    if float(re.match(r"[\d.]*", delay)[0] or 1):
        _run(
            *("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "parent", "1:1"),
            *("netem", "delay", delay, "limit", "100000"),
        )
    _run("ip", "-n", name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _remove_leftovers():
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        found = re.match(rf"{_PREFIX}(\d+)-", name)
        if found and not Path("/proc", found[1]).exists():
            _remove(name)


def _remove(namespace):
    # One that was never made, or is gone, is no reason to leave the others.
    with contextlib.suppress(Unavailable):
        for _ in range(50):
            pids = [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        _run("ip", "netns", "delete", namespace)


def _run(*command, timeout=20):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        message = done.stderr.strip().rstrip(".")
    except (OSError, subprocess.TimeoutExpired) as error:
        done, message = None, str(error)
    if done is None or done.returncode:
        raise Unavailable(
            f"`{' '.join(command[:12])}` failed: {message}. A virtual cluster needs "
            "Linux, root (in a container: --privileged), iproute2, and a kernel with "
            "veth, bridge, sch_tbf and, for a delay, sch_netem."
        )
    return done.stdout
