"""Comparison of the workers' settings, before any other exchange of an optimizer.

Two scripts that differ in an argument call other collectives, and would wait for each
other for ever. So the first exchange has one size and one name, whatever the optimizer.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.collectives import Hosts
from tfgradcomp.core.digest import digest64
from tfgradcomp.core.logging import logger
from tfgradcomp.core.word_format import CHUNK, INDEX_BITS
from tfgradcomp.ops.dispatch import takes_native
from tfgradcomp.version import __version__

# They may differ: Keras numbers names, and modules move between versions.
_IGNORED = ("name", "module", "registered_name", "shared_object_id", "build_config")
_MESSAGE_WORDS = 1024


def settings_of(optimizer: keras.optimizers.Optimizer | None) -> dict[str, str]:
    """Returns all that must be equal on the workers, by names, in words.

    Args:
        optimizer: A wrapper, an optimizer of Keras, or None.
    """
    settings = {
        "optimizer": type(optimizer).__name__,
        **dict(_leaves("", _config_of(optimizer))),
        "version of tfgradcomp": __version__,
        "version of Keras": keras.__version__,
        "version of TensorFlow": tf.__version__,
        "word format": f"indices of {INDEX_BITS} bits, sums of {CHUNK} elements",
    }
    transport = getattr(optimizer, "transport", "")
    if not isinstance(transport, str):
        # The configuration has no transport that was handed in.
        settings["transport"] = type(transport).__name__
    return settings


def check_same_settings(
    hosts: Hosts, optimizer: keras.optimizers.Optimizer | None
) -> None:
    """Compares the settings of all workers, which all must call it.

    Runs eagerly, also while a step is being traced. Logs a warning if only some workers
    have the native operations, which give the same bits.

    Args:
        hosts: The collectives between the workers' processes.
        optimizer: This worker's optimizer.

    Raises:
        ValueError: On all workers, if the settings differ.
    """
    with tf.init_scope():
        hosts.watch()
        content = json.dumps(settings_of(optimizer)).encode()
        mine = [digest64(content), len(content), int(takes_native(ops.pack_signs.op))]
        seen = hosts.gather(tf.constant(mine, tf.int64), "settings").numpy()
        _warn_of_slow(hosts, np.flatnonzero(seen[:, 2] == 0).tolist())
        if (seen[:, 0] == seen[0, 0]).all():
            return
        workers = _gather_text(hosts, content, seen[:, 1].max(), "text of settings")
    names = dict.fromkeys(name for settings in workers for name in settings)
    # Not given at all is a value as well.
    found = {name: [one.get(name, "none") for one in workers] for name in names}
    different = [name for name, values in found.items() if len({*values}) > 1]
    values = found[different[0]]
    parts = [
        f"{value} on workers {[i for i, other in enumerate(values) if other == value]}"
        for value in dict.fromkeys(values)
    ]
    raise ValueError(
        f"The settings of the workers differ: `{different[0]}` is {', '.join(parts)}. "
        "Expected: the same script, arguments and versions on all workers. "
        f"Received: settings that differ={different[:5]}"
    )


def gather_json(hosts: Hosts, value: Any, call_site: str) -> list:
    """Returns the values of all workers, which all must call it, outside of a graph.

    Args:
        hosts: The collectives between the workers' processes.
        value: This worker's value, as JSON can hold it.
        call_site: Name of the exchange.
    """
    content = json.dumps(value).encode()
    length = hosts.max(tf.constant([len(content)]), f"length of {call_site}")
    return _gather_text(hosts, content, int(length[0]), f"text of {call_site}")


def _gather_text(hosts, content, length, call_site):
    """Returns the JSON of all workers, by messages of one size."""
    count = -(-int(length) // (4 * _MESSAGE_WORDS))
    # Blanks do not count in JSON.
    padded = content.ljust(4 * _MESSAGE_WORDS * count)
    messages = np.split(np.frombuffer(padded, np.int32), count)
    gathered = [
        hosts.gather(tf.constant(message), call_site).numpy() for message in messages
    ]
    return [json.loads(row.tobytes()) for row in np.concatenate(gathered, 1)]


def _warn_of_slow(hosts, workers):
    if 0 < len(workers) < hosts.num_workers and hosts.rank == 0:
        logger.warning(
            "workers %s have no native operations. Pure TensorFlow is several times "
            "slower, and all workers wait for them: see `python -m tfgradcomp.ops`",
            workers,
        )


def _config_of(optimizer):
    if optimizer is None:
        return {}
    try:
        with warnings.catch_warnings():
            # Keras advises against functions in files, and nothing is saved here.
            warnings.simplefilter("ignore")
            return optimizer.get_config()
    except NotImplementedError:
        # Keras' error for a class of the user without one, such as a schedule.
        return {}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the names and values of what a configuration consists of."""
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__":
            # Its code has the path of the script.
            value = {"class_name": "lambda"}
        for key in sorted(value, key=str):
            if key not in _IGNORED:
                part = "" if key == "config" else str(key)
                yield from _leaves(".".join(filter(None, (name, part))), value[key])
    elif isinstance(value, (list, tuple)):
        yield f"{name}.length", str(len(value))
        for index, item in enumerate(value):
            yield from _leaves(f"{name}[{index}]", item)
    else:
        # Addresses of objects differ.
        yield name, re.sub(" at 0x[0-9a-fA-F]+", "", repr(value))
