"""The network of the workers of one machine."""

import os
import re
import socket
import subprocess
import sys

import pytest

from tests.launch.processes import run
from tfgradcomp.launch.network import reachable_interfaces

pytestmark = pytest.mark.timeout(120)
LINE = re.compile(
    r"warning: anyone who can connect through .* can run code in the workers\. "
)
# Some kernels allow no private network.
ENTER = "from tfgradcomp.launch.network import enter_private_network as enter; enter()"
CAN_HIDE = not subprocess.run(
    [sys.executable, "-c", ENTER], capture_output=True
).returncode
hides = pytest.mark.skipif(not CAN_HIDE, reason="The kernel makes no such networks.")

# Each worker listens at its own address on all interfaces, as TensorFlow does, and
# connects to the other worker; then it waits while the test tries to connect.
BODY = """\
    import socket
    addresses = [a.rpartition(":") for a in CONFIG["cluster"]["worker"]]
    ports = [int(port) for _, _, port in addresses]
    server = socket.create_server(("0.0.0.0", ports[INDEX]))
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", ports[1 - INDEX])).close()
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
    print(ports[INDEX], socket.if_nameindex(), os.getuid(), flush=True)
    print("pid", os.getpid(), flush=True)
    time.sleep(60)
"""


@hides
def test_workers_in_a_private_network_cannot_be_reached_from_outside(script, launch):
    process = launch("--workers", "2", "--network", "private", script(BODY))
    ports = []
    while len(process.pids) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        if found := re.search(r"pid (\d+)", line):
            process.pids.append(int(found[1]))
            continue
        port, interfaces, user = re.search(r"\] (\d+) (\[.*\]) (\d+)$", line).groups()
        assert interfaces == "[(1, 'lo')]"
        assert int(user) == os.getuid()
        ports.append(int(port))
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    process.terminate()
    assert "can run code" not in process.stderr.read()


@hides
def test_workers_restart_in_their_private_network(script):
    path = script(
        "print(len(os.listdir('/proc/self/fd')) > 0); sys.exit(ATTEMPT == '0')"
    )
    done = run("--workers", "2", "--max-restarts", "1", "--network", "private", path)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1" in done.stderr


@pytest.mark.parametrize("option", [[], ["--network", "host"]])
def test_a_warning_names_the_interfaces_that_reach_the_workers(script, option):
    done = run("--workers", "2", *option, script("print('ran')"))
    assert done.returncode == 0 and done.stdout.count("ran") == 2
    warnings = LINE.findall(done.stderr)
    assert len(warnings) == (not option and bool(reachable_interfaces()))
    assert all(name in warnings[0] for name in reachable_interfaces() if warnings)
    assert "lo" not in reachable_interfaces()


def test_a_kernel_that_gives_no_private_network_is_an_error(script):
    # The limit of a user namespace holds for the namespaces made inside it.
    limit = "echo 0 > /proc/sys/user/max_net_namespaces"
    launcher = f"{sys.executable} -m tfgradcomp.launch --workers 1 --network private"
    command = f"{limit} && exec {launcher} {script('print(1)')}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", command],
        capture_output=True,
        text=True,
    )
    if "max_net_namespaces" in done.stderr or "unshare" in done.stderr:
        pytest.skip("The kernel makes no user namespaces.")
    assert done.returncode == 2 and not done.stdout
    assert "gives this user no private network" in done.stderr
    assert "Received: --network private, " in done.stderr
