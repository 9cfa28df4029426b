"""Sockets that listen for other processes, of IPv4 and IPv6."""

import json
import socket

import pytest

from tests.launch.processes import has_ipv6
from tfgradcomp.collectives import stalls
from tfgradcomp.listening import listen_at

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")


@pytest.mark.parametrize(
    ("host", "family"),
    [
        ("127.0.0.1", socket.AF_INET),
        pytest.param("::1", socket.AF_INET6, marks=needs_ipv6),
    ],
)
def test_a_host_listens_at_its_own_address(host, family):
    with listen_at(host, 0) as listener:
        assert listener.family == family
        assert listener.getsockname()[0] == host


def test_a_name_of_others_listens_everywhere_at_its_port():
    with listen_at("nowhere.invalid", 0) as listener:
        host, port = listener.getsockname()[:2]
    assert host in ("::", "0.0.0.0")
    with listen_at("nowhere.invalid", port) as listener:
        assert listener.getsockname()[1] == port


@needs_ipv6
def test_a_watchdog_answers_over_ipv6():
    watchdog = stalls.StallWatchdog(0, stalls.Limits(60.0, float("inf")))
    port = watchdog.listen("::1")
    with socket.create_connection(("::1", port), 10) as link:
        answer = json.loads(link.makefile().read())
    assert answer.keys() == {"entered", "place"}
