"""Of each wrapper's own arguments a value other than the default, to be saved."""

from tfgradcomp.compressors import ORQ

# fmt: off
SAVED_ARGUMENTS = {
    "TernGrad": dict(clip_factor=None, block_size=100, share_scaler=False),
    "SignSGD": dict(aggregate="vote", tie="random", abstain_below=0.25, quorum=2,
        noise_std=0.5),
    "Signum": dict(
        momentum=0.5, warmup_steps="auto", aggregate="mean", tie="random",
        abstain_below=0.5, quorum=0, noise_std=0.25),
    "DistEFSGD": dict(
        compressor=ORQ(5), weight_decay=0.25, block_size=512, residual_dtype="bfloat16"
    ),
    "DistEFBlockSGD": dict(
        block_size=77, weight_decay=0.125, residual_dtype="bfloat16"
    ),
    "DistEFBlockSGDM": dict(
        residual_dtype="bfloat16",
        momentum=0.75, block_size=12, weight_decay=0.5),
    "HalfPrecision": dict(dtype="float16"),
    "OneBitSGD": dict(reply="requantize"),
    "DGC": dict(
        ratio=0.01, momentum=0.5, clip_norm=3.0, density_steps=7),
    "ChunkedTopK": dict(k=32, chunk=2048, bits=3, decay=0.75, reply="float32"),
    "RandomK": dict(ratio=0.125, error_feedback=False),
    "ORQ": dict(
        levels=17, block_size=None, clip_factor=2.5, refine=2, reply="requantize",
        error_feedback=True, table_dtype="float16"),
    "BinGrad": dict(
        variant="b", block_size=100, clip_factor=1.7, reply="requantize",
        error_feedback=True, table_dtype="bfloat16", lloyd_steps=3),
    "QSGD": dict(
        levels=5, block_size=None, norm="l2", reply="requantize", error_feedback=True),
    "Int8": dict(block_size=None, reply="requantize", error_feedback=True),
    "Int4": dict(block_size=256, reply="requantize", error_feedback=True),
    "LinearQuantization": dict(
        levels=4, block_size=None, reply="requantize", error_feedback=True,
        table_dtype="float16"),
    "NaturalCompression": dict(
        block_size=None, reply="requantize", error_feedback=True),
    "PowerSGD": dict(rank=3, reuse_query=False, alternate=True),
    "ScalarCodebook": dict(
        bits=3, block_size=None, reply="float32", error_feedback=False),
    "ScaledSign": dict(block_size=64, reply="requantize", error_feedback=True),
    "VarianceBased": dict(alpha=1.25, zeta=0.5, microbatches=3, index_coding="delta"),
    "Strom": dict(threshold=0.25, index_coding="delta"),
    "Hybrid": dict(
        threshold=0.25, alpha=1.25, zeta=0.5, microbatches=3, index_coding="delta"),
}
# fmt: on
