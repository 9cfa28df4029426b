"""Random-k: the values of a few elements that all workers draw together."""

from __future__ import annotations

from tfgradcomp import compressors
from tfgradcomp.compressors import Compressor, ErrorFeedback
from tfgradcomp.core.arguments import check_choice
from tfgradcomp.methods.method import Method
from tfgradcomp.servers import Mean


def random_k(ratio: float = 0.01, error_feedback: bool = True) -> Method:
    r"""A share of the elements, drawn at random in each step, the same on all workers.

    Worker: \( p = g + \frac{\eta_{t-1}}{\eta_t} e \); of each of k ranges of d / k
    elements it sends one element of p, and \( e \leftarrow p \) without these. Server:
    the mean; zero for an element that was not drawn. Indices do not travel: 32 bits for
    each element drawn, which an all-reduce can add up whatever N is.

    An element waits for d / k steps on average, and then its sum is applied at once.
    Use SGD without momentum, which would go on with such a sum as if it were new.

    Args:
        ratio: Share k / d of the elements that is sent, in (0, 1]; at least one
            element.
        error_feedback: Whether what was not drawn is added to the next gradient.
            Otherwise it is lost, and what was drawn is multiplied by d / k: unbiased,
            with a large variance.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        ```python
        method = tfgradcomp.methods.random_k(ratio=0.05)
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.01), method
        )
        ```

    References:
        Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, 2018, Algorithm 1. Without
        feedback: Wangni, Wang, Liu, Zhang, Gradient Sparsification for
        Communication-Efficient Distributed Optimization, 2018, with equal
        probabilities.
    """
    check_choice("error_feedback", error_feedback, (False, True))
    drawn = compressors.RandomK(ratio, unbiased=not error_feedback)
    sent: Compressor = ErrorFeedback(drawn) if error_feedback else drawn
    return Method(sent, Mean(drawn), name="RandomK")
