"""1-bit SGD: signs with two means a column."""

from __future__ import annotations

from tfgradcomp.compressors import ColumnMeans, ErrorFeedback
from tfgradcomp.core.arguments import check_choice
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import Mean, Recompress


def one_bit_sgd(reply: str = "float32") -> Method:
    r"""One bit an element, two means a column, and error feedback.

    Worker: \( p = g + \frac{\eta_{t-1}}{\eta_t} e \). A kernel of shape (..., m) is a
    matrix of m columns, and a vector is one column. Elements of a column that are at
    least 0 become their mean, and the others become theirs: C(p). It sends C(p), and
    \( e \leftarrow p - C(p) \). Server: the mean of the workers' C(p).

    An element takes 1 + 64 / n bits in a matrix of n rows. The learning rate is that of
    uncompressed training, without momentum.

    Args:
        reply: `"float32"`: the mean. `"requantize"`, as in the paper: C of the mean and
            of the server's own residual. All workers receive the payloads of all others
            (columns cannot be cut), and each computes the reply: a reply that is
            compressed again has more error and saves no bytes.

    Raises:
        ValueError: If `reply` is unknown.

    Example:
        ```python
        method = tfgradcomp.methods.one_bit_sgd()
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1), method
        )
        ```

    References:
        Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application
        to Data-Parallel Distributed Training of Speech DNNs, 2014, Section 3.
    """
    check_choice("reply", reply, ("float32", "requantize"))
    server = (Recompress if reply == "requantize" else Mean)(ColumnMeans())
    return Method(ErrorFeedback(ColumnMeans()), server, name="OneBitSGD")
