"""The studies of local steps on a language model: their settings and tables."""

import math
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgradcomp.compressors import ScaledSign
from tfgradcomp.core import Context, Layout

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples/studies")]
import bible  # noqa: E402
import compare_methods  # noqa: E402
import language_rows  # noqa: E402
import local_causes  # noqa: E402
import local_language  # noqa: E402
import outers  # noqa: E402
import study  # noqa: E402
from language_rows import BASELINE, Row  # noqa: E402


def test_rows_differ_and_make_optimizers():
    rows = [row for rows in language_rows.grid().values() for row in rows]
    assert len(set(rows)) == len(rows)
    for row in rows:
        assert language_rows.STEPS % row.every == 0
        assert language_rows.PART % row.every == 0
        optimizer = local_language.make_optimizer(row)
        if row.exchange == language_rows.ZERO_ONE:
            assert optimizer.local_steps == row.every
        else:
            assert getattr(optimizer, "every", 1) == row.every


def test_bytes_of_zero_one_adam_count_warm_up_and_growing_rounds():
    row = Row(language_rows.ZERO_ONE, 4, steps=100)
    optimizer = local_language.make_optimizer(row)
    weights = keras.Variable(np.zeros([3000], "float32"))
    optimizer.build([weights])
    # 5 steps of float32, 5 rounds of 1 step, 3 of up to 2, and 85 steps in rounds of 4.
    message = 4 * optimizer.traffic.bytes_sent
    floats = 5 * study.ring_bytes(local_language.WORKERS, 3000)
    expected = (floats + (5 + 3 + 21) * message) / 100
    assert local_language.bytes_of(row, optimizer, 3000) == pytest.approx(expected)


def test_changes_of_one_bit_make_optimizers():
    for way in local_causes.ways(702):
        assert local_causes.make_optimizer(way, 702).built is False
    # 234 steps in an epoch: 14 exchanges after 16 steps, and one at the end.
    assert local_causes.exchanges_of(702) == 45


@pytest.mark.parametrize(
    "name", ["grid", "causes", "images", "inner", "longer", "drift", "rates"]
)
def test_the_page_has_a_place_for_each_table(name):
    text = (ROOT / "docs" / local_language.PAGE).read_text()
    changed = compare_methods.replace_table(text, "a table", name)
    assert f"<!-- {name}: begin -->\na table\n" in changed


def test_exact_steps_send_the_vector_and_others_its_signs():
    x = np.float32([1.0, -3.0, 2.0, 2.0])
    decoded = outers.Decoded(ScaledSign(), exact_before=1, exact_after=3)
    layout = Layout((0, 4))
    sent = []
    for step in range(4):
        context = Context.at_rate_one(step)
        payload, _, _ = decoded.compress(tf.constant(x), (), layout, context)
        sent.append(decoded.decompress(payload, layout).numpy().tolist())
    signs = [2.0, -2.0, 2.0, 2.0]
    assert sent == [x.tolist(), signs, signs, x.tolist()]


def test_the_bible_is_divided_at_hebrews(monkeypatch):
    verses = "Phmn1:25 Amen.\nHeb1:1 God, who\nRev22:21 end"
    monkeypatch.setattr(bible, "text", lambda: verses)
    first, last, alphabet = bible.characters.__wrapped__()
    assert "".join(alphabet[i] for i in first) == "Amen."
    assert "".join(alphabet[i] for i in last) == "God, who\nend"


def row(setting, seed, loss, size=1.0):
    """A row of the file."""
    return {**setting._asdict(), "seed": seed, "loss": loss, "bytes": size}


def test_table_compares_seed_by_seed_and_names_what_diverged():
    rows = [row(Row("float32", 1), 0, 2.0, 4000.0), row(BASELINE, 0, 2.0, 2000.0)]
    rows += [row(BASELINE, 1, 2.0, 2000.0), row(Row("1 bit", 16), 1, 2.1, 10.0)]
    rows += [row(Row("1 bit", 16, "behind"), 0, math.nan, 10.0)]
    found = language_rows.Rows(rows)
    settings = [Row("1 bit", 16), Row("1 bit", 16, "behind"), Row("4 bits", 16)]
    lines = found.table(settings).splitlines()[2:]
    assert lines == [
        "| Adam | 16 | 1 bit |  | 2.1000 | +5.00 | +5.00 | 1 | 10 | 400 |",
        "| Adam | 16 | 1 bit | behind | diverged |  |  | 0 | 10 | 400 |",
    ]


def test_the_figure_shows_what_there_is(tmp_path, monkeypatch):
    (tmp_path / "docs/studies").mkdir(parents=True)
    monkeypatch.setattr(study, "ROOT", tmp_path)
    rows = [row(BASELINE, 0, 2.0, 2000.0), row(Row("1 bit", 16), 0, 2.1, 10.0)]
    rows += [row(Row("1 bit", 16, "behind"), 0, math.nan, 10.0)]
    language_rows.Rows(rows).draw()
    drawn = (tmp_path / "docs/studies/local-language.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
