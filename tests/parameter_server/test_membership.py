"""Loss of workers: the others continue or wait."""

from types import SimpleNamespace

import pytest

from tfgradcomp.compat import remote
from tfgradcomp.parameter_server.membership import Membership


class Cluster:
    """A cluster whose servers run, and whose workers return at once."""

    def __init__(self):
        self.has_waited = False

    def check_servers(self, lost):
        pass

    def wait_for_all(self):
        self.has_waited = True


def worker(device, rounds=5):
    return SimpleNamespace(device=device, rounds=lambda: rounds)


@pytest.mark.parametrize("waits", [False, True])
def test_survivors_continue_or_wait(monkeypatch, waits):
    cluster, assembled = Cluster(), []
    membership = Membership(cluster, None, None, None, waits_for_lost=waits)
    membership.workers = [worker("a"), worker("b"), worker("c")]
    monkeypatch.setattr(remote, "reconnect", lambda: assembled.append("reconnected"))
    monkeypatch.setattr(
        *(membership, "_assemble"),
        lambda devices, old: assembled.append((devices, [one.device for one in old])),
    )
    membership.resume_without({"b"})
    assert cluster.has_waited == waits
    if waits:
        assert assembled == ["reconnected", (["a", "b", "c"], ["a", "c"])]
    else:
        assert assembled == [(["a", "c"], ["a", "c"])]


def test_survivors_of_different_rounds_raise():
    membership = Membership(Cluster(), None, None, None, waits_for_lost=False)
    membership.workers = [worker("a", 5), worker("b", 6), worker("c")]
    with pytest.raises(RuntimeError, match="different numbers of steps"):
        membership.resume_without({"c"})
    with pytest.raises(RuntimeError, match="All workers are gone"):
        membership.resume_without({"a", "b", "c"})


def test_a_failed_start_frees_its_queues():
    freed = []
    queues = SimpleNamespace(free=lambda: freed.append("queues"))

    class Channels:
        @staticmethod
        def channel_class(*args):
            return SimpleNamespace(queues=queues)

        @staticmethod
        def at(channel, rank):
            return None

    def make_worker(*args):
        raise ValueError("a model that cannot be built")

    cluster = SimpleNamespace(workers=["a"], servers=["s"], devices=["a"])
    models = SimpleNamespace(make_worker=make_worker)
    membership = Membership(cluster, models, Channels, None, waits_for_lost=False)
    with pytest.raises(ValueError, match="cannot be built"):
        membership.begin(None)
    assert freed == ["queues"]
    assert membership.channel is None
