"""Train as `federated.py` does, with a network of its own for the hub and each client.

    sudo python examples/federated_network.py
    sudo python examples/federated_network.py --method federated:float32
    sudo python examples/federated_network.py --rates 2mbit 10mbit --delay 50ms

Each is in a network namespace of Linux, with a link of a given rate, as machines at
different places are; they know each other by certificates (mutual TLS). This needs root
and iproute2, and changes nothing outside of the namespaces, which end with the script.
The programs are the commands that you would start on real machines.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import federated
import keras

from tfgradcomp import certificates

HERE = Path(__file__).resolve().parent
# Benchmarks need such networks, too.
sys.path.append(str(HERE.parent / "benchmarks"))
from cluster import Host, Unavailable, virtual_cluster  # noqa: E402
from processes import exit_on_signals  # noqa: E402

PORT = 7070


@contextlib.contextmanager
def network(rates: Sequence[str], delay: str) -> Iterator[tuple[Host, list[Host]]]:
    """Make a host for a hub, at 1 Gbit/s, and one for each client.

    Args:
        rates: Rate of each client's link, in each direction, such as `"10mbit"`.
        delay: The time that each packet waits on its way out of a host, such as
            `"20ms"`: a message and its answer wait twice.

    Raises:
        Unavailable: If this machine does not let us make them.
    """
    with virtual_cluster(len(rates) + 1, "1gbit", delay) as (hub, *clients):
        for client, rate in zip(clients, rates, strict=True):
            client.shape(rate)
        yield hub, clients


def dataset():
    """Return the batches of the client that this process is."""
    return federated.dataset(*map(int, os.environ["CLIENT"].split("/")))


def program(name: str, *arguments) -> list[str]:
    """Return the command that runs `tfgradcomp-hub` or `tfgradcomp-join`."""
    code = f"import sys; from tfgradcomp.federated.commands import {name} as run; "
    return [sys.executable, "-c", f"{code}sys.exit(run())", *map(str, arguments)]


def train(arguments, folder: Path) -> keras.Model:
    """Return the model that a hub and its clients have trained, each on its host."""
    with network(arguments.rates, arguments.delay) as (host, hosts):
        names = [f"client-{number}" for number in range(len(hosts))]
        address = f"{host.address}:{PORT}"
        # As `tfgradcomp-hub --init` does.
        certificates.create(folder / "hub", [host.address], names)
        serve = program("hub", "federated:make_model", "--address", address)
        serve += ["--certificates", folder / "hub", "--output", folder / "it.keras"]
        serve += ["--rounds", str(arguments.rounds), "--method", arguments.method]
        serve += ["--quorum", str(len(hosts)), "--deadline", "120"]
        hub = subprocess.Popen(host.command(*serve), cwd=HERE)
        for number, (client, name) in enumerate(zip(hosts, names, strict=True)):
            make_own = "federated:make_model", "federated_network:dataset"
            join = program("join", address, *make_own, "--every", arguments.every)
            join += ["--certificates", folder / "hub" / "clients" / name]
            subprocess.Popen(
                client.command(*join),
                cwd=HERE,
                env={**os.environ, "CLIENT": f"{number}/{len(hosts)}"},
                # The hub's log names each round.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        if hub.wait():
            sys.exit("federated_network.py: the hub has failed, see above.")
        for client, name in zip(hosts, names, strict=True):
            sent, received = (count / 1e6 for count in client.counters())
            print(f"{name}: {sent:.2f} MB sent, {received:.2f} MB received")
    model = federated.make_model()
    model.load_weights(folder / "it.keras")
    return model


def main():
    """Make the network, train, and test the model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--rates", nargs="+", default=["2mbit", "10mbit", "50mbit"])
    add("--delay", default="0ms", help="of each packet on its way out of a host")
    add("--rounds", type=int, default=40)
    add("--method", default="dist_ef_block_sgd", help="as of tfgradcomp-hub")
    add("--every", type=int, default=16, help="local steps a round")
    arguments = parser.parse_args()
    exit_on_signals()
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = train(arguments, Path(folder))
    except Unavailable as error:
        sys.exit(f"federated_network.py: {error}")
    _, (x, y) = federated.digits()
    accuracy = model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"]
    print(
        f"{arguments.method}: accuracy {accuracy:.2%} after {arguments.rounds} rounds"
    )


if __name__ == "__main__":
    main()
