"""Collectives over TCP connections of this package, instead of TensorFlow's."""

import contextlib
import socket
import threading

import keras
import pytest

import tfgradcomp
from tests.collectives import tcp_cases
from tests.pool import WorkerPool
from tfgradcomp.collectives import LoopbackCollectives, connections
from tfgradcomp.transports import AllGather

TOKENS = [bytes([i]) * 32 for i in range(3)]


def test_results_are_those_of_grpc(pools):
    pool = pools(2)
    over_grpc, over_tcp = (
        pool.run(tcp_cases.digests, carrier).answers for carrier in ("grpc", "tcp")
    )
    assert over_tcp == over_grpc
    assert over_tcp[1:] == over_tcp[:-1]


def test_sums_and_maxima_are_those_of_grpc(pools):
    assert pools(3).run(tcp_cases.reductions).answers == [[]] * 3


def test_more_than_ten_workers_have_the_order_of_their_ranks(pools):
    # TensorFlow's collectives put worker 10 before worker 2.
    # Nothing travels as float32, which is added in this order.
    number, arguments = 11, (("sharded", "all_gather"), 0)
    with contextlib.closing(WorkerPool(number)) as pool:
        for carrier in ("grpc", "tcp"):
            answers = pool.run(tcp_cases.ranks_by, carrier).answers
            assert answers == [
                ([*range(number)], [100 * other + rank for other in range(number)])
                for rank in range(number)
            ]
        digests = pool.run(tcp_cases.digests, "grpc", *arguments).answers
        assert pool.run(tcp_cases.reductions).answers == [[]] * number
    virtual = pools(number, "virtual").run(tcp_cases.digests, "auto", *arguments)
    assert digests == virtual.answers * number


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "arguments", [{"run_eagerly": True}, {"steps_per_execution": 2}]
)
def test_fit_has_the_same_weights(pools, arguments):
    of_grpc, of_tcp = (
        pools(2).run(tcp_cases.fitted, carrier, arguments).answers
        for carrier in ("grpc", "tcp")
    )
    assert of_tcp == of_grpc


def test_a_step_of_fit_sends_nothing_by_grpc(pools):
    pool = pools(2)
    assert pool.run(tcp_cases.collectives_of_a_step, "auto").answers == [[]] * 2
    # The counts of rows and the logs travel as the gradients do.
    by_grpc = pool.run(tcp_cases.collectives_of_a_step, "grpc").answers
    assert all("CollectiveReduceV2" in found for found in by_grpc)


def test_auto_takes_tcp_where_all_workers_connect(pools):
    results = pools(2).run(tcp_cases.choose, "auto")
    assert results.answers == [(["TcpCollectives"], [0, 1])] * 2
    assert "gRPC" not in results.output


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("port", "cannot listen at 127.0.0.1"), ("link", "no way through")],
)
def test_auto_takes_grpc_where_a_worker_cannot(pools, fault, reason):
    results = pools(2).run(tcp_cases.choose, "auto", 0, fault)
    assert results.answers == [(["Hosts"], [0, 1])] * 2
    assert results.output.count("messages travel by gRPC") == 2
    assert results.output.count(reason) == 2
    # Asked for by name, it is an error on all workers.
    answers = pools(2).run(tcp_cases.choose, "tcp", 0, fault).answers
    assert all(reason in answer for answer in answers)


def test_all_workers_name_the_one_that_cannot_connect(pools):
    # Worker 2 finds worker 1 gone, and worker 0 waits for it.
    answers = pools(3).run(tcp_cases.choose, "tcp", 1, "way", 2.0).answers
    assert len(set(answers)) == 1
    assert "worker 1 cannot connect to worker 0" in answers[0]
    assert "use carrier='grpc'. Received: address=127.0.0.1:" in answers[0]


def test_exchanges_may_begin_in_different_orders(pools):
    # Worker r is late at call site r.
    assert pools(2).run(tcp_cases.in_other_orders).answers == [[[0, 1], [10, 11]]] * 2


def test_two_optimizers_take_steps_at_the_same_time(pools):
    alone, together = pools(2).run(tcp_cases.two_optimizers).answers[0]
    assert alone == together


