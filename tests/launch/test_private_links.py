"""Mutual TLS between the hosts of a cluster."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs tfgradcomp[federated]")

from tests.launch.processes import TIMEOUT, assert_gone, pids, run
from tfgradcomp.certificates import create, create_for_cluster
from tfgradcomp.launch import private_links
from tfgradcomp.launch.ports import reserve_ports

pytestmark = pytest.mark.timeout(120)
ENTER = "from tfgradcomp.launch.network import enter_private_network as enter; enter()"
CAN_HIDE = not subprocess.run(
    [sys.executable, "-c", ENTER], capture_output=True
).returncode
HAS_STUNNEL = bool(shutil.which("stunnel") or shutil.which("stunnel4"))
links = pytest.mark.skipif(
    not (CAN_HIDE and HAS_STUNNEL),
    reason="Needs the program stunnel, and a kernel that makes private networks.",
)
CLUSTER = {"worker": ["a:4000", "[fe80::1]:4001"], "ps": ["c.example.org:4002"]}

# Each worker listens on all interfaces, as TensorFlow does, and at its other ports; it
# says a word to the other worker at all of them.
BODY = """\
    import contextlib, socket, threading
    print("pid", os.getpid(), flush=True)
    addresses = [a.rpartition(":") for a in CONFIG["cluster"]["worker"]]
    ports = [int(port) for _, _, port in addresses]
    names = ("TFGRADCOMP_WATCH_PORT", "TFGRADCOMP_CARRIER_PORT")
    own = [ports[INDEX], *(int(os.environ[name]) for name in names)]
    assert own == [ports[INDEX] + i for i in range(3)]
    assert len(socket.if_nameindex()) == 1
    servers = [socket.create_server(("", port)) for port in own]
    def answer(server, text):
        while True:
            link, _ = server.accept()
            link.sendall(text.encode())
            link.close()
    for server, name in zip(servers, ("task", "watch", "carrier")):
        arguments = server, f"{name} {INDEX}"
        threading.Thread(target=answer, args=arguments, daemon=True).start()
    def ask(port):
        while True:
            with contextlib.suppress(OSError):
                with socket.create_connection(("127.0.0.1", port)) as link:
                    if text := link.recv(100):
                        return text.decode()
            time.sleep(0.05)
    print("heard", *(ask(ports[1 - INDEX] + i) for i in range(3)), flush=True)
    time.sleep(60 if len(sys.argv) == 1 else 1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates") / "tls"
    create_for_cluster(folder)
    return str(folder)


@pytest.fixture
def addresses():
    """Two addresses of this machine, which here has two hosts."""
    locks = reserve_ports(2)
    yield [f"127.0.0.1:{lock.getsockname()[1]}" for lock in locks]
    for lock in locks:
        lock.close()


def test_each_host_has_the_same_addresses_inside():
    assert private_links.inside(CLUSTER) == {
        "worker": ["127.0.0.1:10003", "127.0.0.1:10006"],
        "ps": ["127.0.0.1:10000"],
    }
    turned = dict(reversed(CLUSTER.items()))
    assert private_links.inside(turned) == private_links.inside(CLUSTER)


def test_the_proxies_connect_each_port_of_each_task():
    outward = private_links.outward_settings(Path("/x"), CLUSTER, ("worker", 0))
    sections = re.findall(r"^\[(.*)\]\n((?:[^[\n].*\n)*)", outward, re.MULTILINE)
    assert sections == [
        ("ps 0", "accept = 127.0.0.1:10000\nconnect = c.example.org:4002\nsni =\n"),
        (
            "watch of ps 0",
            "accept = 127.0.0.1:10001\nconnect = c.example.org:4002\nsni = watch\n",
        ),
        (
            "carrier of ps 0",
            "accept = 127.0.0.1:10002\nconnect = c.example.org:4002\nsni = carrier\n",
        ),
        ("worker 1", "accept = 127.0.0.1:10006\nconnect = fe80::1:4001\nsni =\n"),
        (
            "watch of worker 1",
            "accept = 127.0.0.1:10007\nconnect = fe80::1:4001\nsni = watch\n",
        ),
        (
            "carrier of worker 1",
            "accept = 127.0.0.1:10008\nconnect = fe80::1:4001\nsni = carrier\n",
        ),
    ]
    inward = private_links.inward_settings(Path("/x"), CLUSTER, ("worker", 1))
    assert inward.endswith(
        "[task]\naccept = 4001\nconnect = 127.0.0.1:10006\n"
        "[watch]\nsni = task:watch\nconnect = 127.0.0.1:10007\n"
        "[carrier]\nsni = task:carrier\nconnect = 127.0.0.1:10008\n"
    )
    for text in (outward, inward):
        assert "verifyChain = yes\n" in text and "cert = /x/cert.pem\n" in text


def is_reserved(port):
    """Returns whether another test's workers serve at a port: see `reserve_ports`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as lock:
        try:
            lock.bind(("", port))
        except OSError:
            return True
    return False


@links
def test_workers_reach_each_other_and_nobody_else_reaches_them(
    folder, addresses, script, launch, tmp_path
):
    path = script(BODY)
    options = "--tls", folder, "--cluster", ",".join(addresses), "--index"
    launchers = [launch(*options, index, path) for index in ("1", "0")]
    for launcher, other in zip(launchers, (0, 1), strict=True):
        pids(launcher, 1)
        heard = f"heard task {other} watch {other} carrier {other}"
        assert heard in launcher.stdout.readline()
        launcher.pids += children_of(launcher.pid)
        assert len(launcher.pids) == 4  # Two proxies; the worker is a child, too.
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    private = [*range(10000, 10006), *(port + 1 for port in ports)]
    own = [port for port in private if not is_reserved(port)]
    assert own
    for port in own:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    # A hub's certificate is of another authority.
    create(tmp_path / "foreign", ["localhost"])
    assert said_by(ports[0], "not TLS") == b""
    for files in (None, tmp_path / "foreign"):
        with pytest.raises(ssl.SSLError, match="(?i)alert|unknown"):
            said_by(ports[0], files)
    assert said_by(ports[0], Path(folder)) == b"task 0"
    first, second = launchers
    first.kill()
    assert_gone(first.pids)
    second.terminate()
    assert second.wait(TIMEOUT) == 128 + signal.SIGTERM
    assert_gone(second.pids)
    assert "peer did not return a certificate" in second.stderr.read()


# What training by TCP needs: the carrier's port, TensorFlow's and the stall report's.
TRAINING = """\
    import hashlib, keras, numpy as np, tensorflow as tf, tfgradcomp
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rows = np.random.default_rng(0).normal(size=(64, 300)).astype("float32")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(8)])
        optimizer = tfgradcomp.TernGrad("sgd", min_size=0, carrier=sys.argv[1])
        model.compile(optimizer, "mse")
    model.fit(rows, rows[:, :8], batch_size=16, epochs=1, verbose=0)
    print(hashlib.sha256(model.get_weights()[0]).hexdigest(), flush=True)
