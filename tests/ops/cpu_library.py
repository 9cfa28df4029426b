"""Calls the CPU kernels without TensorFlow, by ctypes."""

import ctypes
import inspect

import numpy as np
import tensorflow as tf

from tests.ops.cpu_structs import STRUCTS, TYPES, CutVector, Update
from tfgradcomp.ops import digits_per_word
from tfgradcomp.ops.reference.blocks import SUMS
from tfgradcomp.ops.reference.chunks import ChunkFormat
from tfgradcomp.ops.registry import OPERATIONS

# The results of each operation, in the order of the reference, by the names of the
# kernel's fields.
RESULTS = {
    "pack_codes": "words",
    "unpack_codes": "codes",
    "pack_signs_checked": "words nonfinite",
    "pack_momentum_signs": "words new_momentum nonfinite",
    "pack_ternary": "words",
    "block_statistics": "statistics",
    "sum_codes": "sum",
    "first_nonfinite": "part",
    "add_scaled": "total",
    "round_to_bfloat16": "rounded",
    "sum_levels": "values",
    "mean_of_signs": "values",
    "find_levels": "levels nonfinite",
    "pack_levels": "words",
    "mean_of_levels": "values",
    "majority_vote": "votes",
    "sign_error_feedback": "words scale new_momentum new_residual",
    "mean_sign_error_feedback": "words scale new_residual",
    "mean_sign_sums": "words l1",
    "mean_sign_residual": "new_residual",
    "pack_unambiguous": "words exponents new_residual new_variance nonfinite",
    "pack_over_threshold": "words new_residual new_variance nonfinite",
    "mean_of_sparse": "values",
    "find_largest": "indices",
    "clear_elements": "cleared",
    "mean_of_pairs": "mean",
    "pack_largest": "words levels nonfinite",
    "mean_of_largest": "values",
    "multiply_matrices": "products",
    "multiply_transposed": "factors",
    "multiply_factors": "values",
    "subtract_factors": "difference",
    "multiply_sum": "total products",
    "orthonormalize": "basis",
}
SPARSE = ("pack_unambiguous", "pack_over_threshold")
RULES = ("optimal", "quantiles", "symmetric", "means")


