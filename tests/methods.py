"""One table of methods: what each is made of, and what it promises.

A new method is a row here. The batteries of tests run over these rows and take each
row's requirements from it; `test_methods_are_complete.py` checks that none is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import keras

import tfgradcomp
from tests import reference
from tests.promises import (
    clipped,
    clipped_to,
    damped,
    ends,
    even,
    in_float16,
    kept_by_a_fit,
    kept_by_a_tenth,
    kept_by_chunks,
    kept_by_levels,
    kept_by_means,
    kept_by_signs,
    kept_by_two_means,
    nesterov,
    optimal,
    quantiles,
    saturated,
)
from tfgradcomp.compressors import (
    DGC,
    ORQ,
    QSGD,
    AlternatingLowRank,
    BinGrad,
    ChunkedTopK,
    Clip,
    ColumnMeans,
    ErrorFeedback,
    Hybrid,
    Identity,
    LinearQuantization,
    LowRank,
    MeanErrorFeedback,
    Momentum,
    NaturalCompression,
    NesterovMomentum,
    OptimalScale,
    RandomK,
    ScalarCodebook,
    ScaledSign,
    Sign,
    Strom,
    Ternary,
    TopK,
    VarianceBased,
    WeightDecay,
)
from tfgradcomp.core import Layout
from tfgradcomp.methods import Method
from tfgradcomp.servers import (
    CodeSum,
    FactorMean,
    MajorityVote,
    Mean,
    MeanOfSigns,
    Recompress,
    Requantize,
    SignOfMean,
)

GATHER = ("all_gather",)
SHARDS = ("all_gather", "sharded")
ADDED = ("all_gather", "all_reduce")
SUMS = ("all_gather", "all_reduce", "sharded")


# A matrix and a vector.
LAYOUT = Layout.from_shapes([(8, 16), (8,)])


class Row(NamedTuple):
    """A method, the wrapper that builds it, and what tests may expect of it.

    Attributes:
        name: Name of the row: the wrapper's class, then what is particular.
        arguments: The wrapper's arguments besides the inner optimizer.
        method: The method that the wrapper builds with these arguments.
        kind: What a payload keeps of the input: `"exact"`; `"rounded"` to `digits`
            bits; `"unbiased"`; `"contracting"`; `"sign"`; `"sign or zero"`; `"late"`:
            some elements now and the others later; `"low rank"`: factors of matrices;
            `"drawn"`: elements that all workers draw, multiplied.
        target: Function from the input of a first step and its row splits to what the
            payload stands for (the clipped input, the momentum, ...).
        kept: Of a contracting row, function from the target and its row splits to the
            squared length that is kept at least.
        levels: Of an unbiased row, function from a block to the levels that it is
            rounded to.
        digits: Significant bits of the values.
        largest: Largest magnitude for which everything stays finite.
        is_random: Whether random numbers are drawn.
        transports: Names of the transports that carry the method, given blocks of one
            size.
        state: Names of the vectors that each worker keeps, outermost first.
        server_state: Names of the vectors that the server keeps.
        needs_second_moments: Whether a step needs second moments.
        variable_length: Whether the length of messages differs from step to step.
        holds_momentum: Whether an inner optimizer with momentum is refused.
        learning_rate: A rate of SGD at which a small model learns.
        in_training: The wrapper's arguments, other than the row's, with which a small
            model learns at once: thresholds below most of its gradients.
    """

    name: str
    arguments: dict[str, Any]
    method: Method
    kind: str
    target: Callable = lambda x, splits: x
    kept: Callable | None = None
    levels: Callable = even(3)
    digits: int = 24
    largest: float = 1e30
    is_random: bool = False
    transports: tuple[str, ...] = SHARDS
    state: tuple[str, ...] = ()
    server_state: tuple[str, ...] = ()
    needs_second_moments: bool = False
    variable_length: bool = False
    holds_momentum: bool = False
    learning_rate: float = 0.01
    in_training: dict[str, Any] = {}

    @property
    def wrapper(self) -> str:
        """The name of the wrapper's class in `tfgradcomp`."""
        return self.name.partition(",")[0]

    @property
    def compressor(self):
        """The worker's half."""
        return self.method.compressor

    @property
    def server(self):
        """The server's half."""
        return self.method.server

    @property
    def adds_numbers(self) -> bool:
        """Whether an all-reduce adds numbers, in an order of its own."""
        fields = self.compressor.fields(LAYOUT).values()
        return "all_reduce" in self.transports and all(f.base is None for f in fields)

    @property
    def classes(self) -> tuple:
        """The classes of both halves, each before those that it wraps."""
        halves = self.compressor, self.server
        return tuple(type(part) for half in halves for part in parts_of(half))

    @property
    def needs(self) -> tuple:
        """The states, the rounds and the decay that an optimizer handles for it.

        Methods with equal needs differ in their mathematics alone, which the tests of
        compressors, servers and transports see in every row.
        """
        return (
            self.state,
            self.server_state,
            self.needs_second_moments,
            self.variable_length,
            bool(self.compressor.first_round(LAYOUT)),
            self.compressor.hears_reply,
            self.method.weight_decay is not None,
        )

    @property
    def wire_kinds(self) -> tuple:
        """The server's class and state, and the kinds of fields, that transports cut.

        A transport carries methods with equal kinds in the same way.
        """
        fields = [
            *self.compressor.fields(LAYOUT).values(),
            *self.server.reply_fields(LAYOUT, 3).values(),
        ]
        kinds = [(field.per, field.base is None) for field in fields]
        has_round = bool(self.compressor.first_round(LAYOUT))
        lengths = self.variable_length, has_round
        return (type(self.server), self.server_state, *kinds, *lengths)

    @property
    def message_kinds(self) -> tuple:
        """The kinds of messages, and the needs: what buckets cut and join."""
        return (*self.wire_kinds, *self.needs)

    def takes(self, argument: str) -> bool:
        """Returns whether the wrapper has an argument of this name."""
        return argument in getattr(tfgradcomp, self.wrapper).argument_names

    def make(self, inner_optimizer, **arguments) -> tfgradcomp.CompressedOptimizer:
        """Returns the row's wrapper around an inner optimizer.

        Args:
            inner_optimizer: A Keras optimizer.
            **arguments: Arguments that all wrappers have, or others than the row's.
        """
        wrapper = getattr(tfgradcomp, self.wrapper)
        return wrapper(inner_optimizer, **{**self.arguments, **arguments})

    def make_to_train(self, factor=1.0, **arguments):
        """Returns the wrapper around SGD with which a small model learns.

        Args:
            factor: Of the learning rate.
            **arguments: As for `make`.
        """
        sgd = keras.optimizers.SGD(factor * self.learning_rate)
        return self.make(sgd, **{**self.in_training, **arguments})


