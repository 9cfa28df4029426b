"""Programs of the kinds that users of Keras write, each with small data of its own.

A program knows nothing of compression. It builds what it trains with `Program.scope`
and `Program.optimizer`, which is where a wrapper is put in, and returns the trained
models and the loss of each epoch.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers


class Program(NamedTuple):
    """The strategy and the optimizers of a program.

    Attributes:
        scope: Function that returns the strategy's scope.
        optimizer: Function of a plain Keras optimizer that returns the one to use.
        rules: More arguments of each plain optimizer, such as accumulation.
    """

    scope: Callable[[], contextlib.AbstractContextManager]
    optimizer: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]
    rules: dict


def classes_of(x, count):
    """Labels that can be learned: which of some random directions x has most of."""
    flat = x.reshape(len(x), -1)
    return (flat @ np.random.default_rng(1).normal(size=(flat.shape[1], count))).argmax(
        1
    )


def images(count=96, size=16):
    return (
        np.random.default_rng(0).normal(size=(count, size, size, 1)).astype("float32")
    )


def convolutions(program):
    """Images to classes, with dropout, integer labels and a validation split."""
    x = images()
    with program.scope():
        model = keras.Sequential(
            [
                keras.Input(x.shape[1:]),
                layers.Rescaling(0.5),
                layers.Conv2D(16, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(32, 3, activation="relu"),
                layers.Flatten(),
                layers.Dropout(0.2),
                layers.Dense(4, activation="softmax", dtype="float32"),
            ]
        )
        model.compile(
            program.optimizer(keras.optimizers.Adam(3e-3, **program.rules)),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    history = model.fit(
        *(x, classes_of(x, 4)),
        batch_size=12,
        epochs=6,
        validation_split=0.25,
        verbose=0,
    )
    return [model], history.history["loss"]


WORDS = "a good film with great acting | a bad film and a poor plot".split()


def recurrent_network(program):
    """Text to one of two classes: strings, masked embeddings, LSTMs of both ways."""
    rng = np.random.default_rng(2)
    texts = [" ".join(rng.choice(WORDS, rng.integers(3, 12))) for _ in range(96)]
    labels = np.array([("good" in t) or ("great" in t) for t in texts], "float32")
    vectorize = layers.TextVectorization(50, output_sequence_length=12)
    vectorize.adapt(texts)
    data = tf.data.Dataset.from_tensor_slices((texts, labels)).batch(12)
    data = data.map(lambda text, label: (vectorize(text), label))
    with program.scope():
        model = keras.Sequential(
            [
                layers.Embedding(50, 32, mask_zero=True),
                layers.Bidirectional(layers.LSTM(16, return_sequences=True)),
                layers.Bidirectional(layers.LSTM(16)),
                layers.Dense(1, activation="sigmoid", dtype="float32"),
            ]
        )
        model.compile(
            program.optimizer(keras.optimizers.Adam(1e-2, **program.rules)),
            "binary_crossentropy",
            metrics=["accuracy"],
        )
    history = model.fit(data, epochs=6, verbose=0)
    return [model], history.history["loss"]


class TokensAndPositions(layers.Layer):
    """Embeds tokens and their places."""

    def __init__(self, length, tokens, width):
        super().__init__()
        self.tokens = layers.Embedding(tokens, width)
        self.positions = layers.Embedding(length, width)

    def call(self, x):
        places = keras.ops.arange(0, keras.ops.shape(x)[-1], 1)
        return self.tokens(x) + self.positions(places)


class Block(layers.Layer):
    """Attention and a network of two layers, each with a short cut."""

    def __init__(self, width, heads):
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.network = keras.Sequential(
            [layers.Dense(2 * width, activation="gelu"), layers.Dense(width)]
        )
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropout = layers.Dropout(0.1)

    def call(self, x, training=None):
        x = self.norms[0](x + self.dropout(self.attention(x, x), training=training))
        return self.norms[1](x + self.dropout(self.network(x), training=training))


def transformer(program):
    """Tokens to classes: attention, decayed weights, a schedule of the rate."""
    tokens = np.random.default_rng(3).integers(0, 200, (96, 20))
    labels = (tokens < 60).sum(1) > 6
    with program.scope():
        inputs = keras.Input((20,), dtype="int32")
        x = TokensAndPositions(20, 200, 32)(inputs)
        x = layers.GlobalAveragePooling1D()(Block(32, 2)(x))
        x = layers.Dropout(0.1)(layers.Dense(20, activation="relu")(x))
        model = keras.Model(inputs, layers.Dense(2, dtype="float32")(x))
        rate = keras.optimizers.schedules.CosineDecay(1e-2, 100)
        model.compile(
            program.optimizer(
                keras.optimizers.AdamW(rate, weight_decay=1e-3, **program.rules)
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    history = model.fit(tokens, labels, batch_size=12, epochs=6, verbose=0)
    return [model], history.history["loss"]


def tables(program):
    """Rows of strings and numbers, by name, to a class; classes have weights."""
    rng = np.random.default_rng(4)
    rows = {
        "color": rng.choice(["red", "green", "blue"], 96),
        "size": rng.normal(size=(96, 1)).astype("float32"),
    }
    labels = ((rows["color"] == "red") & (rows["size"][:, 0] > -0.5)).astype("float32")
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt(rows["color"])
    normalize = layers.Normalization()
    normalize.adapt(rows["size"])
    data = tf.data.Dataset.from_tensor_slices((rows, labels)).batch(12)
    data = data.map(lambda row, label: ({**row, "color": lookup(row["color"])}, label))
    with program.scope():
        given = {"color": keras.Input((4,), name="color")}
        given["size"] = keras.Input((1,), name="size")
        x = layers.concatenate([given["color"], normalize(given["size"])])
        x = layers.Dense(64, activation="relu")(x)
        x = layers.Dense(1, activation="sigmoid", dtype="float32")(x)
        model = keras.Model(given, x)
        model.compile(
            program.optimizer(keras.optimizers.RMSprop(1e-2, **program.rules)),
            keras.losses.BinaryCrossentropy(),
            weighted_metrics=["accuracy", "auc"],
        )
    history = model.fit(data, epochs=6, class_weight={0: 1.0, 1: 2.0}, verbose=0)
    return [model], history.history["loss"]


def timeseries(program):
    """Series to classes: normalised batches, weights of rows, the usual callbacks."""
    x = np.random.default_rng(5).normal(size=(96, 24, 1)).astype("float32").cumsum(1)
    labels = classes_of(x, 3)
    with program.scope(), tempfile.TemporaryDirectory() as folder:
        inputs = keras.Input(x.shape[1:])
        y = inputs
        for _ in range(2):
            y = layers.Conv1D(16, 3, padding="same")(y)
            y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.GlobalAveragePooling1D()(y)
        y = layers.Dense(3, activation="softmax", dtype="float32")(y)
        model = keras.Model(inputs, y)
        model.compile(
            program.optimizer(keras.optimizers.Adam(1e-2, **program.rules)),
            "sparse_categorical_crossentropy",
        )
        history = model.fit(
            *(x, labels),
            batch_size=12,
            epochs=6,
            sample_weight=np.linspace(0.5, 1.5, 96),
            validation_data=(x[:30], labels[:30]),
            callbacks=[
                keras.callbacks.ModelCheckpoint(
                    Path(folder) / "best.keras", save_best_only=True, monitor="loss"
                ),
                keras.callbacks.ReduceLROnPlateau(patience=3, min_lr=1e-4),
                keras.callbacks.EarlyStopping(patience=5),
            ],
            verbose=0,
        )
    return [model], history.history["loss"]


class Adversaries(keras.Model):
    """A generator and a discriminator that take their steps in turn."""

    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.discriminator = keras.Sequential(
            [
                keras.Input((16, 16, 1)),
                layers.Conv2D(16, 4, 2, padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Flatten(),
                layers.Dense(1, dtype="float32"),
            ]
        )
        self.generator = keras.Sequential(
            [
                keras.Input((width,)),
                layers.Dense(8 * 8 * 8),
                layers.Reshape((8, 8, 8)),
                layers.Conv2DTranspose(16, 4, 2, padding="same", activation="relu"),
                layers.Conv2D(1, 5, padding="same", dtype="float32"),
            ]
        )
        self.seeds = keras.random.SeedGenerator(7)
        self.losses_of = [keras.metrics.Mean(n) for n in ("d_loss", "g_loss")]

    def compile(self, d_optimizer, g_optimizer, loss):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_of = loss

    @property
    def metrics(self):
        return self.losses_of

    def noise(self, real):
        return keras.random.normal(
            (keras.ops.shape(real)[0], self.width), seed=self.seeds
        )

    def train_step(self, real):
        with tf.GradientTape() as tape:
            made = self.generator(self.noise(real))
            guesses = self.discriminator(keras.ops.concatenate([made, real], 0))
            truth = keras.ops.concatenate(
                [keras.ops.ones_like(guesses[::2]), keras.ops.zeros_like(guesses[::2])],
                0,
            )
            d_loss = self.loss_of(truth, guesses)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            guesses = self.discriminator(self.generator(self.noise(real)))
            g_loss = self.loss_of(keras.ops.zeros_like(guesses), guesses)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        for metric, loss in zip(self.losses_of, (d_loss, g_loss), strict=True):
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.losses_of}


def adversaries(program):
    """A GAN: its own `train_step`, two optimizers, no `call`."""
    with program.scope():
        model = Adversaries()
        model.compile(
            *(
                program.optimizer(
                    keras.optimizers.Adam(1e-3, beta_1=0.5, **program.rules)
                )
                for _ in range(2)
            ),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
    history = model.fit(images(), batch_size=12, epochs=6, verbose=0)
    return [model.discriminator, model.generator], history.history["d_loss"]


class Sampling(layers.Layer):
    """Draws from a normal distribution."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(8)

    def call(self, inputs):
        mean, log_variance = inputs
        shape = keras.ops.shape(mean)
        drawn = keras.random.normal(shape, dtype=self.compute_dtype, seed=self.seeds)
        return mean + keras.ops.exp(log_variance / 2) * drawn


