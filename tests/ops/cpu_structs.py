"""The structs of custom_ops/kernels.h, as ctypes have them."""

import ctypes


class CutVector(ctypes.Structure):
    """A flat vector, whole or cut into parts, with a scale."""

    _fields_ = [
        ("whole", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("splits", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


class Update(ctypes.Structure):
    """A step of an optimizer."""

    _fields_ = [
        ("rule", ctypes.c_int),
        ("coefficients", ctypes.c_void_p),
        ("w", CutVector),
        ("m", CutVector),
        ("v", CutVector),
        ("decays", ctypes.c_void_p),
        ("rate", ctypes.c_float),
        ("floors", ctypes.c_void_p),
    ]


TYPES = {
    "c": CutVector,
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "f": ctypes.c_float,
    "e": ctypes.c_int,
}
# The fields of each struct in order. The letters mean: p a pointer, c a vector that may
# be cut, i and u int64 and uint64, f float32, e an enumeration.
STRUCTS = {
    "PackCodes": "p:codes i:size u:base p:words",
    "UnpackCodes": "p:words i:rows i:size u:base p:codes",
    "PackSigns": "c:x i:size p:stream p:words p:nonfinite",
    "PackMomentumSigns": "c:x p:momentum i:size f:beta f:one_minus_beta p:warming_up "
    "p:stream p:new_momentum p:words p:nonfinite",
    "PackTernary": "c:x i:size p:limit p:scale p:row_splits i:num_blocks p:stream "
    "p:words",
    "BlockStatistics": "c:x i:size p:row_splits i:num_blocks i:sums p:scratch "
    "p:statistics",
    "SumCodes": "p:words i:num_workers i:size u:base u:sum_base p:sum",
    "SumLevels": "p:words i:num_workers i:size u:base i:step i:zero p:scale "
    "p:row_splits i:num_blocks c:values p:update",
    "MeanOfSigns": "p:words p:scale i:num_workers i:size p:row_splits i:num_blocks "
    "c:values p:update",
    "FindLevels": "c:x i:size e:rule i:count i:sweeps p:row_splits i:num_blocks "
    "p:scratch p:levels p:nonfinite",
    "PackLevels": "c:x i:size p:levels i:count p:row_splits i:num_blocks p:stream "
    "p:words",
    "MeanOfLevels": "p:words p:levels i:num_workers i:size i:count p:row_splits "
    "i:num_blocks c:values p:update",
    "MajorityVote": "p:words i:num_workers i:size i:base i:reply_base i:quorum "
    "p:stream p:votes",
    "SignErrorFeedback": "c:x p:momentum p:residual i:size f:mu p:ratio p:moving "
    "p:row_splits i:num_blocks p:scratch p:new_momentum p:new_residual p:scale p:words",
    "MeanSignErrorFeedback": "p:sent_words p:sent_scale i:num_workers p:residual "
    "i:size p:ratio p:moving p:row_splits i:num_blocks p:scratch p:new_residual "
    "p:scale p:words",
    "MeanSignSums": "p:sent_words p:sent_scale i:num_workers p:residual i:size p:ratio "
    "p:row_splits i:num_blocks p:scratch p:l1 p:words",
    "PackUnambiguous": "c:x c:moments p:residual p:variance i:size f:alpha f:decay "
    "p:row_splits i:num_blocks p:scratch p:words p:count p:exponents p:new_residual "
    "p:new_variance p:nonfinite",
    "PackOverThreshold": "c:x c:moments p:residual p:variance i:size p:threshold "
    "f:alpha f:decay p:row_splits i:num_blocks p:scratch p:words p:count "
    "p:new_residual p:new_variance p:nonfinite",
    "MeanOfSparse": "p:words i:num_words p:scale i:num_workers i:size p:row_splits "
    "i:num_blocks c:values",
    "FindLargest": "c:x i:size i:count p:indices",
    "ClearElements": "p:x i:size p:indices i:count p:cleared",
    "MeanOfPairs": "p:indices p:values i:num_workers i:num_pairs i:size p:mean",
    "PackLargest": "c:x i:size i:k i:chunk i:bits p:row_splits i:num_blocks p:words "
    "p:levels p:nonfinite",
    "MeanOfLargest": "p:words p:levels i:num_workers i:size i:k i:chunk i:bits "
    "p:row_splits i:num_blocks c:values",
    "MeanSignResidual": "p:sent_words p:sent_scale i:num_workers p:residual i:size "
    "p:ratio p:moving p:words p:scale p:row_splits i:num_blocks p:new_residual",
    "ApplyVector": "c:x i:size p:update",
    "FirstNonfinite": "c:x i:size p:is_finite p:part",
    "AddScaled": "c:x i:size p:y p:factor p:total",
    "RoundToBfloat16": "p:x i:size p:stream p:rounded",
    "MultiplyMatrices": "c:x i:size p:rows p:columns i:num_tensors p:right i:rank "
    "p:products",
    "MultiplyTransposed": "c:x i:size p:rows p:columns i:num_tensors p:left i:rank "
    "p:scratch p:factors",
    "MultiplyFactors": "p:left p:right i:size p:rows p:columns i:num_tensors i:rank "
    "c:values p:update",
    "SubtractFactors": "p:x p:left p:right i:size p:rows p:columns i:num_tensors "
    "i:rank p:difference",
    "MultiplySum": "c:x p:y p:factor p:left p:right i:size p:rows p:columns "
    "i:num_tensors p:query i:rank p:total p:products",
    "Orthonormalize": "p:x i:size p:rows i:num_factors i:rank p:scratch p:basis",
}