@pytest.mark.parametrize("case", [tcp_cases.die, tcp_cases.die_with_a_child])
def test_a_worker_that_dies_is_named(pools, case):
    with pytest.raises(AssertionError) as caught:
        pools(2).run(case, 1, timeout=25)
    text = str(caught.value)
    # The pool waits for all who hold the worker's pipe.
    assert "worker 1: died: SIGKILL" in text or case is tcp_cases.die_with_a_child
    assert "AbortedError" in text
    assert "worker 1 has ended, or not answered for 60 s" in text
    assert "Exchange: sum of last words" in text


def test_a_step_that_fails_ends_the_exchange_of_all(pools):
    with pytest.raises(AssertionError) as caught:
        pools(2).run(tcp_cases.fail, 1)
    assert "worker 1 has ended, or not answered for 60 s" in str(caught.value)


@contextlib.contextmanager
def listening():
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in TOKENS]
    peers = [
        ("127.0.0.1", listener.getsockname()[1], token)
        for listener, token in zip(listeners, TOKENS, strict=True)
    ]
    yield listeners, peers
    for listener in listeners:
        listener.close()


def connect(listeners, peers, ranks):
    """Connects some workers, in threads; returns the sockets or the error of each."""
    results = {}

    def body(rank):
        try:
            given = listeners[rank], rank, peers, 5.0
            results[rank] = connections.exchange_tokens(*given)
        except (RuntimeError, TimeoutError) as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_stranger_is_turned_away():
    with listening() as (listeners, peers), contextlib.ExitStack() as stack:
        strangers = []
        # Nothing, a part, another token, the token with a rank that is none, or is not
        # of those that connect.
        for said in (
            *(b"", b"GET / HTTP/1.1\r\n", b"x" * 36, TOKENS[0][:20]),
            *(TOKENS[0] + bytes([9, 0, 0, 0]), TOKENS[0] + bytes(4)),
        ):
            link = stack.enter_context(socket.create_connection(peers[0][:2]))
            link.sendall(said)
            strangers.append(link)
        gone = socket.create_connection(peers[0][:2])
        gone.close()
        links = connect(listeners, peers, range(3))
        for rank, own in links.items():
            assert [link is None for link in own] == [i == rank for i in range(3)]
        for i, j in ((0, 1), (0, 2), (1, 2)):
            links[i][j].sendall(b"first words")
            assert links[j][i].recv(100) == b"first words"
            links[i][j].close()
            links[j][i].close()
        for link in strangers:
            link.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(100) == b""


def test_a_listener_that_is_no_worker_is_noticed():
    with listening() as (listeners, peers):
        other = [(*peers[0][:2], TOKENS[0]), (*peers[1][:2], TOKENS[2]), peers[2]]
        results = {}

        def body():
            results[0] = connect(listeners, peers, [0])[0]

        thread = threading.Thread(target=body)
        thread.start()
        # It expects another token of worker 0 than worker 0 knows.
        error = connect(listeners, other, [1])[1]
        assert "worker 1 cannot connect to worker 0 for carrier='tcp'" in str(error)
        assert "it shows another token" in str(error)
        thread.join()
        assert "Received: workers=[2]" in str(results[0])


def test_wrong_arguments_raise():
    with pytest.raises(ValueError, match=r"carrier must be .*Received: carrier='udp'"):
        tfgradcomp.TernGrad("sgd", carrier="udp")
    own = AllGather(LoopbackCollectives(tfgradcomp.transports.Loopback(2), 0))
    with pytest.raises(ValueError, match="has collectives of its own.*carrier='tcp'"):
        tfgradcomp.TernGrad("sgd", carrier="tcp", transport=own)
    assert tfgradcomp.TernGrad("sgd", transport=own).carrier == "auto"


def test_one_worker_connects_to_nobody():
    weights = []
    for carrier in ("grpc", "tcp"):
        variable = keras.Variable([1.0, 2.0])
        optimizer = tfgradcomp.TernGrad("sgd", carrier=carrier, min_size=0)
        optimizer.apply([keras.ops.ones(2)], [variable])
        weights.append(variable.numpy().tolist())
    assert weights[0] == weights[1]
