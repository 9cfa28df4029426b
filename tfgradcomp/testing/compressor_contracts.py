"""Contracts of the worker's half of a method. A function's name is the contract."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfgradcomp import ops
from tfgradcomp.compressors import Compressor
from tfgradcomp.compressors.base import checked_prepare
from tfgradcomp.core import Field, Layout, SplitVector
from tfgradcomp.core.contracts import check_vector
from tfgradcomp.methods import Method
from tfgradcomp.testing.errors import require, require_finite, require_same_bits
from tfgradcomp.testing.inputs import (
    compress,
    first_step,
    gradient_of,
    make_context,
    second_moments_of,
)
from tfgradcomp.transports import messages

# Functions of a size and a largest magnitude.
EXTREMES = {
    "zeros": lambda size, top: np.zeros(size),
    "negative zeros": lambda size, top: np.full(size, -0.0),
    "ones": lambda size, top: np.ones(size),
    "a constant": lambda size, top: np.full(size, -0.37),
    "largest": lambda size, top: np.resize([top, -top], size),
    "largest constant": lambda size, top: np.full(size, top),
    "smallest": lambda size, top: np.resize([1e-30, -1e-30], size),
    "denormals": lambda size, top: np.resize([1e-40, -1e-44, 0.0], size),
    "both ends": lambda size, top: np.resize([top, 1e-30, -0.0, 1e-40], size),
}
# An element that is not finite, or so large that something after it may overflow.
NEAR_LARGEST = 3.4e38
UNUSUAL = (1.0, 1e5, NEAR_LARGEST, np.inf, -np.inf, np.nan)
# No momentum of three steps grows as much: 1.9 + 0.81 + ...
_MOST_GROWTH = 20


def payloads_are_as_declared_and_survive_the_wire(
    method: Method, layout: Layout
) -> None:
    """Checks the fields, words and decoded vector of a payload."""
    compressor = method.compressor
    payload = first_step(compressor, gradient_of(layout), layout).payload
    again = check_message(payload, compressor.fields(layout))
    vector = compressor.decompress(payload, layout)
    check_vector(compressor, "decompress", vector, layout)
    after_wire = compressor.decompress(again, layout)
    require_same_bits("the vectors after and before the wire", after_wire, vector)


def check_message(
    tensors: dict[str, tf.Tensor], fields: dict[str, Field]
) -> dict[str, tf.Tensor]:
    """Checks the words of a message; returns the tensors that are read from them."""
    for name, field in fields.items():
        if field.base is not None:
            codes = ops.unpack_codes(tensors[name], field.base, field.count)
            what = f"the words of {name!r} and those of `ops.pack_codes`"
            require_same_bits(what, tensors[name], ops.pack_codes(codes, field.base))
    words = messages.pack(tensors, fields)
    declared = messages.message_words(fields)
    require(
        messages.has_variable_length(fields) or words.shape == [declared],
        f"a message must have {declared} words. Received: words={words.shape[0]}",
    )
    again = messages.unpack(words, fields)
    expected = {name: tensors[name] for name in fields}
    require_same_bits("the fields after and before the wire", again, expected)
    return again


def the_first_round_is_as_declared(method: Method, layout: Layout) -> None:
    """Checks the parts of a first round; a lone worker needs no round."""
    compressor, x = method.compressor, tf.constant(gradient_of(layout))
    state, context = compressor.init(layout), make_context(moments=second_moments_of(x))
    checked_prepare(compressor, x, state, layout, context)
    require_same_bits(
        "the results with a first round of one worker, and without a round",
        compress(compressor, x, state, layout, context)[:2],
        compressor.compress(x, state, layout, context)[:2],
    )


def every_form_gives_the_same_bits(method: Method, layout: Layout) -> None:
    """Checks steps that are repeated, of split gradients, and by one-pass kernels."""
    expected = _steps(method.compressor, layout)
    for compressor in _forms(method):
        what = f"steps of {compressor}, and steps of {method.compressor}"
        require_same_bits(what, _steps(compressor, layout), expected)
        what = f"steps of {compressor} with split gradients and with flat ones"
        require_same_bits(what, _steps(compressor, layout, is_split=True), expected)


def native_operations_give_the_bits_of_pure_tensorflow(
    method: Method, layout: Layout
) -> None:
    """Checks steps with `TFGRADCOMP_OPS=python`."""
    for compressor in _forms(method):
        native = _steps(compressor, layout)
        with _pure_tensorflow():
            expected = _steps(compressor, layout)
        require_same_bits(f"native and other steps of {compressor}", native, expected)


def decoded_vectors_do_not_depend_on_tensor_sizes(
    method: Method, layout: Layout
) -> None:
    """Checks vectors that are decoded in the parts that the layout names."""
    compressor, whole = method.compressor, Layout(layout.row_splits)
    if compressor.needs_whole_tensors:
        return
    payload = first_step(compressor, gradient_of(layout), layout).payload
    pair = {name: tf.stack([value, value]) for name, value in payload.items()}
    for decode, given in ((compressor.decompress, payload), (compressor.mean, pair)):
        vector, name = decode(given, layout), decode.__name__
        what = f"the vectors of `{name}` with sizes of tensors and without"
        require_same_bits(what, vector, decode(given, whole))
        if isinstance(vector, SplitVector):
            sizes = tuple(tensor.shape.num_elements() for tensor in vector)
            require(
                sizes == layout.sizes,
                f"`{name}` must split a vector into {layout.sizes}. "
                f"Received: sizes={sizes}",
            )


def extreme_values_stay_finite(
    method: Method, layout: Layout, largest: float = 1e30
) -> None:
    """Checks that vectors and states stay finite, and that nothing grows."""
    compressor = method.compressor
    for name, make in EXTREMES.items():
        x = tf.constant(make(layout.size, largest), tf.float32)
        state, top = compressor.init(layout), np.abs(x).max()
        for step in range(3):
            context = make_context(
                step,
                previous_rate=0.1 if step else 0.0,
                moments=second_moments_of(x),
            )
            payload, state, _ = compress(compressor, x, state, layout, context)
            vector = np.asarray(compressor.decompress(payload, layout))
            require_finite(f"vector and state of {name}", {"x": vector, "state": state})
            require(
                not method.is_scaled or np.abs(vector).max() <= _MOST_GROWTH * top,
                f"a decoded vector must not be {_MOST_GROWTH} times as large as "
                f"{name}, {top}. Received: largest={np.abs(vector).max()}",
            )


def infinities_and_nan_are_flagged(method: Method, layout: Layout) -> None:
    """Checks `is_finite` for gradients and payloads that overflow or are not finite."""
    places = itertools.cycle([0, layout.size // 2, layout.size - 1])
    for number, place in zip(UNUSUAL, places, strict=False):
        x = gradient_of(layout)
        x[place] = number
        flat = tf.constant(x)
        # Compressors read a split gradient by other ways.
        given = SplitVector(tf.split(flat, layout.sizes)) if place else flat
        for compressor in _forms(method):
            state = compressor.init(layout)
            context = make_context(1, 5, 1, moments=second_moments_of(x))
            compressed = compress(compressor, given, state, layout, context)
            numbers = [v for v in compressed.payload.values() if v.dtype != tf.int32]
            expected = all(np.isfinite(np.float64(v)).all() for v in [x, *numbers])
            flag = compressed.is_all_finite(given)
            if number == NEAR_LARGEST:
                # The distance of two levels may overflow.
                expected = expected and bool(flag)
            _require_flag(flag, expected, number)


def steps_can_be_traced(method: Method, layout: Layout) -> None:
    """Checks that a step in a tf.function flags NaN."""
    compressor = method.fused().compressor

    @tf.function(autograph=False)
    def is_finite(tensors):
        x, state = SplitVector(tensors), compressor.init(layout)
        context = make_context(1, 5, 1, moments=second_moments_of(x))
        return compress(compressor, x, state, layout, context).is_all_finite(x)

    x = gradient_of(layout)
    for number in (1.0, np.nan):
        x[layout.size // 2] = number
        flag = is_finite(tf.split(x, layout.sizes))
        _require_flag(flag, np.isfinite(number), number)


def _require_flag(found, expected, number):
    require(
        found.shape == [] and found.dtype == tf.bool and bool(found) == expected,
        f"`is_finite` must be {bool(expected)}, a boolean scalar, for a gradient with "
        f"an element {number}. Received: is_finite={found}",
    )


def _forms(method: Method) -> list[Compressor]:
    """The compressor, and the compressor in one pass if there is one."""
    return [*dict.fromkeys([method.compressor, method.fused().compressor])]


def _steps(compressor: Compressor, layout: Layout, is_split: bool = False) -> list:
    """Results of three steps, one of them at a learning rate of 0."""
    results, state = [], compressor.init(layout)
    for step, rate in enumerate([0.2, 0.0, 0.05]):
        x = gradient_of(layout, step)
        x[step % layout.size] = 0.0
        moments = second_moments_of(x)
        context = make_context(step, 5, 1, 1, rate, 0.1, moments)
        given = tf.constant(x)
        if is_split:
            given = SplitVector(tf.split(given, layout.sizes))
        payload, state, _ = compress(compressor, given, state, layout, context)
        results.append((payload, state, compressor.decompress(payload, layout)))
    return results


@contextlib.contextmanager
def _pure_tensorflow() -> Iterator[None]:
    before = os.environ.get("TFGRADCOMP_OPS", "auto")
    os.environ["TFGRADCOMP_OPS"] = "python"
    try:
        yield
    finally:
        os.environ["TFGRADCOMP_OPS"] = before
