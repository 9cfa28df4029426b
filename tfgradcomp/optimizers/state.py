"""The state of channels as files hold it: however the vector is cut into buckets.

A file has each leaf of state for the whole vector, float32 `[local replicas, size]`. Of
a server that is spread over the workers a worker's file has its own shard, with zeros
where the others' are, under the name `server_shard`: the files of all workers add up to
the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfgradcomp.optimizers.gradient_bucket import GradientBucket, named_leaves


def names_of(channels: list[GradientBucket]) -> list[str]:
    """Returns the names under which files hold the leaves of state."""
    names = [
        _file_name(channel, name)
        for channel in channels
        for name, _ in named_leaves(channel.state)
    ]
    return list(dict.fromkeys(names))


def whole_state(channels: list[GradientBucket], rank: int) -> dict[str, np.ndarray]:
    """Returns the state of one vector's channels, by names.

    Args:
        channels: The channels.
        rank: Index of the first local replica.
    """
    size = sum(channel.size for channel in channels)
    whole = {}
    for channel in channels:
        for name, variable in named_leaves(channel.state):
            values = variable.local_values()
            target = whole.setdefault(
                _file_name(channel, name), np.zeros([len(values), size], np.float32)
            )
            for replica, row in enumerate(values):
                place, source = _places(channel, name, rank + replica)
                target[replica, place] = row[source]
    return whole


def restore_state(channels: list[GradientBucket], saved: Mapping, rank: int) -> None:
    """Assigns what `whole_state` returned, here or on another worker.

    Args:
        channels: The channels.
        saved: Arrays by the names of `names_of`; a leaf `server` serves as the
            `server_shard` of every worker.
        rank: Index of the first local replica.
    """
    for channel in channels:
        for name, variable in named_leaves(channel.state):
            values = np.zeros_like(variable.local_values())
            found = _file_name(channel, name)
            if found not in saved:
                found = whole_name(found)
            rows = for_replicas(saved[found][()], len(values))
            for replica, row in enumerate(rows):
                place, source = _places(channel, name, rank + replica)
                values[replica, source] = row[place]
            variable.assign_local_values(values)


def shards_of(channels: list[GradientBucket], rank: int) -> np.ndarray:
    """Returns which elements of the vector a worker's shards are, int64 `[n, 2]`."""
    places = [
        _places(channel, "server.", rank)[0]
        for channel in channels
        if channel.is_spread
    ]
    return np.array([(p.start, p.stop) for p in places], np.int64).reshape([-1, 2])


def whole_name(name: str) -> str:
    """Returns the name of a leaf of which the file has the whole."""
    return name.replace(".server_shard.", ".server.")


def for_replicas(values: np.ndarray, replicas: int) -> np.ndarray:
    """Returns a row for each local replica, of the rows of as many as there were.

    Of floats what is owed on average stays. Integers are the same on all, and a seed
    is no exact float.
    """
    if len(values) == replicas:
        return values
    is_float = np.issubdtype(values.dtype, np.floating)
    values = values.mean(0, keepdims=True) if is_float else values[:1]
    return values.repeat(replicas, 0)


def _file_name(channel, name):
    vector = channel.name.partition(".")[0]
    if name.startswith("server.") and channel.is_spread:
        name = name.replace("server.", "server_shard.", 1)
    return f"{vector}.{name}"


def _places(channel, name, rank):
    """Where a variable's elements are in the vector, and in the variable."""
    held = range(channel.layout.size)
    if name.startswith("server."):
        held = channel.held(rank)
    lead = channel.bucket.lead
    first, last = max(held.start, lead), max(held.stop, lead)
    place = slice(channel.bucket.offset + first, channel.bucket.offset + last)
    return place, slice(first - held.start, last - held.start)
