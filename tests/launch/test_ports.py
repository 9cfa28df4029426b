"""Ports that launchers reserve."""

import socket

import pytest

from tfgradcomp.launch.ports import reserve_ports

pytestmark = pytest.mark.timeout(120)


def test_concurrent_launchers_get_different_ports(script, launch):
    path = script("""
        print(*CONFIG["cluster"]["worker"], "pid", os.getpid())
        time.sleep(600)
    """)
    seen = []
    for process in [launch("--workers", "1", path) for _ in range(4)]:
        line = process.stdout.readline()
        process.pids += [int(line.split()[-1])]
        seen.append(line.split()[1])
    assert len(set(seen)) == 4


def test_ports_reserved_or_in_use_are_not_given(monkeypatch):
    monkeypatch.setattr("random.sample", lambda ports, count: ports[:3])
    first = reserve_ports(1)
    port = first[0].getsockname()[1]
    second = reserve_ports(1)
    assert second[0].getsockname()[1] != port
    first[0].close()
    with socket.create_server(("", port)):
        third = reserve_ports(1)
        assert third[0].getsockname()[1] not in (port, second[0].getsockname()[1])
        with pytest.raises(RuntimeError, match="3 workers need 3: end other"):
            reserve_ports(3)
    second[0].close()
    third[0].close()
