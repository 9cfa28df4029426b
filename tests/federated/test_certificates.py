"""Certificates of a hub and its clients, with real servers of gRPC."""

import datetime
import stat
import sys
from concurrent import futures

import grpc
import pytest

pytest.importorskip("cryptography", reason="needs tfgradcomp[federated]")

from tfgradcomp.certificates import check, create_for_cluster, signing
from tfgradcomp.federated import certificates, commands

pytestmark = pytest.mark.timeout(60)
HALF_AN_HOUR = 1 / 48


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "hub"
    certificates.create(folder, ["localhost", "127.0.0.1"], ["anna", "ben"])
    return folder


@pytest.fixture
def serve():
    """Starts servers, each of which answers with the caller's name; their ports."""
    servers = []

    def start(folder):
        def answer(_, context):
            return certificates.peer_name(context).encode()

        handler = grpc.unary_unary_rpc_method_handler(answer)
        server = grpc.server(futures.ThreadPoolExecutor(1))
        server.add_registered_method_handlers("hub", {"name": handler})
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("hub", {"name": handler})]
        )
        credentials = certificates.server_credentials(folder)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        servers.append(server)
        return port

    yield start
    for server in servers:
        server.stop(None)


def name_by(port, credentials, host="localhost"):
    with grpc.secure_channel(f"{host}:{port}", credentials) as channel:
        return channel.unary_unary("/hub/name")(b"", timeout=10).decode()


def credentials_of(folder, ca=None):
    """Credentials without a look at the files."""
    key, certificate = (
        (folder / name).read_bytes() for name in ("key.pem", "cert.pem")
    )
    return grpc.ssl_channel_credentials(
        (ca or folder / "ca.pem").read_bytes(), key, certificate
    )


def test_the_hub_knows_the_names_of_its_clients(hub, serve):
    port = serve(hub)
    for name in ("anna", "ben"):
        folder = hub / "clients" / name
        credentials = certificates.channel_credentials(folder)
        assert name_by(port, credentials) == name
        assert name_by(port, credentials, "127.0.0.1") == name
        certificates.check_hub(folder, f"localhost:{port}")