def moved(array, offset):
    """Returns a copy that begins `offset` bytes after a multiple of 64."""
    array = np.ascontiguousarray(array)
    memory = np.zeros(array.nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    view = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


class CpuLibrary:
    """The kernels by the names of the operations, on NumPy arrays.

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

    def call(self, name, *args, **kwargs):
        """Calls a kernel with the arguments of its reference.

        Returns:
            Its result, or a list of its results.
        """
        bound = inspect.signature(OPERATIONS[name].reference).bind(*args, **kwargs)
        bound.apply_defaults()
        inputs = _inputs(name, bound.arguments)
        names = RESULTS[name].split()
        outputs = {field: _output(field, name, inputs) for field in names}
        if name in SPARSE:
            outputs["count"] = np.full(1, 7)
        struct = "PackSigns" if name == "pack_signs_checked" else _title(name)
        kept = self._run(struct, inputs | outputs)
        if name in SPARSE:
            kept["words"] = kept["words"][: kept["count"][0]]
        results = [_result(field, kept[field], inputs) for field in names]
        if name == "block_statistics":
            return list(results[0])
        return results if len(results) > 1 else results[0]

    def updating(
        self,
        name,
        args,
        rule,
        coefficients,
        vectors,
        decays=None,
        rate=0.0,
        floors=None,
    ):
        """Calls a kernel that updates vectors, by what it decodes or by a vector.

        Args:
            name: Name of the operation; None: none decodes.
            args: Its arguments; without a name, the parts of the vector.
            rule: Number of the rule.
            coefficients: float32, those of the rule.
            vectors: The parts of w, m and v; empty lists where the rule has none.
            decays: float32, of each part of w; None: nothing decays.
            rate: What decays are multiplied by.
            floors: float32, of each part of v; None: the rule has none.

        Returns:
            What the vectors have become.
        """
        vectors = [[self._moved(part) for part in parts] for parts in vectors]
        coefficients = np.array(coefficients, np.float32)
        cut = [_cut(parts) for parts in vectors]
        cuts = (vector for vector, _ in cut)
        numbers = [
            None if given is None else np.array(given, np.float32)
            for given in (decays, floors)
        ]
        at = [None if given is None else given.ctypes.data for given in numbers]
        update = Update(rule, coefficients.ctypes.data, *cuts, at[0], rate, at[1])
        self.update = ctypes.addressof(update)
        try:
            if name is None:
                size = sum(part.size for part in args)
                self._run("ApplyVector", {"x": args, "size": size})
            else:
                self.call(name, *args)
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

    def _run(self, kernel, values):
        """Runs a kernel; returns the arrays that its fields point to."""
        fields = [field.split(":") for field in STRUCTS[kernel].split()]
        types = [(name, TYPES[kind]) for kind, name in fields]
        struct = type(kernel, (ctypes.Structure,), {"_fields_": types})()
        kept, tables = {}, []
        for kind, name in fields:
            value = values.get(name)
            if name == "update":
                value = self.update
            elif isinstance(value, list):
                kept[name] = [self._moved(part) for part in value]
                value, table = _cut(kept[name])
                tables.append(table)
            elif kind in "pc" and value is not None:
                kept[name] = self._moved(value)
                value = kept[name].ctypes.data
                value = CutVector(value, scale=1) if kind == "c" else value
            elif kind == "c":
                value = CutVector(scale=1)
            setattr(struct, name, value)
        getattr(self.library, f"tfgradcomp_cpu_{kernel}")(ctypes.byref(struct))
        return kept


def _title(name):
    return name.title().replace("_", "")


def _cut(parts):
    """Returns a vector of parts, and the arrays that it points to."""
    pointers = np.array([part.ctypes.data for part in parts], np.int64)
    splits = np.cumsum([0, *(part.size for part in parts)])
    addresses = None, pointers.ctypes.data, splits.ctypes.data
    return CutVector(*addresses, len(parts), 1), (pointers, splits)


def _inputs(name, given):
    """Returns the inputs of a kernel from the arguments of its reference."""
    inputs = dict(given)
    blocks = 0
    if "row_splits" in given:
        blocks = len(given["row_splits"]) - 1
        inputs["row_splits"] = np.array(given["row_splits"], np.int64)
    if "x" in given:
        x = given["x"]
        size = sum(part.size for part in x) if isinstance(x, list) else len(x)
    elif "codes" in given:
        size = len(given["codes"])
    elif name == "multiply_factors":
        shapes = zip(given["rows"], given["columns"], strict=True)
        size = sum(n * (m or 1) for n, m in shapes)
    else:
        size = given["row_splits"][-1] if "row_splits" in given else given["count"]
    inputs |= {"size": size, "num_blocks": blocks}
    for words in ("sent_words", "words"):
        if words in given:
            inputs.setdefault("num_workers", given[words].shape[0])
            inputs["num_words"] = given[words].shape[-1]
            inputs["rows"] = int(np.prod(given[words].shape[:-1], dtype=np.int64))
    chunks = -(-size // 512) + blocks
    if name in SPARSE:
        inputs["scratch"] = np.full(-(-size // 32) + chunks, 7, np.int32)
    elif name != "find_levels":  # On a CPU this kernel takes no scratch memory.
        inputs["scratch"] = np.full(
            chunks * (5 if name == "block_statistics" else 1), 7.0
        )
    for flag in ("moving", "warming_up", "is_finite"):
        if flag in given:
            inputs[flag] = np.array(given[flag])
    if "ratio" in given:
        inputs["ratio"] = np.float32(given["ratio"])
    if "beta" in given:
        inputs["one_minus_beta"] = 1 - given["beta"]
    if "rule" in given:
        inputs["rule"] = RULES.index(given["rule"])
    if "sums" in given:
        inputs["sums"] = sum(1 << SUMS.index(one) for one in given["sums"])
    if "rank" in given:
        inputs["num_tensors"] = inputs["num_factors"] = len(given["rows"])
        for axis in given.keys() & {"rows", "columns"}:
            inputs[axis] = np.array(given[axis], np.int64)
    if name == "orthonormalize":
        inputs["scratch"] = np.full(size + 15 * len(given["rows"]) * given["rank"], 7.0)
    if "levels" in given:
        inputs["count"] = given["levels"].shape[-1]
    if name == "clear_elements":
        inputs["count"] = len(given["indices"])
    if name == "mean_of_pairs":
        inputs["num_workers"], inputs["num_pairs"] = given["indices"].shape
    if name == "pack_largest":
        inputs["count"] = 2 ** (given["bits"] - 1)
    if name == "sum_codes":
        least = inputs["num_workers"] * (given["base"] - 1) + 1
        inputs["sum_base"] = given["sum_base"] or least
    return inputs


def _output(field, name, inputs):
    """Returns the array that a kernel writes a result to, full of other numbers."""
    size, blocks = inputs["size"], inputs["num_blocks"]
    if field == "values":
        sizes = inputs["sizes"]
        if sizes is not None:
            return [np.full(part, 7, np.float32) for part in sizes]
    if field in ("words", "sum", "votes"):
        if name in SPARSE:
            return np.full(size, 7, np.int32)
        if name == "pack_largest":
            form = ChunkFormat(*(inputs[key] for key in ("k", "chunk", "bits")))
            return np.full(blocks * form.words, 7, np.int32)
        base = {
            "pack_codes": inputs.get("base"),
            "pack_ternary": 3,
            "sum_codes": inputs.get("sum_base"),
            "pack_levels": inputs.get("count", 0) - (inputs.get("stream") is None),
            "majority_vote": inputs.get("reply_base"),
        }.get(name, 2)
        return np.full(-(-size // digits_per_word(base)), -1, np.int32)
    if field == "codes":
        return np.full([*inputs["words"].shape[:-1], size], -1, np.int32)
    if field in ("products", "factors"):
        rows, columns = inputs["rows"], inputs["columns"]
        count = inputs["rank"] * (rows * (columns > 0)).sum()
        if field == "factors":
            count = (inputs["rank"] * columns + rows * (columns == 0)).sum()
        return np.full(count, 7, np.float32)
    shape, dtype = {
        "nonfinite": (1, np.int64),
        "part": (1, np.int32),
        "indices": (inputs.get("count"), np.int32),
        "rounded": (size, np.uint16),
        "statistics": ([5, blocks], np.float64),
        "levels": ([blocks, inputs.get("count")], np.float32),
        "scale": (blocks, np.float32),
        "l1": (blocks, np.float64),
        "exponents": (blocks, np.int8),
    }.get(field, (size, np.float32))
    return np.full(shape, 7, dtype)


def _result(field, array, inputs):
    """Returns a result as the reference does."""
    optional = {"new_momentum": "momentum", "new_variance": "variance"}.get(field)
    if optional is not None and inputs[optional] is None:
        return None  # The kernel has not written it.
    if field in ("nonfinite", "part"):
        return array[0]
    return array.view(tf.bfloat16.as_numpy_dtype) if field == "rounded" else array
