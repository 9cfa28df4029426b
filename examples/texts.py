"""Synthetic texts: sequences of letters, and bags of words about a topic."""

import numpy as np
import tensorflow as tf

# Letters of a language, and letters in a text.
LETTERS, LENGTH = 16, 32
# Words of another language, words in a bag, and topics.
WORDS, BAG, TOPICS = 1000, 16, 5


def letters(number: int, seed: int, alphabet: int = LETTERS) -> np.ndarray:
    """Return random texts in which a letter depends on the two letters before it.

    Args:
      number: of texts, each one letter longer than ``LENGTH``.
      seed: of these texts; the language is always the same.
      alphabet: number of its letters; a small alphabet is learned sooner.
    """
    chances_of = np.random.default_rng(0).dirichlet
    likely = chances_of([0.1] * alphabet, [alphabet, alphabet])
    rng = np.random.default_rng([1, seed])
    found = rng.integers(alphabet, size=[number, LENGTH + 1])
    for place in range(2, LENGTH + 1):
        chances = likely[found[:, place - 2], found[:, place - 1]].cumsum(-1)
        found[:, place] = (rng.random([number, 1]) > chances[:, :-1]).sum(-1)
    return found.astype(np.int32)


def letter_batches(
    number: int, batch_size: int, seed: int, alphabet: int = LETTERS
) -> tf.data.Dataset:
    """Return batches of texts and of the letters that follow."""
    found = letters(number, seed, alphabet)
    batches = tf.data.Dataset.from_tensor_slices((found[:, :-1], found[:, 1:]))
    return batches.batch(batch_size, drop_remainder=True)


def bag_batches(number: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """Return batches of bags of words and of their topics.

    A word's frequency is inverse to its rank. Each word has positive or negative
    weights for the topics; a bag's topic has the largest sum of weights.
    """
    speaks = np.random.default_rng(0).normal(size=[WORDS, TOPICS])
    often = 1 / np.arange(1, WORDS + 1)
    rng = np.random.default_rng([2, seed])
    words = rng.choice(WORDS, size=[number, BAG], p=often / often.sum())
    topics = speaks[words].sum(1).argmax(1)
    pairs = words.astype(np.int32), topics.astype(np.int32)
    batches = tf.data.Dataset.from_tensor_slices(pairs)
    return batches.batch(batch_size, drop_remainder=True)
