"""A variable of a bucket's state, and its place in the vectors of files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.engine.device_sharded_bucket import Bucket


class SavedLeaf(NamedTuple):
    """A variable of a bucket's state, with its role and its name in files.

    Attributes:
        bucket: The bucket.
        number: Index of the leaf in the bucket's state.
        variable: The variable.
    """

    bucket: Bucket
    number: int
    variable: PerReplicaVariable

    @property
    def role(self) -> str:
        """The role of the leaf."""
        return self.bucket.parts[0].leaves[self.number].role

    @property
    def name(self) -> str:
        """The name of the whole vector in files."""
        leaf = self.bucket.parts[0].leaves[self.number]
        return f"{self.bucket.vector}.{leaf.name}"

    def items(self) -> Iterator[tuple[int, int, int]]:
        """Yields where each part begins in the model, its padding and other items."""
        for part in self.bucket.parts:
            sizes = part.leaves[self.number].sizes
            padding = sizes[0] if part.bucket_range.alignment_padding else 0
            yield part.bucket_range.begin, padding, sum(sizes) - padding

    def is_same_everywhere(self, num_workers: int) -> bool:
        """Returns whether it has the same value on every replica of every worker."""
        if len(self.bucket.parts) > 1 or self.role not in ("local", "server"):
            return False
        whole = range(self.bucket.layout.size)
        owned = map(self.bucket.route.owned_range, range(num_workers))
        return self.role == "local" or all(one == whole for one in owned)

    def place(
        self, rank: int, device: int, begins: Mapping[int, int]
    ) -> tuple[slice, slice]:
        """Returns the slice of the vector, and of the variable, that a device holds.

        Args:
            rank: The worker.
            device: Index of the device in the worker.
            begins: The first item in files, by where a part begins in the model.
        """
        begin, padding, count = [*self.items()][device]
        owned = range(padding + count)
        if self.role == "server":
            owned = self.bucket.parts[device].route.owned_range(rank)
        first, last = max(owned.start, padding), max(owned.stop, padding)
        offset = begins[begin] - padding
        return (
            slice(offset + first, offset + last),
            slice(first - owned.start, last - owned.start),
        )
