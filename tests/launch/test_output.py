"""Output of the workers, as the launcher shows it."""

import re

import pytest

from tests.launch.processes import SLEEPER, alive, pids, run
from tfgradcomp.launch.output import LONGEST_LINE, LineCutter

pytestmark = pytest.mark.timeout(120)


def test_every_line_has_a_prefix_and_is_whole(script):
    path = script("""
        for i in range(200):
            print("out", "x" * i, end=""); print("", i)
            print("err", "y" * i, i, file=sys.stderr)
        print("unfinished", end="")
    """)
    done = run("--workers", "3", "--network", "host", path)
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    assert len(out) == 3 * 201 and len(err) == 3 * 200
    assert all(re.fullmatch(r"\[\d\] (out x* \d+|unfinished)", line) for line in out)
    assert all(re.fullmatch(r"\[\d\] err y* \d+", line) for line in err)


def test_output_comes_without_buffering(script, launch):
    process = launch("--workers", "1", script(SLEEPER))
    assert alive(pids(process, 1)[0])


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    "data, lines",
    [
        (b"a\nb\n\nc", [b"a", b"b", b"", b"c"]),
        (b"a\r\n\r\nb\r\n", [b"a", b"", b"b"]),
        (b"\r1/2\r2/2\nend\n", [b"1/2", b"2/2", b"end"]),
        # Keras goes back over the old text, then writes the new text.
        (b"\r1/2 ..\x08\x08\x08\x08\x08\x08\r2/2 --\n", [b"1/2 ..", b"2/2 --"]),
        (b"ab\x08\x08\x08   \x08\x08\x08cd\x08\x08\n", [b"ab", b"cd"]),
    ],
)
def test_lines_are_cut_at_their_ends(data, lines, size):
    cutter, got = LineCutter(), []
    for start in range(0, len(data), size):
        got += cutter.feed(data[start : start + size])
    assert got + cutter.close() == lines


def test_a_line_without_an_end_is_cut():
    cutter = LineCutter()
    assert cutter.feed(b"x" * (LONGEST_LINE - 1)) == []
    assert cutter.feed(b"x") == [b"x" * LONGEST_LINE]
    assert cutter.feed(b"y\n") == [b"y"]
