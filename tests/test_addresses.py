"""Addresses of processes, of IPv4 and IPv6, and sockets that listen at them."""

import ipaddress
import json
import socket

import pytest

from tests.launch.processes import needs_ipv6
from tfgradcomp.addresses import listen_at, split_address
from tfgradcomp.collectives import stalls


@pytest.mark.parametrize(
    ("address", "host"),
    [("a.org:4000", "a.org"), ("10.0.0.1:4000", "10.0.0.1"), ("[::1]:4000", "::1")],
)
def test_an_address_has_a_host_without_brackets(address, host):
    assert split_address(address) == (host, "4000")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_an_address_of_this_machine_is_listened_at(host):
    with listen_at(host, 0) as listener:
        assert listener.getsockname()[0] == host


def test_localhost_is_of_this_machine_alone():
    with listen_at("localhost", 0) as listener:
        assert ipaddress.ip_address(listener.getsockname()[0]).is_loopback


# Of a machine's own name, /etc/hosts often knows the loopback address alone. The last
# one is an address of no machine.
@pytest.mark.parametrize("host", [socket.gethostname(), "no.invalid", "192.0.2.1"])
def test_what_others_may_know_otherwise_listens_everywhere_at_its_port(host):
    with listen_at(host, 0) as listener:
        everywhere, port = listener.getsockname()[:2]
    assert everywhere in ("::", "0.0.0.0")
    with listen_at(host, port) as listener:
        assert listener.getsockname()[1] == port


def watchdog():
    return stalls.StallWatchdog(0, stalls.Limits(60.0, float("inf")))


@needs_ipv6
def test_a_watchdog_answers_over_ipv6():
    with socket.create_connection(("::1", watchdog().listen("::1")), 10) as link:
        answer = json.loads(link.makefile().read())
    assert answer.keys() == {"entered", "place"}


def test_a_second_watchdog_of_a_process_takes_another_port(monkeypatch):
    port = watchdog().listen("127.0.0.1")
    monkeypatch.setenv(stalls.WATCH_PORT, str(port))
    assert watchdog().listen("127.0.0.1") not in (port, 0)