def row(name, arguments, compressor, server, weight_decay=None, **requirements) -> Row:
    """Returns the row of a wrapper; its name begins with the wrapper's."""
    method = Method(compressor, server, weight_decay)
    return Row(name, arguments, method, **requirements)


def composed(name, compressor, server, **requirements) -> Row:
    """Returns the row of a method that has no wrapper of its own."""
    arguments = {"compressor": compressor, "server": server}
    name = f"CompressedOptimizer, {name}"
    return row(name, arguments, compressor, server, **requirements)


UNBIASED = {"kind": "unbiased", "is_random": True}
# A sign is a step of full length.
SIGN = {
    "kind": "sign",
    "is_random": True,
    "transports": SUMS,
    "learning_rate": 1e-3,
}
MEAN_SIGN = {"kind": "contracting", "kept": kept_by_signs}
TWO_SIDES = {"kind": "contracting", "kept": kept_by_means}
MEANS = {"kind": "contracting", "kept": kept_by_two_means, "transports": GATHER}
FITTED = {"kind": "contracting", "kept": kept_by_a_fit, "is_random": True}
TOP = {"kind": "contracting", "kept": kept_by_a_tenth, "transports": GATHER}
TWO_WAY = {"state": ("residual",), "server_state": ("residual",)}
EXACT = {"kind": "exact", "transports": SUMS}
LATE = {"kind": "late", "transports": GATHER, "variable_length": True}
# A second moment overflows long before its gradient does.
UNAMBIGUOUS = {
    **LATE,
    "largest": 1e15,
    "state": ("residual", "variance"),
    "needs_second_moments": True,
}
LOW_RANK = {
    "kind": "low rank",
    "is_random": True,
    "transports": ADDED,
    "state": ("residual", "update"),
}
LOW_THRESHOLD = {"learning_rate": 0.05, "in_training": {"threshold": 0.01}}
# fmt: off
_TABLE = [
    # TernGrad.
    row("TernGrad", {}, Clip(Ternary(), 2.5), CodeSum(Ternary()),
        **UNBIASED, target=clipped(2.5), transports=SUMS),
    row("TernGrad, not clipped", {"clip_factor": None}, Ternary(), CodeSum(Ternary()),
        **UNBIASED, transports=SUMS),
    row("TernGrad, own scales", {"clip_factor": None, "share_scaler": False},
        Ternary(False), Mean(Ternary(False)), **UNBIASED),
    # Signs.
    row("SignSGD", {}, Sign(), MajorityVote(), **SIGN),
    row("SignSGD, random ties", {"tie": "random"}, Sign(), MajorityVote("random"),
        **SIGN),
    row("SignSGD, abstention", {"abstain_below": 0.5, "quorum": 1},
        Sign(0.5), MajorityVote("zero", 1, Sign(0.5)),
        **{**SIGN, "kind": "sign or zero"}),
    row("Signum", {}, Momentum(Sign(), 0.9), MajorityVote(),
        **SIGN, target=damped(0.9), state=("momentum",), holds_momentum=True),
    row("Signum, warm-up", {"warmup_steps": "auto"},
        Momentum(Sign(), 0.9, 54), MajorityVote(),
        **SIGN, state=("momentum",), holds_momentum=True),
    row("Signum, mean of signs", {"aggregate": "mean"},
        Momentum(Sign(), 0.9), CodeSum(Sign()),
        **SIGN, target=damped(0.9), state=("momentum",), holds_momentum=True),
    # Two-way error feedback.
    row("DistEFSGD", {}, ErrorFeedback(ScaledSign()), Recompress(ScaledSign()),
        **MEAN_SIGN, **TWO_WAY),
    row("DistEFSGD, top-k", {"compressor": TopK(0.1)},
        ErrorFeedback(TopK(0.1)), Recompress(TopK(0.1)), **TOP, **TWO_WAY),
    row("DistEFSGD, identity", {"compressor": "identity"},
        ErrorFeedback(Identity()), Recompress(Identity()), kind="exact", **TWO_WAY),
    row("DistEFSGD, ORQ-9", {"compressor": "orq"},
        ErrorFeedback(OptimalScale(ORQ(9))), Recompress(OptimalScale(ORQ(9))),
        **FITTED, **TWO_WAY),
    row("DistEFSGD, ternary", {"compressor": "ternary", "block_size": 64},
        ErrorFeedback(OptimalScale(Ternary())), Recompress(OptimalScale(Ternary())),
        **FITTED, **TWO_WAY),
    row("DistEFBlockSGD", {"weight_decay": 0.01},
        ErrorFeedback(ScaledSign()), Recompress(ScaledSign()), WeightDecay(0.01),
        **MEAN_SIGN, **TWO_WAY),
    row("DistEFBlockSGDM", {"weight_decay": 0.01},
        NesterovMomentum(ErrorFeedback(ScaledSign()), 0.9), Recompress(ScaledSign()),
        WeightDecay(0.01, 0.9), **MEAN_SIGN, target=nesterov(0.9),
        state=("momentum", "residual"), server_state=("residual",),
        holds_momentum=True),
    row("OneBitSGD", {}, ErrorFeedback(ColumnMeans()), Mean(ColumnMeans()),
        **MEANS, state=("residual",)),
    row("OneBitSGD, requantized", {"reply": "requantize"},
        ErrorFeedback(ColumnMeans()), Recompress(ColumnMeans()), **MEANS, **TWO_WAY),
    # Momentum that is sent in part.
    row("DGC", {"ratio": 0.25}, DGC(0.25), Mean(DGC(0.25)),
        **TOP, state=("momentum", "residual"), holds_momentum=True),
    row("DGC, ramp", {"ratio": 0.1, "clip_norm": 2.0, "density_steps": 10},
        DGC(0.1, 0.9, 2.0, 10), Mean(DGC(0.1, 0.9, 2.0, 10)),
        **TOP, target=clipped_to(2.0), state=("momentum", "residual"),
        variable_length=True, holds_momentum=True),
    # The largest of chunks.
    row("ChunkedTopK", {"k": 256, "chunk": 2048},
        ErrorFeedback(ChunkedTopK(256, 2048), decay=0.95),
        Recompress(ChunkedTopK(256, 2048), decay=0.95),
        kind="contracting", kept=kept_by_chunks(256, 2048), **TWO_WAY),
    row("ChunkedTopK, means",
        {"k": 256, "chunk": 2048, "bits": 3, "decay": 1.0, "reply": "float32"},
        ErrorFeedback(ChunkedTopK(256, 2048, 3)), Mean(ChunkedTopK(256, 2048, 3)),
        kind="contracting", kept=kept_by_chunks(256, 2048), state=("residual",)),
    # Elements that all workers draw.
    row("RandomK", {"ratio": 0.25}, ErrorFeedback(RandomK(0.25)), Mean(RandomK(0.25)),
        **FITTED, transports=ADDED, state=("residual",)),
    row("RandomK, unbiased", {"ratio": 0.3, "error_feedback": False},
        RandomK(0.3, True), Mean(RandomK(0.3, True)),
        kind="drawn", is_random=True, transports=ADDED),
    # Quantizers.
    row("ORQ, 3 levels", {"levels": 3}, ORQ(3), Mean(ORQ(3)),
        **UNBIASED, levels=optimal(3)),
    row("ORQ, clipped", {"levels": 5, "clip_factor": 1.5},
        Clip(ORQ(5), 1.5), Mean(ORQ(5)),
        **UNBIASED, target=clipped(1.5), levels=optimal(5)),
    row("ORQ, requantized",
        {"levels": 9, "refine": 2, "table_dtype": "float16", "reply": "requantize"},
        ORQ(9, 2, "float16"), Requantize(ORQ(9, 2, "float16")),
        **UNBIASED, levels=in_float16(optimal(9, 2)), largest=6e4),
    row("ORQ, two-way error feedback",
        {"levels": 17, "reply": "requantize", "error_feedback": True},
        ErrorFeedback(OptimalScale(ORQ(17))), Recompress(OptimalScale(ORQ(17))),
        **FITTED, **TWO_WAY),
    row("BinGrad", {}, BinGrad(), Mean(BinGrad()), **TWO_SIDES),
    row("BinGrad, Lloyd", {"lloyd_steps": 2, "block_size": 64},
        BinGrad("b", "float32", 2), Mean(BinGrad("b", "float32", 2)), **TWO_SIDES),
    row("BinGrad, bfloat16", {"table_dtype": "bfloat16", "reply": "requantize"},
        BinGrad("b", "bfloat16"), Requantize(BinGrad("b", "bfloat16")),
        kind="contracting", kept=lambda v, splits: 0.99 * kept_by_means(v, splits)),
    row("BinGrad, error feedback", {"error_feedback": True},
        ErrorFeedback(BinGrad()), Mean(BinGrad()), **TWO_SIDES, state=("residual",)),
    row("BinGrad, pb", {"variant": "pb", "reply": "requantize"},
        BinGrad("pb"), Requantize(BinGrad("pb")),
        **UNBIASED, target=saturated, levels=ends),
    row("QSGD", {"levels": 5}, QSGD(5), Mean(QSGD(5)), **UNBIASED, levels=even(5)),
    row("QSGD, l2", {"norm": "l2", "reply": "requantize"},
        QSGD(9, "l2"), Requantize(QSGD(9, "l2")), **UNBIASED, levels=even(9, "l2")),
    row("QSGD, shared norms", {"levels": 5, "reply": "shared"},
        QSGD(5, share_norm=True), CodeSum(QSGD(5, share_norm=True)),
        **UNBIASED, levels=even(5), transports=SUMS),
    row("Int8", {}, QSGD(255), Mean(QSGD(255)), **UNBIASED, levels=even(255)),
    row("Int4", {"reply": "requantize"}, QSGD(15), Requantize(QSGD(15)),
        **UNBIASED, levels=even(15)),
    row("LinearQuantization", {"levels": 7},
        LinearQuantization(7), Mean(LinearQuantization(7)),
        **UNBIASED, levels=quantiles(7)),
    row("NaturalCompression", {}, NaturalCompression(), Mean(NaturalCompression()),
        **UNBIASED, levels=reference.powers_of_two),
    row("ScaledSign", {}, ScaledSign(), Mean(ScaledSign()), **MEAN_SIGN),
    row("ScalarCodebook", {},
        ErrorFeedback(ScalarCodebook(2)), Recompress(ScalarCodebook(2)),
        kind="contracting", kept=kept_by_levels(2), **TWO_WAY),
    row("ScalarCodebook, 3 bits",
        {"bits": 3, "reply": "float32", "error_feedback": False},
        ScalarCodebook(3), Mean(ScalarCodebook(3)),
        kind="contracting", kept=kept_by_levels(3)),
    # Factors of matrices.
    row("PowerSGD", {"rank": 1}, MeanErrorFeedback(LowRank(1)), FactorMean(LowRank(1)),
        **LOW_RANK, server_state=("right",)),
    row("PowerSGD, drawn factors", {"rank": 2, "reuse_query": False},
        MeanErrorFeedback(LowRank(2)), Mean(LowRank(2)), **LOW_RANK),
    row("PowerSGD, one factor a step", {"rank": 1, "alternate": True},
        MeanErrorFeedback(AlternatingLowRank(1)), FactorMean(AlternatingLowRank(1)),
        **LOW_RANK, server_state=("left", "right", "turns")),
    # Some elements now, the others later.
    row("VarianceBased", {}, VarianceBased(), Mean(VarianceBased()), **UNAMBIGUOUS),
    row("VarianceBased, gaps", {"alpha": 1.1, "zeta": 0.9, "index_coding": "delta"},
        VarianceBased(1.1, 0.9, "delta"), Mean(VarianceBased(1.1, 0.9, "delta")),
        **UNAMBIGUOUS),
    row("Strom", {"threshold": 0.5}, Strom(0.5), Mean(Strom(0.5)),
        **LATE, state=("residual",), **LOW_THRESHOLD),
    row("Strom, auto", {"threshold": "auto", "index_coding": "delta"},
        Strom("auto", "delta"), Mean(Strom("auto", "delta")),
        **LATE, state=("residual",), learning_rate=0.05),
    row("Hybrid, gaps", {"threshold": 0.5, "index_coding": "delta"},
        Hybrid(0.5, index_coding="delta"), Mean(Hybrid(0.5, index_coding="delta")),
        **UNAMBIGUOUS, **LOW_THRESHOLD),
    # Numbers.
    row("HalfPrecision", {}, Identity("bfloat16"), Mean(Identity("bfloat16")),
        kind="rounded", digits=8, transports=SUMS),
    row("HalfPrecision, float16", {"dtype": "float16"},
        Identity("float16"), Mean(Identity("float16")),
        kind="rounded", digits=11, largest=6e4, transports=SUMS),
    composed("float32", Identity(), Mean(), **EXACT),
    composed("sign of the mean", Identity(), SignOfMean(), **EXACT),
    composed("mean of signs", Identity(), MeanOfSigns(), kind="exact"),
    composed("clip", Clip(Identity(), 1.5), Mean(),
             **EXACT, target=clipped(1.5), digits=22),
    composed("top-k", TopK(0.1), Mean(TopK(0.1)), **TOP),
    composed("all of top-k", TopK(1.0), Mean(TopK(1.0)),
             kind="exact", transports=GATHER),
    composed("ternary, error feedback",
             ErrorFeedback(Ternary(False)), Mean(Ternary(False)),
             **UNBIASED, state=("residual",)),
    composed("Nesterov", NesterovMomentum(ErrorFeedback(Identity()), 0.5), Mean(),
             **EXACT, target=nesterov(0.5), state=("momentum", "residual")),
]
# fmt: on
ROWS = {one.name: one for one in _TABLE}


def halves_of(method: Method) -> Method:
    """Returns a method without the blocks and groups, which a row does not state."""
    return replace(method, block_size=None, microbatches=None)


def parts_of(component) -> list:
    """Returns a component and all that it wraps, outermost first."""
    inner = getattr(component, "compressor", None)
    return [component, *(parts_of(inner) if inner is not None else [])]
