"""The King James Bible as characters, from Debian's packages."""

import contextlib
import functools
import re
import shutil
import subprocess
from pathlib import Path

import data
import numpy as np

PACKAGES = ("bible-kjv", "bible-kjv-text")


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
