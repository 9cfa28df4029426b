"""Train one model on three machines, which are three processes of this one here.

Each client keeps its own third of scikit-learn's digits, takes 16 steps of Adam, and
sends what has changed in one bit an element; the hub answers in one bit as well:

    python examples/federated.py
    python examples/federated.py --method float32

The same by the commands, each in a terminal of its own, in the folder `examples`:

    tfgradcomp-hub federated:make_model --rounds 40 --insecure
    tfgradcomp-join 127.0.0.1:7070 federated:make_model federated:dataset --insecure
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from tfgradcomp import methods
from tfgradcomp.compressors import Identity
from tfgradcomp.federated import Client, Hub
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean

TESTED = 397


def float32():
    """Return the method that sends all elements as they are: federated averaging."""
    return Method(Identity(), Mean(), name="float32")


METHODS = {"one-bit": methods.dist_ef_block_sgd(), "float32": float32()}


def make_model():
    """Return a compiled model with 167,178 weights."""
    model = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(512, "relu"),
            keras.layers.Dense(256, "relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def digits():
    """Return images in [0, 1] and labels, shuffled: those to train on, the others."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = images[order].astype("float32") / 16, labels[order]
    return (x[TESTED:], y[TESTED:]), (x[:TESTED], y[:TESTED])


def dataset(client=0, clients=3):
    """Return the batches of a client, which no other client has."""
    (x, y), _ = digits()
    own = tf.data.Dataset.from_tensor_slices((x[client::clients], y[client::clients]))
    return own.shuffle(2000, seed=client).batch(32, drop_remainder=True)


def parse_arguments():
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--clients", type=int, default=3)
    add("--rounds", type=int, default=40)
    add("--method", choices=METHODS, default="one-bit")
    add("--every", type=int, default=16, help="local steps a round")
    add("--seed", type=int, default=0)
    add("--join", nargs=2, metavar=("ADDRESS", "NUMBER"), help="be a client")
    return parser.parse_args()


def join(arguments):
    """Be one of the clients."""
    address, number = arguments.join
    keras.utils.set_random_seed(1000 * arguments.seed + int(number) + 1)
    with tempfile.TemporaryDirectory() as folder:
        client = Client(
            address,
            make_model,
            keras.optimizers.Adam(1e-3),
            every=arguments.every,
            state=folder,
            name=f"client-{number}",
            insecure=True,
        )
        client.fit(dataset(int(number), arguments.clients), verbose=0)
    sent, received = client.sent / 1e3, client.received / 1e3
    print(
        f"client {number}: {sent:,.1f} kB sent, {received:,.1f} kB received, "
        f"weights {client.digest & 0xFFFFFFFF:08x}"
    )


def main():
    """Start a hub and its clients on this machine."""
    arguments = parse_arguments()
    if arguments.join:
        return join(arguments)
    keras.utils.set_random_seed(arguments.seed)
    hub = Hub(
        make_model, METHODS[arguments.method], quorum=arguments.clients, insecure=True
    )
    again = [sys.executable, Path(__file__), *sys.argv[1:], "--join", hub.address]
    clients = [
        subprocess.Popen([*again, str(number)]) for number in range(arguments.clients)
    ]
    try:
        model = hub.serve(arguments.rounds, deadline=120)
        for client in clients:
            client.wait(60)
    finally:
        for client in clients:
            client.kill()
    _, (x, y) = digits()
    accuracy = model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"]
    last = hub.history[-1]
    up, down = last.payload_bytes / 1e3, last.reply_bytes / 1e3
    print(
        f"{arguments.method}: accuracy {accuracy:.2%} after {hub.round} rounds, "
        f"{up:.1f} kB up and {down:.1f} kB down a client and round, "
        f"weights {hub.digest & 0xFFFFFFFF:08x}"
    )


if __name__ == "__main__":
    main()
