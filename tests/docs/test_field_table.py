"""The table of the field: every name has a row, and the code of a row runs."""

import re
from pathlib import Path

import keras
import pytest

import tfgradcomp
from tfgradcomp.methods import Method

PAGE = Path(__file__).resolve().parents[2] / "docs/methods/field.md"
NOT_HERE = "not here"
NAMES = {
    "GRACE": """none, adapsparse, adaq, dgc, efsignsgd, fp16, inceptionn, natural,
        onebit, powersgd, qsgd, randomk, signsgd, signum, sketch, terngrad, threshold,
        topk, u8bit""",
    "PyTorch": """fp16_compress_hook, bf16_compress_hook, powerSGD_hook,
        batched_powerSGD_hook, quantization_pertensor_hook,
        quantization_perchannel_hook, post_localSGD_hook""",
    "DeepSpeed": """OneBitAdam, ZeroOneAdam, OneBitLamb, ZeRO++ INT4 gradients,
        ZeRO++ INT8 gradients, ZeRO++ INT8 weights""",
    "torchft": "fp8, int8, LocalSGD, DiLoCo",
    "CGX": "1 bit, 2 to 8 bits, bits by layer",
    "Papers": "SparseLoCo, DeMo",
}
SCOPE = {
    **{name: getattr(tfgradcomp, name) for name in tfgradcomp.__all__},
    "SGD": keras.optimizers.SGD,
    "Adam": keras.optimizers.Adam,
    "Lamb": keras.optimizers.Lamb,
    "methods": tfgradcomp.methods,
}
ROW = re.compile(r"^\| (.+?) \| (.+?) \| ?(.*?) ?\|$", re.M)


def tables():
    """The rows of each section, their names without signs."""
    sections = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.M)[1:]
    return {
        title: [
            (re.sub("[`,]", "", name), code, remark)
            for name, code, remark in ROW.findall(text)
            if name != "there"
        ]
        for title, text in zip(sections[::2], sections[1::2], strict=True)
    }


ROWS = [(title, *row) for title, rows in tables().items() for row in rows]


def test_every_name_has_a_row():
    listed = {title: re.split(r",\s+", names) for title, names in NAMES.items()}
    assert {title: [r[0] for r in rows] for title, rows in tables().items()} == listed


@pytest.mark.parametrize(
    ("library", "name", "code", "remark"), ROWS, ids=[f"{r[0]}-{r[1]}" for r in ROWS]
)
def test_code_makes_an_optimizer_or_a_remark_says_why_not(library, name, code, remark):
    if code == NOT_HERE:
        assert remark
        return
    assert code[0] == code[-1] == "`"
    made = eval(code.strip("`"), dict(SCOPE))
    assert isinstance(made, (keras.optimizers.Optimizer, Method))
