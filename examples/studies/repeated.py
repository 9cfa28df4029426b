"""Many short trainings of a small network that share one compiled step.

Compiling the step of several virtual workers takes as long as hundreds of steps. So a
study of many seeds compiles it once for each optimizer and resets the training between.
"""

import contextlib

import keras
import numpy as np
import study
import tensorflow as tf
from keras import layers

import data  # isort: skip
import models  # isort: skip

PARTS = 8
HELD_OUT = 5_000


def make_network(normalized=False):
    """Return a LeNet with strides in place of pooling: 56,970 parameters.

    Args:
        normalized: Whether there is batch normalization before each ReLU.
    """
    scale = 1 / (255 * models.DEVIATION)
    hidden = []
    for layer in (
        layers.Conv2D(16, 5, strides=2),
        layers.Conv2D(32, 3, strides=2),
        layers.Dense(64),
    ):
        if isinstance(layer, layers.Dense):
            hidden.append(layers.Flatten())
        hidden.append(layer)
        if normalized:
            hidden.append(layers.BatchNormalization(momentum=0.9))
        hidden.append(layers.ReLU())
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Rescaling(scale, offset=-models.MEAN / models.DEVIATION),
            *hidden,
            layers.Dense(10),
        ]
    )


def make_loss():
    """Return the loss of all trainings."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def load(size):
    """Return (images, labels) for training, for choosing rates, and for testing.

    Args:
        size: Of the examples for training.
    """
    source = data.load()
    images, labels = data.arrays(source.train, size + HELD_OUT)
    # scikit-learn's digits, where there is no Fashion-MNIST, are fewer.
    size = min(size, 9 * len(labels) // 10)
    return (
        (images[:size], labels[:size]),
        (images[size:], labels[size:]),
        data.arrays(source.test),
    )


def best_rates(rows, columns):
    """Return the learning rate with the best accuracy, by values of some columns."""
    best = {}
    for row in rows:
        key = tuple(row[column] for column in columns)
        if key not in best or row["accuracy"] > best[key]["accuracy"]:
            best[key] = row
    return {key: row["rate"] for key, row in best.items()}


def rates_table(rows, columns):
    """Return the accuracies on held-out examples by rates, the best one bold."""
    titles = [*columns, "rates, and the accuracy of each"]
    lines = []
    chosen = best_rates(rows, columns)
    for key, rate in chosen.items():
        cells = []
        for row in rows:
            if tuple(row[column] for column in columns) == key:
                text = f"{row['rate']:g}: {100 * row['accuracy']:.1f} %"
                cells.append(f"**{text}**" if row["rate"] == rate else text)
        lines.append([*map(str, key), ", ".join(cells)])
    return study.markdown(titles, lines)


class Trainer:
    """A model and its optimizer, which are reset before each training.

    Attributes:
        model: The compiled model.

    Args:
        scope: A strategy's, or None.
        make_optimizer: Function without arguments.
        at_once: Steps a call of the compiled function.
        make: Returns the network, with new weights.
    """

    def __init__(self, scope, make_optimizer, at_once=1, make=make_network):
        self._make = make
        with scope or contextlib.nullcontext():
            self.model = make()
            self.model.compile(
                make_optimizer(),
                make_loss(),
                metrics=["accuracy"],
                steps_per_execution=at_once,
            )
            self.model.optimizer.build(self.model.trainable_variables)
        self._begin = [(v, v.numpy()) for v in self.model.optimizer.variables]

    def train(self, examples, seed, batch, steps, rate_of, between=None):
        """Train from the beginning; return the training's loss in each part of it.

        Args:
            examples: Arrays of images and labels.
            seed: Of the weights and of the examples' order.
            batch: Examples a step, of all workers together.
            steps: A multiple of `PARTS`.
            rate_of: Function of a part's number that returns its learning rate.
            between: Function of a part's number, called before the part and, with
                `PARTS`, at the end.
        """
        for variable, value in self._begin:
            variable.assign(value)
        keras.utils.set_random_seed(seed)
        self.model.set_weights(self._make().get_weights())
        batches, losses = self._batches(examples, seed, batch, steps), []
        for part in range(PARTS):
            if between is not None:
                between(part)
            self.model.optimizer.learning_rate = rate_of(part)
            took = self.model.fit(next(batches), verbose=0, shuffle=False)
            losses += took.history["loss"]
        if between is not None:
            between(PARTS)
        return losses

    def _batches(self, examples, seed, batch, steps):
        """Yield a dataset for each part."""
        rng, (images, labels) = np.random.default_rng(seed), examples
        size = steps // PARTS * batch
        epochs = -(-PARTS * size // len(labels))
        order = np.concatenate([rng.permutation(len(labels)) for _ in range(epochs)])
        for part in range(PARTS):
            own = order[part * size : (part + 1) * size]
            own_batches = tf.data.Dataset.from_tensor_slices((images[own], labels[own]))
            yield own_batches.batch(batch)

    def accuracy(self, examples):
        """Return the accuracy on examples."""
        batches = tf.data.Dataset.from_tensor_slices(examples).batch(2_000)
        return self.model.evaluate(batches, verbose=0)[1]


def dropped(rate):
    """Return a learning rate by parts: a tenth in the second half, then a hundredth."""
    return lambda part: rate * 0.1 ** ((part >= PARTS // 2) + (part >= 3 * PARTS // 4))


class Gradients:
    """Gradients of small batches at given weights, of a separate network."""

    def __init__(self, examples):
        self._network, self._loss = make_network(), make_loss()
        self._images, self._labels = (tf.constant(part) for part in examples)
        self._function = tf.function(self._of)

    def _of(self, indices):
        images = tf.gather(self._images, indices)
        with tf.GradientTape() as tape:
            loss = self._loss(tf.gather(self._labels, indices), self._network(images))
        return tape.gradient(loss, self._network.trainable_variables)

    def set_weights(self, weights):
        """Set the weights at which gradients are taken."""
        self._network.set_weights(weights)

    def of(self, indices):
        """Return the mean gradient of some examples, an array for each variable."""
        return [g.numpy() for g in self._function(tf.constant(indices))]
