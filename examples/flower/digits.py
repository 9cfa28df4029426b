"""Train the model of ../federated.py as a Flower App; docs/flower.md says how.

Each node keeps its own part of scikit-learn's digits, takes 16 steps of Adam, and sends
what has changed in one bit an element. The ServerApp answers in one bit as well. Flower
sends this folder alone to the nodes, so model and data are written here once more.
"""

import keras
import numpy as np
import tensorflow as tf
from flwr.serverapp import ServerApp
from sklearn.datasets import load_digits

from tfgradcomp import flower, methods

TESTED = 397


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


def dataset_of(context):
    """Return the batches of a node, which no other node has."""
    number = context.node_config["partition-id"]
    count = context.node_config["num-partitions"]
    (x, y), _ = digits()
    own = tf.data.Dataset.from_tensor_slices((x[number::count], y[number::count]))
    return own.shuffle(2000, seed=number).batch(32, drop_remainder=True)


client = flower.client_app(
    make_model,
    keras.optimizers.Adam(1e-3),
    dataset_of,
    every=16,
    state=lambda context: context.node_config["state"],
)
server = ServerApp()


@server.main()
def main(grid, context):
    """Train with all nodes, and test."""
    keras.utils.set_random_seed(0)
    config = context.run_config
    model = flower.run(
        grid,
        make_model,
        methods.dist_ef_block_sgd(),
        rounds=config["rounds"],
        deadline=config["deadline"],
        quorum=config["nodes"],
    )
    _, (x, y) = digits()
    accuracy = model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"]
    print(f"accuracy {accuracy:.2%} after {config['rounds']} rounds", flush=True)