class VariationalAutoencoder(keras.Model):
    """An encoder and a decoder with a loss of their own."""

    def __init__(self, width=4):
        super().__init__()
        image = keras.Input((16, 16, 1))
        x = layers.Conv2D(16, 3, 2, activation="relu", padding="same")(image)
        x = layers.Dense(32, activation="relu")(layers.Flatten()(x))
        mean = layers.Dense(width, dtype="float32")(x)
        log_variance = layers.Dense(width, dtype="float32")(x)
        drawn = Sampling()([mean, log_variance])
        self.encoder = keras.Model(image, [mean, log_variance, drawn])
        code = keras.Input((width,))
        x = layers.Dense(8 * 8 * 8, activation="relu")(code)
        x = layers.Reshape((8, 8, 8))(x)
        x = layers.Conv2DTranspose(1, 3, 2, padding="same", dtype="float32")(x)
        self.decoder = keras.Model(code, x)
        self.tracker = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, drawn = self.encoder(data)
            left = keras.ops.square(data - self.decoder(drawn))
            information = keras.ops.square(mean) + keras.ops.exp(log_variance)
            information = information - 1 - log_variance
            loss = keras.ops.mean(keras.ops.sum(left, (1, 2, 3)))
            loss = loss + keras.ops.mean(keras.ops.sum(information, 1)) / 2
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def variational_autoencoder(program):
    """A VAE: its own `train_step`, random numbers of its own, no `call`."""
    with program.scope():
        model = VariationalAutoencoder()
        model.compile(program.optimizer(keras.optimizers.Adam(1e-3, **program.rules)))
    history = model.fit(images(), batch_size=12, epochs=6, verbose=0)
    return [model], history.history["loss"]


def u_net(program):
    """Images to a class for each pixel, with normalised batches and short cuts."""
    x = images()
    with program.scope():
        inputs = keras.Input(x.shape[1:])
        down = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
        y = layers.BatchNormalization()(
            layers.SeparableConv2D(16, 3, padding="same")(down)
        )
        y = layers.MaxPooling2D(3, 2, padding="same")(layers.Activation("relu")(y))
        y = layers.Conv2DTranspose(8, 3, padding="same", activation="relu")(y)
        y = layers.BatchNormalization()(layers.UpSampling2D()(y))
        y = layers.concatenate([y, down])
        outputs = layers.Conv2D(
            2, 3, padding="same", activation="softmax", dtype="float32"
        )
        model = keras.Model(inputs, outputs(y))
        model.compile(
            program.optimizer(keras.optimizers.SGD(0.3, momentum=0.9, **program.rules)),
            "sparse_categorical_crossentropy",
        )
    history = model.fit(x, x > 0, batch_size=12, epochs=6, verbose=0)
    return [model], history.history["loss"]


KINDS = {
    function.__name__: function
    for function in (
        convolutions,
        recurrent_network,
        transformer,
        tables,
        timeseries,
        adversaries,
        variational_autoencoder,
        u_net,
    )
}