def test_clients_without_a_valid_certificate_are_refused(hub, serve, tmp_path):
    port = serve(hub)
    ca = hub / "ca.pem"
    certificates.create(tmp_path / "other", ["localhost"], ["anna"])
    certificates.create(tmp_path / "old", ["localhost"], ["anna"])
    for file in ("ca.pem", "ca-key.pem"):
        (tmp_path / "old" / file).write_bytes((hub / file).read_bytes())
    certificates.add_client(tmp_path / "old", "anna", -HALF_AN_HOUR)
    old = tmp_path / "old" / "clients" / "anna"
    # A hub's certificate is not for a client either.
    for credentials in (
        grpc.ssl_channel_credentials(ca.read_bytes()),
        credentials_of(tmp_path / "other" / "clients" / "anna", ca),
        credentials_of(old),
        credentials_of(hub),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            name_by(port, credentials)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(ValueError, match=r"anna/cert.pem has expired.*Received: "):
        certificates.channel_credentials(old)


def test_clients_refuse_another_hub_and_say_why(hub, serve, tmp_path):
    anna = hub / "clients" / "anna"
    certificates.create(tmp_path / "other", ["localhost"], ["anna"])
    certificates.create(tmp_path / "named", ["hub.example.org"], ["anna"])
    other = serve(tmp_path / "other")
    named = serve(tmp_path / "named")
    for port, folder, message in (
        (other, anna, "is of another authority: copy this client's folder"),
        (named, tmp_path / "named" / "clients" / "anna", "is for other names: name"),
    ):
        with pytest.raises(grpc.RpcError):
            name_by(port, certificates.channel_credentials(folder))
        with pytest.raises(ValueError, match=message):
            certificates.check_hub(folder, f"localhost:{port}")
    # The hub refuses a client that knows its authority.
    mixed = tmp_path / "other" / "clients" / "anna"
    port = serve(hub)
    (mixed / "ca.pem").write_bytes((anna / "ca.pem").read_bytes())
    with pytest.raises(ValueError, match=r"cert.pem was not made by the authority of"):
        certificates.check_hub(mixed, f"localhost:{port}")
    with pytest.raises(ConnectionError, match=r"No hub answers at localhost:1 by TLS"):
        certificates.check_hub(anna, "localhost:1")


def test_the_hub_may_refuse_a_client_that_looks_right(hub, serve, monkeypatch):
    port = serve(hub)
    monkeypatch.setattr(certificates, "check", lambda folder, role: None)
    with pytest.raises(ConnectionError, match=r"refuses .*hub/cert.pem. Copy this"):
        certificates.check_hub(hub, f"localhost:{port}")


def test_files_are_readable_by_the_owner_alone(hub):
    for path in (hub, *hub.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    files = {"ca.pem", "cert.pem", "key.pem"}
    assert {path.name for path in (hub / "clients" / "anna").iterdir()} == files


def test_each_fault_of_a_folder_is_named(hub, tmp_path, monkeypatch):
    def copy(name, change):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("ca.pem", "cert.pem", "key.pem"):
            data = (hub / "clients" / "anna" / file).read_bytes()
            (folder / file).write_bytes(data)
            (folder / file).chmod(0o600)
        change(folder)
        return folder

    def take(file, source=hub / "clients" / "ben"):
        return lambda folder: (folder / file).write_bytes((source / file).read_bytes())

    create_for_cluster(tmp_path / "cluster")
    cases = {
        "key.pem cannot be read. Copy it": lambda f: (f / "key.pem").unlink(),
        "cert.pem cannot be read. Copy it": lambda f: (f / "cert.pem").unlink(),
        "ca.pem cannot be read as a file in": lambda f: (f / "ca.pem").write_text("?"),
        r"key.pem can be read by others.*chmod 600.*mode=640": lambda f: (
            f / "key.pem"
        ).chmod(0o640),
        "key.pem is not the key of": take("key.pem"),
        "was not made by the authority of": take("ca.pem", tmp_path / "cluster"),
        "is not for a client": lambda f: [
            take(file, hub)(f) for file in ("cert.pem", "key.pem")
        ],
    }
    for number, (message, change) in enumerate(cases.items()):
        with pytest.raises(ValueError, match=message):
            certificates.channel_credentials(copy(str(number), change))
    monkeypatch.setattr(signing, "_EARLIER", -datetime.timedelta(hours=1))
    create_for_cluster(tmp_path / "early")
    with pytest.raises(ValueError, match="is not valid yet. Set this machine's clock"):
        check(tmp_path / "early", "client")


def test_clients_come_and_go(tmp_path):
    hub = tmp_path / "hub"
    certificates.create(hub, ["localhost"], ["anna"])
    folder = certificates.add_client(hub, "carla")
    assert check(folder, "client").name == "carla"
    assert certificates.accepted_clients(hub) == ["anna", "carla"]
    before = (folder / "cert.pem").read_bytes()
    certificates.add_client(hub, "carla")
    assert (folder / "cert.pem").read_bytes() != before
    certificates.remove_client(hub, "anna")
    assert certificates.accepted_clients(hub) == ["carla"]
    with pytest.raises(ValueError, match="The client was removed"):
        certificates.add_client(hub, "anna")
    with pytest.raises(ValueError, match=r"Its clients: carla. Received: name='eve'"):
        certificates.remove_client(hub, "eve")
    certificates.set_hosts(hub, ["hub.example.org"], days=2)
    assert check(hub, "server").name == "hub"


@pytest.mark.parametrize("name", ["", "../anna", "a b", "-a", "a" * 64, None])
def test_a_name_that_is_no_folder_is_an_error(tmp_path, name):
    with pytest.raises(ValueError, match="A client's name has letters"):
        certificates.create(tmp_path / "hub", ["localhost"], [name])
    assert not (tmp_path / "hub").exists()


def test_wrong_arguments_leave_no_files(tmp_path):
    for hosts in ("localhost", []):
        with pytest.raises(ValueError, match="A hub needs a list of the names"):
            certificates.create(tmp_path / "hub", hosts)
    assert not (tmp_path / "hub").exists()
    certificates.create(tmp_path / "hub", ["localhost"])
    with pytest.raises(ValueError, match="Name a new folder"):
        certificates.create(tmp_path / "hub", ["localhost"])


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    with pytest.raises(ImportError, match=r"pip install 'tfgradcomp\[federated\]'"):
        create_for_cluster(tmp_path / "tls")


def test_the_command_of_the_hub_makes_certificates(tmp_path, capsys):
    folder = str(tmp_path / "hub")
    arguments = ["--init", folder, "--hosts", "localhost", "--clients", "anna", "ben"]
    assert commands.hub(arguments) == 0
    assert f"each client in {folder}/clients" in capsys.readouterr().out
    assert certificates.accepted_clients(folder) == ["anna", "ben"]
    # A second authority would lock all clients out.
    assert commands.hub(arguments) == 1
    assert f"Received: folder='{folder}'" in capsys.readouterr().err
