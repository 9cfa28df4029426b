"""The least time of a step, and the operations that it is made of."""

import pytest

from tests.benchmarks.scripts import FOLDER, import_script

floor = import_script("floor")


def test_the_largest_part_is_the_floor():
    # One element of the triad is two reads and a write.
    seconds = dict.fromkeys(floor.loops(["DistEFBlockSGDM"]), 0.0)
    seconds["triad"] = 3e-9
    size = {"elements": 10**6, "workers": 4, "received": 4e5}
    parts = floor.floor("DistEFBlockSGDM", **size, rate=1e9, seconds=seconds)
    # Gradient 1, momentum 2, residual 2, weights 2, the server's residual 2 / 4, and
    # 100,000 words that arrive.
    assert parts["memory_ms"] == pytest.approx(7.5 + 0.1)
    assert parts["wire_ms"] == pytest.approx(8 * 4e5 / 1e9 * 1e3)
    assert parts["floor_ms"] == parts["memory_ms"]
    slow = floor.floor("DistEFBlockSGDM", **size, rate=1e8, seconds=seconds)
    assert slow["floor_ms"] == slow["wire_ms"] == pytest.approx(32)
    # Of four payloads, each for a quarter of the vector.
    seconds["server's error feedback of 4 payloads"] = 40e-9
    busy = floor.floor("DistEFBlockSGDM", **size, rate=None, seconds=seconds)
    assert busy["floor_ms"] == busy["arithmetic_ms"] == pytest.approx(10)
    assert busy["wire_ms"] == 0
    assert floor.floor("Strom", **size, rate=None, seconds=seconds) == {}


def test_all_operations_are_rows():
    op_rows = import_script("op_rows")
    rows = {row.name for row in op_rows.make_rows(2**10)}
    assert rows > {*floor.loops([*floor.NEEDS])} - {floor.TRIAD}


def test_the_readme_has_the_table():
    text = (FOLDER / "README.md").read_text()
    lines = ["<!-- floor: begin -->", *floor.table(), "<!-- floor: end -->"]
    assert "\n".join(lines) in text
