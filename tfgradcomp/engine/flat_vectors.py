"""The flat vectors that a model's gradient is divided into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tfgradcomp.assignment.layer_method import MethodSettings
from tfgradcomp.assignment.policy import Assigned
from tfgradcomp.assignment.rules import table_positions
from tfgradcomp.core import Layout
from tfgradcomp.engine.bucket_ranges import BucketRange, Piece
from tfgradcomp.methods import Method
from tfgradcomp.ops import INDEX_BITS
from tfgradcomp.ops.block_sums import CHUNK
from tfgradcomp.transports import Rows


class FlatVector(NamedTuple):
    """Variables that are flattened together, with their method.

    Attributes:
        name: Name of the vector, also in files.
        positions: Positions of the variables in the model.
        shapes: The shape of each variable.
        method: The method.
        is_compressed: Whether the method compresses; otherwise float32 travels.
        num_rows: Rows of a table whose gradient may travel as rows, and which is a
            vector by itself; None for other vectors.
        stream_offset: Where the random numbers of the vector begin, a multiple of
            `CHUNK`. Two vectors draw different numbers.
    """

    name: str
    positions: list[int]
    shapes: list[tuple[int, ...]]
    method: Method
    is_compressed: bool
    num_rows: int | None = None
    stream_offset: int = 0

    @property
    def tensors(self) -> Layout:
        """The layout whose blocks are the variables."""
        return Layout.from_shapes(self.shapes)

    @property
    def size(self) -> int:
        """Elements of the vector."""
        return self.tensors.size

    def __str__(self):
        travels_as = self.method.name if self.is_compressed else "float32"
        positions = ", ".join(map(str, self.positions))
        return f"{travels_as} of variables {positions} in {self.name}"

    def is_like(self, other: FlatVector) -> bool:
        """Returns whether both vectors may be joined."""
        own = self.method, self.is_compressed
        return own == (other.method, other.is_compressed)

    def uncompressed(self) -> FlatVector:
        """Returns the vector with the method's mathematics and no compression."""
        if not self.is_compressed:
            return self
        return self._replace(method=self.method.uncompressed(), is_compressed=False)

    def pieces(self, bucket_range: BucketRange) -> tuple[Piece, ...]:
        """Returns the pieces of the model's variables in a range."""
        pieces = bucket_range.pieces(self.tensors)
        return tuple(
            piece._replace(position=self.positions[piece.position]) for piece in pieces
        )

    def plus(self, position: int, shape: Sequence[int]) -> FlatVector:
        """Returns the vector with one variable more."""
        return self._replace(
            positions=[*self.positions, position], shapes=[*self.shapes, tuple(shape)]
        )


def divided(
    variables: Sequence,
    assigned: Sequence[Assigned],
    is_trained: Sequence[bool],
    own: MethodSettings,
    sparse: Any,
) -> list[FlatVector]:
    """Divides the variables into flat vectors, tables last.

    Variables of equal methods are one vector. A table is a vector by itself.

    Args:
        variables: The model's trainable variables.
        assigned: The method of each variable.
        is_trained: Whether each variable takes an update.
        own: The wrapper's own method.
        sparse: Rules for the tables whose rows travel; `()`: none.
    """
    tables = []
    for i in table_positions(variables, sparse) if sparse else ():
        shape = variables[i].shape
        rows = shape[0] if shape else 0
        vector = _empty(assigned[i]).plus(i, shape)
        vector = vector._replace(name=f"table_{i}", num_rows=rows)
        if is_trained[i] and _travels_as_rows(vector, assigned[i].settings.min_size):
            tables.append(vector)
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
        vectors[index] = vectors[index].plus(i, variables[i].shape)
    # Random numbers of other vectors follow those of the wrapper's own vectors.
    end = max(vector.size for vector in vectors[:others])
    further = []
    for vector in [*vectors[others:], *tables]:
        end = -(-end // CHUNK) * CHUNK
        further.append(vector._replace(stream_offset=end))
        end += vector.size
    return [vector for vector in [*vectors[:others], *further] if vector.size]


def _empty(assigned):
    """Returns a vector for variables of a method, without any."""
    method, is_compressed = assigned.settings.method, assigned.reason is None
    if is_compressed:
        return FlatVector("compressed", [], [], method, True)
    return FlatVector("plain", [], [], method.uncompressed(), False)


def _travels_as_rows(table, min_size):
    """Returns whether rows of a table may travel by its method."""
    is_large_enough = table.size >= max(min_size, 1) and table.num_rows < 2**INDEX_BITS
    layout = Layout.from_shapes(table.shapes, table.method.block_size)
    # Noise is added to whole vectors.
    has_noise = bool(table.method.noise_std)
    return is_large_enough and not has_noise and Rows.carries(table.method, layout)
