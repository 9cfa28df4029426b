"""The hub and the clients of `federated_links.py`, which starts them on their hosts."""

import json
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp import methods
from tfgradcomp.compressors import Identity
from tfgradcomp.federated import Client, Hub, certificates
from tfgradcomp.servers import Mean

METHODS = {
    "float32": methods.Method(Identity(), Mean(), name="float32"),
    "1 bit": methods.dist_ef_block_sgd(),
    "2 bits": methods.scalar_codebook(2),
}


def make_model():
    """Return a compiled model with 101,770 weights."""
    model = keras.Sequential(
        [
            keras.Input([28, 28, 1]),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(128, "relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def write_json(path: Path, value) -> None:
    """Write a file that is complete as soon as it is there."""
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").rename(path)


def be_hub(folder: Path, given: dict):
    """Be the hub: note each round at once, and write what it was at the end."""
    keras.utils.set_random_seed(given["seed"])
    found = []

    def note(hub):
        """Keep the weights: they are tested later, when nobody waits."""
        found.append((hub.round, time.monotonic(), hub.model.get_weights()))
        with open(folder / "rounds", "a") as file:
            print(hub.round, file=file)

    hub = Hub(
        make_model,
        METHODS[given["method"]],
        weights="examples",
        address=given["address"],
        credentials=certificates.server_credentials(folder / "hub"),
        seed=given["seed"],
    )
    (folder / "ready-hub").touch()
    model = hub.serve(given["rounds"], given["deadline"], note)
    with np.load(folder / "test.npz") as arrays:
        x, y = arrays["x"], arrays["y"]
    curve = []
    for number, at, weights in found:
        model.set_weights(weights)
        curve.append((number, at, 100 * model.evaluate(x, y, 1000, verbose=0)[1]))
    facts = {
        "curve": curve,
        "carried": [(one.round, one.carried) for one in hub.history if one.carried],
        "payload": max(one.payload_bytes for one in hub.history),
        "reply": max(one.reply_bytes for one in hub.history),
    }
    write_json(folder / "hub.json", facts)


class TimedClient(Client):
    """A client that notes the seconds of its local steps, by rounds."""

    computed: dict[int, float]
    began: float

    def exchange(self):
        """Send what has changed, as every client does."""
        self.computed[self.round] = time.monotonic() - self.began
        goes_on = super().exchange()
        self.began = time.monotonic()
        return goes_on

    def compile(self, batches):
        """Let Keras compile a step, and forget that step."""
        variables = self.model.optimizer.variables
        before = [variable.numpy() for variable in variables]
        self.model.fit(batches, steps_per_epoch=1, verbose=0)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def be_client(folder: Path, given: dict, number: int):
    """Be a client: get ready, wait for the word to start, and train."""
    keras.utils.set_random_seed(1000 * given["seed"] + number + 1)
    with np.load(folder / f"part-{number}.npz") as arrays:
        x, y = arrays["x"], arrays["y"]
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=number)
    batches = batches.repeat().batch(32)
    identity = folder / "hub" / "clients" / f"client-{number}"
    client = TimedClient(
        given["address"],
        make_model,
        every=given["every"],
        state=folder / f"state-{number}",
        credentials=certificates.channel_credentials(identity),
    )
    client.compile(batches)
    (folder / f"ready-{number}").touch()
    while not (folder / f"go-{number}").exists():
        time.sleep(0.05)
    client.computed, client.began = {}, time.monotonic()
    client.fit(batches, examples=len(x), verbose=0)
    facts = {"sent": client.sent, "received": client.received}
    write_json(folder / f"client-{number}.json", facts | {"compute": client.computed})


def main():
    """Be the program that the command line names: a folder, facts, and a name."""
    folder, given, name = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    if name == "hub":
        be_hub(folder, given)
    else:
        be_client(folder, given, int(name))
