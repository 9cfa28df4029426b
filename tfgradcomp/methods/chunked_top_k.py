"""Chunked top-k, as SparseLoCo sends it: the largest of each chunk, in a few bits."""

from __future__ import annotations

from tfgradcomp import compressors
from tfgradcomp.compressors import ErrorFeedback
from tfgradcomp.core.arguments import check_choice
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import Mean, Recompress


def chunked_top_k(
    k: int = 64,
    chunk: int = 4096,
    bits: int = 2,
    decay: float = 0.95,
    reply: str = "requantize",
) -> Method:
    r"""The k largest elements of each chunk, under error feedback that forgets.

    Worker: \( p = g + \beta \frac{\eta_{t-1}}{\eta_t} e \); of each chunk of elements
    it sends the positions of the k largest, and their values in a few bits; \( e
    \leftarrow p - C(p) \). Server: the same with the mean and a residual of its own, so
    that the reply is as short as a worker's message for any number of workers.

    An element takes 0.164 bits in each direction: 511 bits for the positions of 64 of
    4,096 elements, 128 for their values, and 32 for two magnitudes.

    It is made for differences of weights: use it as `outer` of
    `tfgradcomp.LocalSteps`, around SGD. An element waits until it is among the largest,
    and with \( \beta < 1 \) what has waited for t exchanges counts \( \beta^t \).

    Args:
        k: The most elements that a chunk sends; a chunk at the end sends its share.
        chunk: Elements of a chunk, at most 65,536. All compressed variables are one
            vector, which is cut into chunks.
        bits: Bits of a value, its sign included: 1, 2 or 3.
        decay: \( \beta \) of the residuals of workers and server; 1 loses nothing.
        reply: `"requantize"`, or `"float32"`: the mean, as in the paper, for which
            workers receive the messages of all others.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        outer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(1.0), tfgradcomp.methods.chunked_top_k()
        )
        optimizer = tfgradcomp.LocalSteps(keras.optimizers.AdamW(), outer, every=30)
        ```

    References:
        Sarfi, Thérien, Lidin, Belilovsky, Communication Efficient LLM Pre-training with
        SparseLoCo, 2025, Algorithm 1.
    """
    check_choice("reply", reply, ("requantize", "float32"))
    largest = compressors.ChunkedTopK(k, chunk, bits)
    server = (
        Recompress(largest, decay=decay) if reply == "requantize" else Mean(largest)
    )
    sent = ErrorFeedback(largest, decay=decay)
    return Method(sent, server, block_size=chunk, name="ChunkedTopK")
