"""Calls the CPU kernels without TensorFlow, by ctypes."""

import ctypes

import numpy as np
import tensorflow as tf

from tests.ops.cpu_structs import STRUCTS, TYPES, CutVector, Update


def _words(count, base):
    digits = max(k for k in range(1, 33) if base**k <= 2**32)
    return -(-count // digits)


def moved(array, offset):
    """Returns a copy that begins `offset` bytes after a multiple of 64."""
    array = np.ascontiguousarray(array)
    memory = np.zeros(array.nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    view = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


class CpuLibrary:
    """The kernels by the names of `tfgradcomp.ops.reference`, on NumPy arrays.

    Each array begins 4 bytes after a multiple of 64 (8 where its elements have 8), or
    just there with `offset = 0`. A vector x may be a list of its parts; values come as
    such a list where `sizes` are given.
    """

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.tfgradcomp_cpu_set_instruction_set.restype = ctypes.c_bool
        self.library.tfgradcomp_cpu_instruction_set.restype = ctypes.c_char_p
        self.offset = 4
        self.update = None

    def updating(self, name, args, rule, coefficients, vectors):
        """Calls a function that decodes, which updates vectors instead.

        Args:
            name: Name of the function.
            args: Its arguments.
            rule: Number of the rule.
            coefficients: float32, those of the rule.
            vectors: The parts of w, m and v; empty lists where the rule has none.

        Returns:
            What the vectors have become.
        """
        vectors = [[self._moved(part) for part in parts] for parts in vectors]
        coefficients = np.array(coefficients, np.float32)
        cut, tables = [], []
        for parts in vectors:
            pointers = np.array([part.ctypes.data for part in parts], np.int64)
            splits = np.cumsum([0, *(part.size for part in parts)])
            tables += [pointers, splits]
            addresses = None, pointers.ctypes.data, splits.ctypes.data
            cut.append(CutVector(*addresses, len(parts), 1))
        update = Update(rule, coefficients.ctypes.data, *cut)
        self.update = ctypes.addressof(update)
        try:
            getattr(self, name)(*args)
        finally:
            self.update = None
        return vectors

    def set_instruction_set(self, name):
        """Sets the instruction set; returns whether this machine has it."""
        return self.library.tfgradcomp_cpu_set_instruction_set(name.encode())

    def instruction_set(self):
        return self.library.tfgradcomp_cpu_instruction_set().decode()

    def _moved(self, value):
        value = np.asarray(value)
        return moved(value, self.offset and max(self.offset, value.itemsize))

    def _run(self, kernel, outputs, **values):
        fields = [field.split(":") for field in STRUCTS[kernel].split()]
        types = [(name, TYPES[kind]) for kind, name in fields]
        struct = type(kernel, (ctypes.Structure,), {"_fields_": types})()
        kept = {}
        for kind, name in fields:
            value = values.get(name)
            if name == "update":
                struct.update = self.update
                continue
            if isinstance(value, list):
                kept[name] = [self._moved(part) for part in value]
                pointers = np.array([part.ctypes.data for part in kept[name]], np.int64)
                splits = np.cumsum([0, *(part.size for part in value)])
                kept[name, "table"] = pointers, splits
                value = CutVector(
                    None, pointers.ctypes.data, splits.ctypes.data, len(pointers), 1
                )
            elif kind in "pc" and value is not None:
                kept[name] = self._moved(value)
                value = kept[name].ctypes.data
                value = CutVector(value, scale=1) if kind == "c" else value
            elif kind == "c":
                value = CutVector(scale=1)
            setattr(struct, name, value)
        function = getattr(self.library, f"tfgradcomp_cpu_{kernel}")
        function(ctypes.byref(struct))
        return [kept[name] for name in outputs]

    def pack_codes(self, codes, base):
        return self._run(
            "PackCodes",
            ["words"],
            codes=codes,
            size=len(codes),
            base=base,
            words=_words_like(len(codes), base),
        )[0]

    def unpack_codes(self, words, base, count):
        rows = int(np.prod(words.shape[:-1], dtype=np.int64))
        return self._run(
            "UnpackCodes",
            ["codes"],
            words=words,
            rows=rows,
            size=count,
            base=base,
            codes=np.full([*words.shape[:-1], count], -1, np.int32),
        )[0]

    def pack_signs_checked(self, x, stream=None):
        words, nonfinite = self._run(
            "PackSigns",
            ["words", "nonfinite"],
            x=x,
            size=_size(x),
            stream=stream,
            words=_words_like(_size(x), 2),
            nonfinite=np.full(1, 7),
        )
        return words, nonfinite[0]

    def pack_momentum_signs(self, x, momentum, beta, warming_up, stream):
        words, new_momentum, nonfinite = self._run(
            "PackMomentumSigns",
            ["words", "new_momentum", "nonfinite"],
            x=x,
            momentum=momentum,
            size=_size(x),
            beta=beta,
            one_minus_beta=1 - beta,
            warming_up=np.array(warming_up),
            stream=stream,
            new_momentum=np.full_like(momentum, 7),
            words=_words_like(len(momentum), 2),
            nonfinite=np.full(1, 7),
        )
        return words, new_momentum, nonfinite[0]

    def pack_ternary(self, x, limit, scale, row_splits, stream):
        return self._run(
            "PackTernary",
            ["words"],
            x=x,
            size=_size(x),
            limit=limit,
            scale=scale,
            stream=stream,
            words=_words_like(_size(x), 3),
            **_blocks(row_splits),
        )[0]

    def block_statistics(self, x, row_splits):
        blocks = len(row_splits) - 1
        slots = -(-_size(x) // 512) + blocks
        return self._run(
            "BlockStatistics",
            ["statistics"],
            x=x,
            size=_size(x),
            scratch=np.full(5 * slots, 7.0),
            statistics=np.full([5, blocks], 7.0),
            **_blocks(row_splits),
        )[0]

    def sum_codes(self, words, base, count, sum_base=None):
        workers = words.shape[0]
        sum_base = sum_base or workers * (base - 1) + 1
        return self._run(
            "SumCodes",
            ["sum"],
            words=words,
            num_workers=workers,
            size=count,
            base=base,
            sum_base=sum_base,
            sum=_words_like(count, sum_base),
        )[0]

    def round_to_bfloat16(self, x, stream):
        rounded = np.full(len(x), 7, np.uint16)
        given = dict(x=x, size=len(x), stream=stream, rounded=rounded)
        (rounded,) = self._run("RoundToBfloat16", ["rounded"], **given)
        return rounded.view(tf.bfloat16.as_numpy_dtype)

    def sum_levels(self, words, scale, row_splits, base, step, zero, sizes=None):
        return self._run(
            "SumLevels",
            ["values"],
            words=words,
            num_workers=words.shape[0],
            size=row_splits[-1],
            base=base,
            step=step,
            zero=zero,
            scale=scale,
            values=_values(row_splits[-1], sizes),
            **_blocks(row_splits),
        )[0]

    def mean_of_signs(self, words, scale, row_splits, sizes=None):
        return self._run(
            "MeanOfSigns",
            ["values"],
            words=words,
            scale=scale,
            num_workers=words.shape[0],
            size=row_splits[-1],
            values=_values(row_splits[-1], sizes),
            **_blocks(row_splits),
        )[0]

    def find_levels(self, x, row_splits, rule, count, sweeps=0):
        levels, nonfinite = self._run(
            "FindLevels",
            ["levels", "nonfinite"],
            x=x,
            size=_size(x),
            rule=("optimal", "quantiles", "symmetric", "means").index(rule),
            count=count,
            sweeps=sweeps,
            levels=np.full([len(row_splits) - 1, count], 7, np.float32),
            nonfinite=np.full(1, 7),
            **_blocks(row_splits),
        )
        return levels, nonfinite[0]

    def pack_levels(self, x, levels, row_splits, stream=None):
        count = levels.shape[1]
        return self._run(
            "PackLevels",
            ["words"],
            x=x,
            size=_size(x),
            levels=levels,
            count=count,
            stream=stream,
            words=_words_like(_size(x), count - (stream is None)),
            **_blocks(row_splits),
        )[0]

    def mean_of_levels(self, words, levels, row_splits, sizes=None):
        return self._run(
            "MeanOfLevels",
            ["values"],
            words=words,
            levels=levels,
            num_workers=words.shape[0],
            size=row_splits[-1],
            count=levels.shape[-1],
            values=_values(row_splits[-1], sizes),
            **_blocks(row_splits),
        )[0]

    def majority_vote(self, words, count, base, reply_base, quorum=0, stream=None):
        return self._run(
            "MajorityVote",
            ["votes"],
            words=words,
            num_workers=words.shape[0],
            size=count,
            base=base,
            reply_base=reply_base,
            quorum=quorum,
            stream=stream,
            votes=_words_like(count, reply_base),
        )[0]

    def sign_error_feedback(self, x, momentum, residual, mu, ratio, moving, row_splits):
        blocks = len(row_splits) - 1
        words, scale, m, left = self._run(
            "SignErrorFeedback",
            ["words", "scale", "new_momentum", "new_residual"],
            x=x,
            momentum=momentum,
            residual=residual,
            size=_size(x),
            mu=mu,
            ratio=np.float32(ratio),
            moving=np.array(moving),
            scratch=np.full(-(-_size(x) // 512) + blocks, 7.0),
            # Not written if there is no momentum.
            new_momentum=np.full_like(residual, 7),
            new_residual=np.full_like(residual, 7),
            scale=np.full(blocks, 7, np.float32),
            words=_words_like(_size(x), 2),
            **_blocks(row_splits),
        )
        return words, scale, None if momentum is None else m, left

    def mean_sign_error_feedback(
        self, sent_words, sent_scale, residual, ratio, moving, row_splits
    ):
        blocks, size = len(row_splits) - 1, row_splits[-1]
        return self._run(
            "MeanSignErrorFeedback",
            ["words", "scale", "new_residual"],
            sent_words=sent_words,
            sent_scale=sent_scale,
            num_workers=sent_words.shape[0],
            residual=residual,
            size=size,
            ratio=np.float32(ratio),
            moving=np.array(moving),
            scratch=np.full(-(-size // 512) + blocks, 7.0),
            new_residual=np.full(size, 7, np.float32),
            scale=np.full(blocks, 7, np.float32),
            words=_words_like(size, 2),
            **_blocks(row_splits),
        )

    def mean_sign_sums(self, sent_words, sent_scale, residual, ratio, row_splits):
        blocks, size = len(row_splits) - 1, row_splits[-1]
        return self._run(
            "MeanSignSums",
            ["words", "l1"],
            sent_words=sent_words,
            sent_scale=sent_scale,
            num_workers=sent_words.shape[0],
            residual=residual,
            size=size,
            ratio=np.float32(ratio),
            scratch=np.full(-(-size // 512) + blocks, 7.0),
            l1=np.full(blocks, 7.0),
            words=_words_like(size, 2),
            **_blocks(row_splits),
        )

    def mean_sign_residual(
        self, sent_words, sent_scale, residual, ratio, moving, words, scale, row_splits
    ):
        return self._run(
            "MeanSignResidual",
            ["new_residual"],
            sent_words=sent_words,
            sent_scale=sent_scale,
            num_workers=sent_words.shape[0],
            residual=residual,
            size=row_splits[-1],
            ratio=np.float32(ratio),
            moving=np.array(moving),
            words=words,
            scale=scale,
            new_residual=np.full(row_splits[-1], 7, np.float32),
            **_blocks(row_splits),
        )[0]

    def pack_unambiguous(
        self, x, moments, residual, variance, alpha, decay, row_splits
    ):
        count, words, *rest, nonfinite = self._run(
            "PackUnambiguous",
            "count words exponents new_residual new_variance nonfinite".split(),
            alpha=alpha,
            exponents=np.full(len(row_splits) - 1, 7, np.int8),
            **_blocks(row_splits),
            **_gathered(x, moments, residual, variance, decay, len(row_splits) - 1),
        )
        return words[: count[0]], *rest, nonfinite[0]

    def pack_over_threshold(
        self, x, moments, residual, variance, threshold, alpha, decay
    ):
        count, words, r, v, nonfinite = self._run(
            "PackOverThreshold",
            "count words new_residual new_variance nonfinite".split(),
            threshold=threshold,
            alpha=alpha,
            **_gathered(x, moments, residual, variance, decay, 0),
        )
        return words[: count[0]], r, None if variance is None else v, nonfinite[0]

    def mean_of_sparse(self, words, scale, row_splits, sizes=None):
        return self._run(
            "MeanOfSparse",
            ["values"],
            words=words,
            num_words=words.shape[1],
            scale=scale,
            num_workers=words.shape[0],
            size=row_splits[-1],
            values=_values(row_splits[-1], sizes),
            **_blocks(row_splits),
        )[0]


def _size(x):
    return sum(part.size for part in x) if isinstance(x, list) else len(x)


def _values(size, sizes):
    if sizes is None:
        return np.full(size, 7, np.float32)
    return [np.full(part, 7, np.float32) for part in sizes]


def _gathered(x, moments, residual, variance, decay, num_blocks):
    """Returns the arguments that all kernels that pack sparse words have."""
    size = _size(x)
    return {
        "x": x,
        "moments": moments,
        "residual": residual,
        "variance": variance,
        "decay": decay,
        "size": size,
        "scratch": np.full(-(-size // 32) + -(-size // 512) + num_blocks, 7, np.int32),
        "words": np.full(size, 7, np.int32),
        "count": np.full(1, 7),
        "new_residual": np.full(size, 7, np.float32),
        # Not written if there is no variance.
        "new_variance": np.full(size, 7, np.float32),
        "nonfinite": np.full(1, 7),
    }


def _words_like(count, base):
    return np.full(_words(count, base), -1, np.int32)


def _blocks(row_splits):
    return {
        "row_splits": np.array(row_splits, np.int64),
        "num_blocks": len(row_splits) - 1,
    }
