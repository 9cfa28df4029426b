"""The networks of the examples: for images of 10 classes, and for texts."""

import keras
import texts
from keras import layers

# Mean 0 and deviation 1: SGD gains half a point in a few epochs.
MEAN, DEVIATION = 0.286, 0.353


def make_lenet():
    """Return LeNet-5's plan with ReLU and max pooling."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Rescaling(1 / DEVIATION, offset=-MEAN / DEVIATION),
            layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def make_small_cnn():
    """Return a convolution and two dense layers, for tests of a few seconds."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Rescaling(1 / DEVIATION, offset=-MEAN / DEVIATION),
            layers.AveragePooling2D(3),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def make_resnet():
    """Return ResNet-8: the CIFAR plan with one basic block a stage, stem of stride 2.

    References:
        He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, 2016,
        Section 4.2.
    """
    images = keras.Input((28, 28, 1))
    x = layers.Rescaling(1 / DEVIATION, offset=-MEAN / DEVIATION)(images)
    x = layers.ReLU()(_convolution(x, 16, strides=2))
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        x = _basic_block(x, filters, strides)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(10)(x))


def make_vgg():
    """Return VGG's plan, narrow: three stages of two convolutions, stem of stride 2.

    References:
        Tsuzuku, Imachi, Akiba, Variance-based Gradient Compression for Efficient
        Distributed Deep Learning, 2018, Table 3: the dropout and the dense layers.
    """
    images = keras.Input((28, 28, 1))
    x = layers.Rescaling(1 / DEVIATION, offset=-MEAN / DEVIATION)(images)
    for filters, strides, dropped in ((16, 2, 0.3), (48, 1, 0.4), (96, 1, 0.4)):
        x = layers.ReLU()(_convolution(x, filters, strides))
        x = layers.Dropout(dropped)(x)
        x = layers.ReLU()(_convolution(x, filters))
        x = layers.MaxPooling2D()(x)
    x = layers.Dropout(0.5)(layers.Flatten()(x))
    x = layers.Dense(96, use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    return keras.Model(images, layers.Dense(10)(layers.Dropout(0.5)(x)))


def make_transformer():
    """Return a decoder of one block, for the letters of `texts.letters`."""
    text = keras.Input((texts.LENGTH,), dtype="int32")
    places = layers.Embedding(texts.LENGTH, 64)(keras.ops.arange(texts.LENGTH))
    x = layers.Embedding(texts.LETTERS, 64)(text) + places
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, 16)(y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    x = x + layers.Dense(64)(layers.Dense(256, "gelu")(y))
    return keras.Model(
        text, layers.Dense(texts.LETTERS)(layers.LayerNormalization()(x))
    )


def make_decoder(alphabet, length, width=176, blocks=3, heads=4):
    """Return a decoder for texts of one length: 1.1 million parameters.

    Args:
        alphabet: Number of characters.
        length: Of a text, in characters.
        width: Of the vector of a character.
        blocks: Number of blocks of attention and two dense layers.
        heads: Of an attention.
    """
    text = keras.Input((length,), dtype="int32")
    places = layers.Embedding(length, width)(keras.ops.arange(length))
    x = layers.Embedding(alphabet, width)(text) + places
    later = keras.ops.triu(keras.ops.full((length, length), -1e9), 1)
    for _ in range(blocks):
        y = layers.Dense(3 * width, use_bias=False)(layers.RMSNormalization()(x))
        y = keras.ops.reshape(y, (-1, length, 3, heads, width // heads))
        # Faster on one core than `layers.MultiHeadAttention`.
        query, key, value = keras.ops.unstack(keras.ops.transpose(y, (2, 0, 3, 1, 4)))
        scores = keras.ops.matmul(query, keras.ops.swapaxes(key, 2, 3))
        chances = keras.ops.softmax(scores * (width // heads) ** -0.5 + later)
        y = keras.ops.swapaxes(keras.ops.matmul(chances, value), 1, 2)
        y = keras.ops.reshape(y, (-1, length, width))
        x = x + layers.Dense(width, use_bias=False)(y)
        y = layers.RMSNormalization()(x)
        y = layers.Dense(4 * width, "relu", use_bias=False)(y)
        x = x + layers.Dense(width, use_bias=False)(y)
    last = layers.Dense(alphabet, use_bias=False, name="last")
    return keras.Model(text, last(layers.RMSNormalization()(x)))


def make_bag_of_words():
    """Return a table of embeddings and two dense layers, for bags of `texts`."""
    words = keras.Input((texts.BAG,), dtype="int32")
    # The sum, so that gradients of rows are as large as those of the layers.
    x = keras.ops.sum(layers.Embedding(texts.WORDS, 32)(words), axis=1)
    x = layers.Dense(64, activation="relu")(x)
    return keras.Model(words, layers.Dense(texts.TOPICS)(x))


# For images: those of the example's command line.
MODELS = {"lenet": make_lenet, "resnet": make_resnet, "vgg": make_vgg}


def _basic_block(x, filters, strides):
    """Return ReLU(shortcut + two convolutions), projected where the shape changes."""
    shortcut = x
    if strides > 1:
        shortcut = _convolution(x, filters, strides, size=1)
    x = layers.ReLU()(_convolution(x, filters, strides))
    return layers.ReLU()(layers.add([shortcut, _convolution(x, filters)]))


def _convolution(x, filters, strides=1, size=3):
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    return layers.BatchNormalization(momentum=0.9)(x)
