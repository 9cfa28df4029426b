"""N workers and their server in NumPy, for any method, by its parts.

Of a method only the names of classes and their arguments are read.
"""

import numpy as np

from tests.reference import methods as np_methods
from tests.reference.methods import blocks, rounded_at_random, spread, stream_of

LEVELS = {
    "ORQ": lambda part, v: np_methods.optimal_levels(v, part.levels, part.refine),
    "BinGrad": lambda part, v: np_methods.symmetric_levels(v),
    "QSGD": lambda part, v: np_methods.even_levels(v, part.levels, part.norm),
    "LinearQuantization": lambda part, v: np_methods.quantile_levels(v, part.levels),
    "NaturalCompression": lambda part, v: np_methods.powers_of_two(v),
}
ROUNDED = {"float16": np_methods.float16_levels, "float32": lambda levels: levels}


class Workers:
    """What N workers and their server do to one vector.

    Attributes:
        m, e, server_e, decay_m: Momenta and residuals of the workers, the residual of
            the server, the momentum of the weight decay.

    Args:
        method: The method.
        workers: N.
        splits: Where the blocks of the vector begin and end.
        seed: Seed of the random numbers.
        is_plain: Whether the vector is one that is never compressed.
        offset: Place of the vector in the stream of random numbers.
    """

    def __init__(self, method, workers, splits, seed=0, is_plain=False, offset=0):
        self.method, self.splits, self.seed = method, splits, seed
        self.is_plain, self.offset, self.unit = is_plain, offset, 0.0
        size = splits[-1]
        self.m, self.e = np.zeros([workers, size]), np.zeros([workers, size])
        self.server_e, self.decay_m = np.zeros(size), np.zeros(size)

    def update(self, step, gradients, weights, rate, is_uncompressed=False):
        """Returns what is subtracted from the weights, times the rate.

        Args:
            step: Number of the step, from 0 on.
            gradients: Gradients `[N, size]`.
            weights: Weights before the step.
            rate: Learning rate.
            is_uncompressed: Whether nothing is compressed in this step.
        """
        self.step, self.rate = step, rate
        self.loses_nothing = is_uncompressed or self.is_plain
        self.ratio = self.unit / rate if rate else 0.0
        reply = self._combine(self._send(self.method.compressor, gradients))
        if rate and not is_uncompressed:
            # Residuals are in units of the last rate that moved anything.
            self.unit = rate
        if self.method.weight_decay is not None:
            decay = self.method.weight_decay.rate * weights
            if momentum := self.method.weight_decay.momentum:
                self.decay_m = momentum * self.decay_m + decay
                decay = momentum * self.decay_m + decay
            reply = reply + decay
        if self.method.noise_std:
            stream = stream_of(self.seed, step, None, 4 if self.is_plain else 3)
            reply = reply + self.method.noise_std * np_methods.normal(
                len(reply), *stream
            )
        return reply

    def _send(self, part, rows):
        """Returns what the server decodes from each worker."""
        kind = type(part).__name__
        if kind == "Momentum":
            self.m = part.momentum * self.m + (1 - part.momentum) * rows
            rows = rows if self.step < part.warmup_steps else self.m
        elif kind == "NesterovMomentum":
            self.m = part.momentum * self.m + rows
            rows = part.momentum * self.m + rows
        elif kind == "DGC":
            return self._accumulated(part, rows)
        elif kind == "ErrorFeedback" and not self.loses_nothing:
            p = rows + part.decay * self.ratio * self.e
            sent = self._send(part.compressor, p)
            self.e = p - sent if self.rate else self.e
            return sent
        elif kind != "ErrorFeedback":
            return self._decoded(part, rows, range(len(rows)))
        return self._send(part.compressor, rows)

    def _accumulated(self, part, rows):
        """Returns the momenta that DGC sends."""
        if part.clip_norm is not None:
            most = part.clip_norm * len(rows) ** 0.5
            rows = np.stack([np_methods.clip_norm(g, most) for g in rows])
        u = part.momentum * self.m + rows
        v, sent = self.e + u, u
        if not self.loses_nothing:
            density = part.ratio
            if part.density_steps:
                density = max(density, 0.25 ** (1 + self.step // part.density_steps))
            chosen = np.stack([np_methods.top_k(own, density) for own in v])
            sent, u, v = chosen, np.where(chosen, 0, u), np.where(chosen, 0, v)
            self.e = v if self.rate else self.e
        self.m = u if self.rate else self.m
        return sent

    def _combine(self, sent):
        """Returns the server's reply."""
        server, mean = self.method.server, sent.mean(0)
        kind = type(server).__name__
        adds_signs = kind == "CodeSum" and type(server.compressor).__name__ == "Sign"
        if kind == "MeanOfSigns" or (adds_signs and self.loses_nothing):
            return np.sign(sent).mean(0)
        if kind == "SignOfMean" or (kind == "MajorityVote" and self.loses_nothing):
            # Exact zeros stay zeros; nothing else is small enough to become one.
            assert not ((mean != 0) & (np.abs(mean) < 1e-8)).any()
            return np.sign(mean)
        if self.loses_nothing:
            return mean
        if kind == "MajorityVote":
            vote = np_methods.vote(sent, server.tie, self.seed, self.step)
            return np.where(np.abs(sent.sum(0)) < server.quorum, 0, vote)
        if kind == "Requantize":
            (reply,) = self._decoded(server.compressor, mean[np.newaxis], [-1])
            return reply
        if kind == "Recompress":
            p = mean + server.decay * self.ratio * self.server_e
            (reply,) = self._decoded(server.compressor, p[np.newaxis], [-1])
            self.server_e = p - reply if self.rate else self.server_e
            return reply
        return mean

    def _decoded(self, part, rows, ranks):
        """Returns what is decoded of the vectors of workers; rank -1 is the server."""
        kind, splits = type(part).__name__, self.splits
        if self.loses_nothing:
            return rows
        if kind == "Clip":
            factor = part.factor
            rows = np.stack([np_methods.clip(v, splits, factor) for v in rows])
            return self._decoded(part.compressor, rows, ranks)
        if kind == "OptimalScale":
            decoded = self._decoded(part.compressor, rows, ranks)
            pairs = zip(decoded, rows, strict=True)
            return np.stack([np_methods.fitted(y, v, splits) for y, v in pairs])
        if kind == "Ternary":
            scales = np.stack([np_methods.largest(v, splits) for v in rows])
            if part.share_scaler:
                scales[:] = scales.max(0)
            drawn = zip(rows, scales, ranks, strict=True)
            return np.stack([self._ternary(*own) for own in drawn])
        if kind in LEVELS and getattr(part, "variant", "pb") == "pb":
            levels = [[LEVELS[kind](part, v[b]) for b in blocks(splits)] for v in rows]
            if getattr(part, "share_norm", False):
                of_blocks = zip(*levels, strict=True)
                levels = [[max(block, key=lambda t: t[-1]) for block in of_blocks]]
                levels *= len(rows)
            rounded = ROUNDED[getattr(part, "table_dtype", "float32")]
            drawn = zip(rows, levels, ranks, strict=True)
            return np.stack(
                [self._at_random(v, map(rounded, t), i) for v, t, i in drawn]
            )
        if kind == "RandomK":
            drawn = np_methods.drawn(len(rows[0]), part.ratio, self.seed, self.step)
            return rows * (drawn if part.unbiased else drawn > 0)
        return np.stack([self._rounded(kind, part, v) for v in rows])

    def _ternary(self, v, scale, rank):
        """Rounds a vector to minus its scale, 0 or its scale."""
        where = self.splits, self.seed, self.step, rank, self.offset
        return np_methods.ternary_codes(v, scale, *where) * spread(scale, self.splits)

    def _at_random(self, v, levels, rank):
        """Rounds the blocks of a vector to their levels."""
        coins = np_methods.uniform(len(v), self.seed, self.step, rank, self.offset)
        parts = zip(blocks(self.splits), levels, strict=True)
        return np.concatenate([rounded_at_random(v[b], t, coins[b]) for b, t in parts])

    def _rounded(self, kind, part, v):
        """Rounds a vector as each worker would."""
        if kind == "Identity":
            return np_methods.half(v, part.dtype) if part.dtype != "float32" else v
        if kind == "Sign":
            least = np.array([np.mean(np.abs(v[b])) for b in blocks(self.splits)])
            abstains = np.abs(v) < part.abstain_below * spread(least, self.splits)
            return np.where(abstains, 0, np_methods.sign(v, self.seed, self.step))
        if kind == "ScaledSign":
            return np_methods.scaled_sign(v, self.splits)
        if kind == "ScalarCodebook":
            return np_methods.scalar_codebook(v, self.splits, part.bits)
        if kind == "ChunkedTopK":
            form = part.k, part.chunk, part.bits
            return np_methods.chunked_top_k(v, self.splits, *form)
        if kind == "TopK":
            return np_methods.top_k(v, part.ratio)
        decoded = np_methods.bingrad_b(v, self.splits, part.lloyd_steps)
        is_half = part.table_dtype != "float32"
        return np_methods.half(decoded, part.table_dtype) if is_half else decoded
