"""Exchanges of local steps that studies compare, and parts that change one thing."""

import dataclasses

import keras
import tensorflow as tf

import tfgradcomp
from tfgradcomp import methods
from tfgradcomp.compressors import (
    Compressed,
    ErrorFeedback,
    Identity,
    NesterovMomentum,
    ScaledSign,
)
from tfgradcomp.compressors.base import Wrapper
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean, Recompress, Requantize

METHODS = {
    "float32": Method(Identity(), Mean(Identity())),
    "bfloat16": methods.half_precision("bfloat16"),
    "float16": methods.half_precision("float16"),
    "1 bit": methods.dist_ef_block_sgd(),
    "2 bits": methods.scalar_codebook(2),
    "4 bits": methods.scalar_codebook(4),
    "top-k": methods.chunked_top_k(64, bits=2, decay=0.95),
    "top-k, decay 1": methods.chunked_top_k(64, bits=2, decay=1.0),
}
# Where Nesterov's momentum is, and how large: in front of the error feedback, on each
# worker, or behind it, in the optimizer.
MOMENTA = {
    "none": (None, 0.0),
    "0.5 in front": ("in front", 0.5),
    "0.5 behind": ("behind", 0.5),
    "in front": ("in front", 0.9),
    "behind": ("behind", 0.9),
}


def outer(
    method: Method,
    momentum: str = "none",
    rate: float | None = None,
    transport: str = "sharded",
):
    """Return the outer optimizer of `LocalSteps`.

    Args:
        method: How differences of weights travel.
        momentum: One of `MOMENTA`.
        rate: Of the outer SGD; None: 1 without momentum, else 0.7.
        transport: How messages travel; any gives the same bits.
    """
    if rate is None:
        rate = 1.0 if momentum == "none" else 0.7
    place, factor = MOMENTA[momentum]
    if place == "in front":
        pushed = NesterovMomentum(method.compressor, factor)
        method = dataclasses.replace(method, compressor=pushed)
    sgd = keras.optimizers.SGD(rate)
    if place == "behind":
        sgd = keras.optimizers.SGD(rate, momentum=factor, nesterov=True)
    return tfgradcomp.CompressedOptimizer(
        sgd, method, transport=transport, sparse="dense", allow_inner_momentum=True
    )


@dataclasses.dataclass(frozen=True)
class Decoded(Wrapper):
    """Sends what a stateless compressor leaves of a vector, as float32 numbers.

    Workers and server may then compress in different ways, and not in all steps.

    Attributes:
        compressor: The compressor.
        exact_before: Steps before this one send the vector itself.
        exact_after: Steps from this one on do so as well; None: no step does.
    """

    exact_before: int = 0
    exact_after: int | None = None

    def fields(self, layout):
        """Declare one field of float32 numbers."""
        return Identity().fields(layout)

    def compress(self, x, state, layout, context):
        """Return the decoded vector, or the vector itself in an exact step."""
        payload, _, _ = self.compressor.compress(x, (), layout, context)
        values = self.compressor.decompress(payload, layout)
        is_exact = context.step < self.exact_before
        if self.exact_after is not None:
            is_exact |= context.step >= self.exact_after
        return Compressed({"values": tf.where(is_exact, x, values)}, state)

    def decompress(self, payload, layout):
        """Return the values."""
        return payload["values"]

    def mean(self, payloads, layout):
        """Return the mean of the workers' values."""
        return Identity().mean(payloads, layout)


def feedback(
    compressor=None, worker: bool = True, reply: bool = True, decay: float = 1.0
) -> Method:
    """Return two-way error feedback with a scale a tensor.

    Args:
        compressor: A `Decoded` compressor; None: of scaled signs.
        worker: Whether workers compress; else they send float32 numbers.
        reply: Whether the server compresses; else it replies float32 numbers.
        decay: Of both residuals.
    """
    decoded = compressor or Decoded(ScaledSign())
    return Method(
        ErrorFeedback(decoded, decay=decay) if worker else Identity(),
        Recompress(decoded, decay=decay) if reply else Mean(decoded),
    )


# One bit with one thing changed, where both directions carry signs in each exchange.
# Simulated: the messages are float32 numbers that one bit has room for.
SIGNS = {
    "1 bit, decay 0.95": feedback(decay=0.95),
    "1 bit, decay 0.8": feedback(decay=0.8),
    "1 bit, no residuals": Method(ScaledSign(), Requantize(ScaledSign())),
}


def partly_exact(exchanges: int) -> dict[str, Method]:
    """Return one bit with float32 numbers in a part of all messages, by names.

    Args:
        exchanges: Number of exchanges in the training.
    """
    sign, tenth = ScaledSign(), exchanges // 10
    return {
        "1 bit, reply as float32": feedback(reply=False),
        "1 bit in the reply alone": feedback(worker=False),
        "1 bit, last exchange as float32": feedback(
            Decoded(sign, exact_after=exchanges - 1)
        ),
        "1 bit, last tenth as float32": feedback(
            Decoded(sign, exact_after=exchanges - tenth)
        ),
        "1 bit, first tenth as float32": feedback(Decoded(sign, exact_before=tenth)),
    }


def one_bit_changes(exchanges: int) -> dict[str, Method]:
    """Return one bit with one thing changed, by names; `partly_exact` and more."""
    blocks = {"1 bit, blocks of 256": methods.dist_ef_block_sgd(block_size=256)}
    return partly_exact(exchanges) | SIGNS | blocks
