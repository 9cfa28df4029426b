"""The header of every message to a parameter server."""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.core import Context, Field
from tfgradcomp.transports import messages

_FIELDS = {
    "flag": Field(1, dtype="int32"),
    "step": Field(1, dtype="int64"),
    "seed": Field(1, dtype="int64"),
    "learning_rate": Field(1),
    "previous_learning_rate": Field(1),
}
HEADER_WORDS = messages.message_words(_FIELDS)
"""Number of int32 words of a header."""


def write_header(flag: tf.Tensor, context: Context) -> tf.Tensor:
    """Returns the header of a worker's message, int32 `[HEADER_WORDS]`.

    `flag` is an int32 scalar, 0 if all gradients of the worker are finite.
    """
    values = {"flag": flag, **context._asdict()}
    return messages.pack({n: values[n][tf.newaxis] for n in _FIELDS}, _FIELDS)


def read_header(headers: tf.Tensor, context: Context) -> tuple[tf.Tensor, Context]:
    """Returns the workers' flags, and the step from the first worker's header.

    `headers` are int32 `[N, HEADER_WORDS]`. `context` may be any step of these workers:
    it gives the attributes that are not in headers.
    """
    values = messages.unpack(headers[0], _FIELDS)
    of_step = {name: values[name][0] for name in _FIELDS if name != "flag"}
    return headers[:, 0], context.at_server()._replace(**of_step)
