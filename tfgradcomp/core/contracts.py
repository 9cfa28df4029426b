"""Comparison of the tensors that a method returns with those that it declares.

Names, static shapes and types are compared in Python, when a step is traced. A traced
step computes nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfgradcomp.core.field import Field
from tfgradcomp.core.layout import Layout, VaryingLayout

# Files hold a state as float32, which has all numbers of these types.
STATE_DTYPES = ("float32", "bfloat16", "float16")


def check_fields(
    part: Any,
    function: str,
    tensors: Mapping[str, Any],
    fields: Mapping[str, Field],
    declared_by: str = "fields",
    allow_others: bool = False,
) -> None:
    """Raises ValueError unless tensors have the names, shapes and types of fields.

    The functions `function` and `declared_by` of `part`, a compressor or a server, have
    returned the tensors and declared the fields. Other tensors may stand beside the
    fields if `allow_others` is true.
    """
    declared = f"`{declared_by}` of {part}"
    missing = fields.keys() - tensors.keys()
    if missing or (tensors.keys() - fields.keys() and not allow_others):
        raise ValueError(
            f"`{function}` must return the fields {sorted(fields)}, which {declared} "
            "declares. Use the same names in both. "
            f"Received: fields={sorted(tensors)}"
        )
    for name, field in fields.items():
        came, expected = _spec(tensors[name]), _declared(field)
        if not _fits(came, expected, may_be_shorter=field.variable_length):
            most = "at most " if field.variable_length else ""
            codes = " (words of packed codes: `ops.pack_codes`)" if field.base else ""
            raise ValueError(
                f"`{function}` must return the field {name!r} as {most}"
                f"{_text(expected)}{codes}, which {declared} declares. Return such a "
                f"tensor, or declare this one. Received: {name}={_text(came)}"
            )


def check_state(part: Any, function: str, state: Any, before: Any) -> None:
    """Raises ValueError unless a state has the form of the state before it.

    `function` of `part`, a compressor, a server or a weight decay, returned the state.
    """
    leaves, expected = named_leaves(state), named_leaves(before)
    if leaves.keys() != expected.keys():
        raise ValueError(
            f"`{function}` of {part} must return a state with the leaves "
            f"{sorted(expected)}, as `init` does. Received: leaves={sorted(leaves)}"
        )
    for name, leaf in leaves.items():
        came, old = _spec(leaf), _spec(expected[name])
        if not _fits(came, old):
            raise ValueError(
                f"`{function}` of {part} must return the state {name!r} as "
                f"{_text(old)}, as `init` does. Received: {name}={_text(came)}"
            )


def initial_state(part: Any, layout: Layout, by_tensor: bool = False) -> Any:
    """Returns the state of a part before the first step.

    Args:
        part: A compressor, a server or a weight decay.
        layout: The blocks and tensors of the vector.
        by_tensor: Whether no tensor is ever cut, so that a leaf may have another number
            of items than the tensor has elements.

    Raises:
        ValueError: If a leaf is no vector of the right size that files can hold.
    """
    state = part.init(layout)
    leaves = named_leaves(state)
    sizes = leaf_sizes(part, layout) if by_tensor else [(layout.size,)] * len(leaves)
    for (name, leaf), items in zip(leaves.items(), sizes, strict=True):
        came, size = _spec(leaf), sum(items)
        if came.shape != [size] or came.dtype.name not in STATE_DTYPES:
            reason = (
                "as many items as `init` returns for its tensors together"
                if by_tensor
                else "a state is saved and divided as the gradient is, by elements. "
                "Spread a single number over such a vector"
            )
            raise ValueError(
                f"`init` of {part} must return the state {name!r} as "
                f"float32 [{size}]: {reason}. Received: {name}={_text(came)}"
            )
    return state


def leaf_sizes(part: Any, layout: Layout) -> list[tuple[int, ...]]:
    """Returns the items of each tensor in each leaf of a state.

    Args:
        part: A compressor or a server of a method that cuts no tensor.
        layout: The blocks and tensors of the vector.
    """
    with tf.Graph().as_default():
        # Nothing is computed: only the static shapes are read.
        of_tensors = [
            named_leaves(part.init(Layout.from_shapes([shape]))).values()
            for shape in layout.known_shapes
        ]
        rows = [[leaf.shape[0] for leaf in leaves] for leaves in of_tensors]
    return list(zip(*rows, strict=True))


def check_vector(part: Any, function: str, vector: Any, layout: Layout) -> None:
    """Raises ValueError unless a vector is float32 and of the layout's size."""
    is_varying = isinstance(layout, VaryingLayout)
    expected = tf.TensorSpec([None if is_varying else layout.size], tf.float32)
    if not _fits(_spec(vector), expected):
        raise ValueError(
            f"`{function}` of {part} must return a vector, {_text(expected)}. "
            f"Received: vector={_text(_spec(vector))}"
        )


def _declared(field: Field) -> tf.TensorSpec:
    # In a layout whose size varies, counts are tensors.
    length = None if tf.is_tensor(field.count) else field.length
    return tf.TensorSpec([length], field.dtype if field.base is None else tf.int32)


def named_leaves(nest: Any) -> dict[str, Any]:
    """Returns the leaves of a nest by their paths, as `tf.nest.flatten` orders them."""
    paths = keras.tree.flatten_with_path(nest)
    return {".".join(map(str, path)): leaf for path, leaf in paths}


def _spec(value: Any) -> tf.TensorSpec:
    if not hasattr(value, "dtype"):
        value = tf.constant(value)
    return tf.TensorSpec(value.shape, value.dtype)


def _fits(came: Any, expected: Any, may_be_shorter: bool = False) -> bool:
    if came.dtype != expected.dtype or came.shape.rank != expected.shape.rank:
        return False
    return all(
        most is None or size == most or (may_be_shorter and (size or 0) < most)
        for size, most in zip(came.shape, expected.shape, strict=True)
    )


def _text(spec: tf.TensorSpec) -> str:
    if spec.shape.rank is None:
        return f"{spec.dtype.name} of unknown shape"
    sizes = ["unknown" if size is None else str(size) for size in spec.shape]
    return f"{spec.dtype.name} [{', '.join(sizes)}]"
