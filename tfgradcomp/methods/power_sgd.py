"""PowerSGD: low-rank factors of the gradients of matrices."""

from __future__ import annotations

from tfgradcomp.compressors import AlternatingLowRank, LowRank, MeanErrorFeedback
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import FactorMean, Mean


def power_sgd(
    rank: int = 4, reuse_query: bool = True, alternate: bool = False
) -> Method:
    r"""Factors of rank r of each matrix, with error feedback; linear in N.

    Worker i: \( M_i = g_i + e_i \), a matrix of n rows and m columns for each kernel of
    shape (..., m). \( P = \frac{1}{N} \sum_i M_i Q \), \( \hat P \) has orthonormal
    columns that span those of P, \( Q = \frac{1}{N} \sum_i M_i^\top \hat P \). The
    update is \( \hat P Q^\top \), and \( e_i \leftarrow M_i - \hat P Q^\top \). A
    worker sends
    \( r (n + m) \) numbers in place of \( n m \), in two all-reduces, whatever N is.
    Vectors, and matrices that this would not halve, are sent as they are.

    Momentum comes after decompression: give the inner SGD a momentum. The learning rate
    is that of uncompressed training.

    Args:
        rank: r. 1 or 2 suit image models, 4 and more language models.
        reuse_query: Whether a step begins with the Q of the last one (warm start), so
            that the factors follow the gradients of many steps. Otherwise Q is drawn
            anew.
        alternate: ACP-SGD: whether P and Q travel in turns, one a step, each for the
            other one of the last step. That takes one all-reduce of \( r \max(n, m) \)
            numbers, and half of the arithmetic.

    Raises:
        ValueError: If `rank` is no positive integer.

    Example:
        ```python
        method = tfgradcomp.methods.power_sgd(rank=2)
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer = tfgradcomp.CompressedOptimizer(inner, method)
        ```

    References:
        Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression
        for Distributed Optimization, 2019, Algorithms 1 and 2.

        Zhang, Zhang, Shi, Chu, Li, Evaluation and Optimization of Gradient Compression
        for Distributed Deep Learning, 2023, Section IV.
    """
    compressor = AlternatingLowRank(rank) if alternate else LowRank(rank)
    server = FactorMean(compressor) if reuse_query else Mean(compressor)
    return Method(MeanErrorFeedback(compressor), server, min_size=0, name="PowerSGD")