"""


@links
@pytest.mark.slow  # Two imports of TensorFlow, twice.
@pytest.mark.timeout(300)
def test_training_by_tcp_has_the_bits_of_grpc(folder, addresses, script, launch):
    path = script(TRAINING)
    options = "--tls", folder, "--cluster", ",".join(addresses), "--index"
    found = set()
    for carrier in ("tcp", "grpc"):
        launchers = [launch(*options, index, path, carrier) for index in ("0", "1")]
        for launcher in launchers:
            output, errors = launcher.communicate(timeout=100)
            assert launcher.returncode == 0, errors
            found.add(output.split()[-1])
    assert len(found) == 1


@links
def test_hosts_with_certificates_of_two_authorities_do_not_start(
    folder, addresses, script, launch, tmp_path
):
    create_for_cluster(tmp_path / "other")
    path = script("print('ran')")
    launchers = [
        launch("--tls", given, "--cluster", ",".join(addresses), "--index", index, path)
        for given, index in ((folder, "0"), (str(tmp_path / "other"), "1"))
    ]
    line = launchers[1].stderr.readline()
    assert "refused a connection to another host by TLS: certificate verify" in line
    for launcher in launchers:
        launcher.terminate()
        output, _ = launcher.communicate(timeout=TIMEOUT)
        assert launcher.returncode == 128 + signal.SIGTERM and not output


@links
def test_workers_restart_together(folder, addresses, script, launch):
    path = script("sys.exit(3 * (ATTEMPT == '0'))")
    options = "--tls", folder, "--max-restarts", "1", "--cluster", ",".join(addresses)
    launchers = [launch(*options, "--index", index, path) for index in ("0", "1")]
    for launcher in launchers:
        _, errors = launcher.communicate(timeout=TIMEOUT)
        assert launcher.returncode == 0, errors
        assert "restart 1 of 1" in errors


@links
def test_the_task_of_tf_config_runs_with_the_addresses_inside(
    folder, addresses, script
):
    cluster = {"ps": addresses[:1], "chief": ["chief.example.org:1"]}
    config = {"cluster": cluster, "task": {"type": "ps", "index": 0}, "more": 1}
    path = script("print(json.dumps(CONFIG)); sys.exit(7)")
    done = run("--tls", folder, path, env={"TF_CONFIG": json.dumps(config)})
    assert done.returncode == 7, done.stderr
    label, _, text = done.stdout.partition("] ")
    assert label == "[ps 0"
    found = {"ps": ["127.0.0.1:10003"], "chief": ["127.0.0.1:10000"]}
    assert json.loads(text) == {**config, "cluster": found}


@links
def test_the_run_ends_with_its_proxy(folder, addresses, script, launch):
    path = script("print('pid', os.getpid(), flush=True)\ntime.sleep(60)")
    config = {"cluster": {"ps": addresses}, "task": {"type": "ps", "index": 1}}
    launcher = launch("--tls", folder, path, env={"TF_CONFIG": json.dumps(config)})
    (worker,) = pids(launcher, 1)
    proxies = [pid for pid in children_of(launcher.pid) if pid != worker]
    os.kill(proxies[0], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "stunnel has ended" in errors


def test_a_certificate_is_made_once(tmp_path):
    folder = tmp_path / "tls"
    done = run("--init-tls", str(folder))
    assert done.returncode == 0 and "Copy the folder to each host" in done.stderr
    assert sorted(os.listdir(folder)) == ["ca.pem", "cert.pem", "key.pem"]
    done = run("--init-tls", str(folder))
    assert done.returncode == 2 and "Name a new folder" in done.stderr


def test_what_cannot_be_used_is_an_error_before_the_worker_starts(
    folder, addresses, script, tmp_path
):
    path = script("print('ran')")
    one = "--cluster", ",".join(addresses), "--index", "0", path
    create(tmp_path / "hub", ["localhost"])
    config = {"cluster": {"worker": addresses}, "task": {"type": "evaluator"}}
    elsewhere = {**config, "task": {"type": "evaluator", "index": 0}}
    for args, env, message in (
        (("--tls", "/not/there", *one), {}, "/not/there/ca.pem cannot be read"),
        (("--tls", str(tmp_path / "hub"), *one), {}, "is not for a client"),
        (("--tls", folder, path), {"TF_CONFIG": json.dumps(config)}, "must be JSON"),
        (("--tls", folder, path), {"TF_CONFIG": json.dumps(elsewhere)}, "this task to"),
        (("--tls", folder, *one), {"PATH": "/not/there"}, "apt-get install stunnel4"),
    ):
        done = run(*args, env=env)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert not done.stdout


@links
def test_a_port_in_use_is_an_error(folder, addresses, script):
    port = int(addresses[0].rpartition(":")[2])
    options = "--cluster", ",".join(addresses), "--index", "0"
    path = script("print('ran')")
    with socket.create_server(("", port)):
        done = run("--tls", folder, *options, path)
    assert done.returncode == 2 and not done.stdout
    assert f"port {port} of this host cannot be used" in done.stderr


def children_of(pid):
    return [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def said_by(port, files):
    """Returns what a port sends to a peer that has certificates, none, or no TLS."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as link:
        if files == "not TLS":
            link.sendall(b"PRI * HTTP/2.0\r\n\r\n")
            try:
                return link.recv(100)
            except ConnectionResetError:
                return b""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if files:
            context.load_cert_chain(files / "cert.pem", files / "key.pem")
        with context.wrap_socket(link) as tls:
            return tls.recv(100)
