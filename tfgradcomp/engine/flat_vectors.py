"""The flat vectors that a model's gradient is divided into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tfgradcomp.assignment.layer_method import MethodSettings
from tfgradcomp.assignment.policy import Assigned
from tfgradcomp.assignment.rules import table_positions
from tfgradcomp.core import Layout
from tfgradcomp.methods import Method
from tfgradcomp.ops import INDEX_BITS
from tfgradcomp.ops.block_sums import CHUNK
from tfgradcomp.transports import Rows


class FlatVector(NamedTuple):
    """Variables that are flattened together, with the method for them.

    A table whose gradient may travel as rows is a vector by itself.
    """

    name: str
    positions: list[int]
    sizes: list[int]
    method: Method
    block_size: int | str | None
    is_compressed: bool
    travels_as: str
    num_rows: int | None = None
    stream_offset: int = 0

    def __str__(self):
        positions = ", ".join(map(str, self.positions))
        return f"{self.travels_as} of variables {positions} in {self.name}"

    def is_like(self, other: FlatVector) -> bool:
        """Returns whether both may be one."""
        return (self.method, self.block_size, self.is_compressed) == (
            other.method,
            other.block_size,
            other.is_compressed,
        )

    def plus(self, position: int, size: int) -> FlatVector:
        """Returns the vector with one variable more."""
        return self._replace(
            positions=[*self.positions, position], sizes=[*self.sizes, size]
        )


def divided(
    variables: Sequence,
    assigned: Sequence[Assigned],
    is_trained: Sequence[bool],
    own: MethodSettings,
    sparse: Any,
) -> list[FlatVector]:
    """Divides the variables: what each method compresses, what not, and tables.

    What travels by equal methods in equal blocks is one vector.

    Args:
        variables: The model's trainable variables.
        assigned: The method of each.
        is_trained: Whether each of them takes an update.
        own: The wrapper's own method.
        sparse: Rules for the tables whose rows travel; `()`: none.
    """
    sizes = [variable.shape.num_elements() for variable in variables]
    tables = []
    for i in table_positions(variables, sparse) if sparse else ():
        vector = _empty(assigned[i])._replace(name=f"table_{i}").plus(i, sizes[i])
        layout = Layout.from_sizes(vector.sizes, vector.block_size)
        rows = variables[i].shape[0] if variables[i].shape else 0
        least = max(assigned[i].settings.min_size, 1)
        fits = sizes[i] >= least and rows < 2**INDEX_BITS
        # Noise is of whole vectors.
        fits = fits and not vector.method.noise_std
        if is_trained[i] and fits and Rows.carries(vector.method, layout):
            tables.append(vector._replace(num_rows=rows))
    # The wrapper's own vectors come first, and have names that files know.
    vectors = [_empty(Assigned(own, reason)) for reason in (None, "left")]
    others = len(vectors)
    in_tables = {i for table in tables for i in table.positions}
    for i, (one, trained) in enumerate(zip(assigned, is_trained, strict=True)):
        if not trained or i in in_tables:
            continue
        kind = _empty(one)
        index = next((k for k, v in enumerate(vectors) if v.is_like(kind)), None)
        if index is None:
            index = len(vectors)
            vectors.append(kind._replace(name=f"policy_{index - others}"))
        vectors[index] = vectors[index].plus(i, sizes[i])
    found = []
    end = max(sum(vector.sizes) for vector in vectors[:others])
    for index, vector in enumerate([*vectors, *tables]):
        if index >= others:
            # Their random numbers follow those of the vectors before.
            end = -(-end // CHUNK) * CHUNK
            vector = vector._replace(stream_offset=end)
            end += sum(vector.sizes)
        if sum(vector.sizes):
            found.append(vector)
    return found


def _empty(assigned):
    """A vector for such variables."""
    settings, is_compressed = assigned.settings, assigned.reason is None
    method = settings.method if is_compressed else settings.method.uncompressed()
    return FlatVector(
        "compressed" if is_compressed else "plain",
        [],
        [],
        method,
        settings.method.block_size if is_compressed else "model",
        is_compressed,
        settings.method.name if is_compressed else "float32",
    )
