"""Methods that send some elements now and the others later, in NumPy."""

import numpy as np

from tests.reference.methods import blocks


class Late:
    """Variance-based compression, Strom's and the hybrid: N workers and their mean.

    Attributes:
        r: Residuals of the workers.
        sent: Numbers of elements that the workers sent, by steps.

    Args:
        moments: Second moments, by steps and workers; None where none are needed.
        splits: Where the variables of the vector begin and end.
        threshold: Strom's, or "auto"; None for variance-based compression.
        alpha: Factor of the criterion; None without second moments.
        zeta: Factor of the kept second moments.
    """

    def __init__(self, moments, splits, threshold=None, alpha=None, zeta=None):
        self.moments, self.blocks = moments, blocks(splits)
        self.threshold, self.alpha, self.zeta = threshold, alpha, zeta
        self.r, self.v, self.sent = 0.0, 0.0, []

    def update(self, step, gradients, weights, rate):
        """Returns what is subtracted from the weights, times the rate."""
        r = self.r + gradients
        v = 0.0 if self.alpha is None else self.v + self.moments[step]
        where = np.ones(r.shape, bool) if self.alpha is None else r**2 > self.alpha * v
        if self.threshold is None:
            values = np.array(
                [self._powers(*own) for own in zip(r, where, strict=True)]
            )
            left = np.where(values != 0, 0, r), np.where(values != 0, 0, v)
        else:
            t = self.threshold
            if t == "auto":
                pairs = zip(r, where, strict=True)
                t = np.array([self._thresholds(*own) for own in pairs])
            where &= np.abs(r) > t
            values = np.where(where, np.sign(r) * t, 0)
            less = v - 2 * np.abs(r) * t + t**2
            left = r - values, np.where(where, np.maximum(less, 0), v)
        self.sent.append(np.count_nonzero(values, axis=1))
        if rate:
            self.r, self.v = left[0], left[1] * (self.zeta or 0)
        return values.mean(0)

    def _thresholds(self, r, where):
        """Just below the k-th largest of a variable's |r|; nothing exceeds a billion.

        Strom's k is that of one in 32, the hybrid's leaves least of the squares.
        """
        t = np.full(r.shape, 1e9)
        for block in self.blocks:
            size = np.abs(r[block])
            ranked = -np.sort(-size[where[block] & (size != 0)])
            if not len(ranked):
                continue
            k = -(-len(ranked) // 32)
            if self.alpha is not None:
                number = range(1, min(len(ranked), -(-len(size) // 4)) + 1)
                k = min(number, key=lambda n: squares_left(ranked, n))
            t[block] = np.nextafter(np.float32(ranked[k - 1]), np.float32(0))
        return t

    def _powers(self, r, where):
        """The nearer power of two, 2^-7 to 1 times the block's highest."""
        values = np.zeros(len(r))
        for block in self.blocks:
            chosen = np.flatnonzero(where[block]) + block.start
            if not len(chosen):
                continue
            size = np.abs(r[chosen])
            highest = 2 ** np.floor(np.log2(size.max()))
            low = 2 ** np.floor(np.log2(size))
            near = np.minimum(np.where(size < 1.5 * low, low, 2 * low), highest)
            near[near < highest / 128] = 0
            values[chosen] = np.sign(r[chosen]) * near
        return values


def squares_left(ranked, number):
    """The sum of squares that is left once some of the largest have paid.

    Args:
        ranked: Magnitudes of the residual, the largest first.
        number: How many pay; each pays what the last of them has.
    """
    paid = ranked[:number] - ranked[number - 1]
    return np.square(paid).sum() + np.square(ranked[number:]).sum()
