"""Draws architecture.svg: the layers as rows, and a step as a walk through them.

python docs/architecture.py
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

# From the top: a layer imports only from those below it.
LAYERS = (
    ("flower", "the same rounds over Flower's messages"),
    ("federated", "rounds over the internet: hub and clients"),
    ("launch · callbacks · checkpoint · planning · testing", "around the training"),
    ("parameter_server", "queues, rounds, lost workers"),
    ("optimizers", "the Keras face, wrappers, local steps"),
    ("fit", "loops, statistics, preemption, run state, seeds"),
    ("engine", "plan, buckets, step, state"),
    ("assignment", "which variable travels by which method"),
    ("per_example", "second moments of the examples' gradients"),
    ("transports", "where the server is: routes and messages"),
    ("collectives", "moving vectors between replicas"),
    ("methods", "a paper a file: a function that returns a method"),
    ("servers", "the server's half of a method"),
    ("compressors", "the worker's half of a method"),
    ("ops", "packing, voting, rounding: native and reference"),
    ("compat", "adapters: private names of Keras and TensorFlow"),
    ("core · certificates", "fields, layouts, components; files for TLS"),
)


class Stop(NamedTuple):
    """A stop of the walk.

    Attributes:
        layer: Name of the layer that its file belongs to.
        label: A few words, in lines.
        side: Where the label stands: `"above"`, `"below"`, `"left"` or `"right"`.
    """

    layer: str
    label: tuple[str, ...]
    side: str = "above"


STOPS = (
    Stop("optimizers", ("apply",)),
    Stop("engine", ("unscale, clip",), "below"),
    Stop("engine", ("context",)),
    Stop("engine", ("flatten",)),
    Stop("transports", ("first round,", "if any"), "left"),
    Stop("compressors", ("compress",), "right"),
    Stop("engine", ("flag",)),
    Stop("transports", ("push",), "right"),
    Stop("collectives", ("words out,", "words in"), "left"),
    Stop("transports", ("pull",)),
    Stop("servers", ("combine,", "decode"), "right"),
    Stop("engine", ("weight decay",)),
    Stop("engine", ("split, commit",), "below"),
    Stop("engine", ("inner optimizer",)),
)
# The stops that call the operations.
COMPUTING = (6, 11)
WIRE = 9

WIDTH, ROW, GAP, MARGIN, TOP = 1240, 62, 6, 20, 64
NAMES = 330  # Width of the column with the layers' names.
RADIUS = 13
INK, GREY, PALE, LINE, ACCENT = "#1b1f24", "#57606a", "#f3f5f8", "#c9d1d9", "#0b5cad"

# The anchor of a label, and where it stands from the middle of its stop.
SIDES = {
    "above": ("middle", 0, -RADIUS - 6),
    "below": ("middle", 0, RADIUS + 14),
    "left": ("end", -RADIUS - 6, 4),
    "right": ("start", RADIUS + 6, 4),
}


def row_of(layer: str) -> int:
    """Returns the index of the row of a layer."""
    return [name for name, _ in LAYERS].index(layer)


def middle(row: int) -> float:
    """Returns the height of the middle of a row."""
    return TOP + row * (ROW + GAP) + ROW / 2


def place(number: int) -> tuple[float, float]:
    """Returns the coordinates of a stop, counted from 1."""
    first, last = MARGIN + NAMES + 40, WIDTH - MARGIN - 45
    x = first + (number - 1) * (last - first) / (len(STOPS) - 1)
    return x, middle(row_of(STOPS[number - 1].layer))


def text(x: float, y: float, words: str, size: int = 14, **attributes: str) -> str:
    """Returns a line of text; `anchor`, `fill` and `weight` may be given."""
    anchor = attributes.get("anchor", "start")
    fill = attributes.get("fill", INK)
    weight = attributes.get("weight", "normal")
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
    )


def layers() -> list[str]:
    """Returns the rows."""
    parts = []
    for row, (name, words) in enumerate(LAYERS):
        top = middle(row) - ROW / 2
        parts += [
            f'<rect x="{MARGIN}" y="{top:.0f}" width="{WIDTH - 2 * MARGIN}" '
            f'height="{ROW}" rx="6" fill="{PALE}" stroke="{LINE}"/>',
            text(MARGIN + 14, top + 27, name, 15, weight="bold"),
            text(MARGIN + 14, top + 46, words, 14, fill=GREY),
        ]
    return parts


def wire() -> list[str]:
    """Returns the line that the words cross."""
    x, _ = place(WIRE)
    bottom = middle(len(LAYERS) - 1) + ROW / 2
    return [
        f'<line x1="{x:.0f}" y1="{TOP - 4}" x2="{x:.0f}" y2="{bottom:.0f}" '
        f'stroke="{GREY}" stroke-width="1.5" stroke-dasharray="3 5"/>',
        text(x, TOP - 12, "the network", 15, anchor="middle", fill=GREY),
    ]


def arrow(begin: tuple[float, float], end: tuple[float, float], dashed: bool) -> str:
    """Returns an arrow between the rims of two circles."""
    (x1, y1), (x2, y2) = begin, end
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    dx, dy = (x2 - x1) / length * (RADIUS + 2), (y2 - y1) / length * (RADIUS + 2)
    style = (
        'stroke-dasharray="4 3" stroke-width="1.3"' if dashed else 'stroke-width="2"'
    )
    tip = 0.0 if dashed else 1.0
    return (
        f'<line x1="{x1 + dx:.1f}" y1="{y1 + dy:.1f}" x2="{x2 - tip * dx:.1f}" '
        f'y2="{y2 - tip * dy:.1f}" stroke="{ACCENT}" {style} marker-end="url(#tip)"/>'
    )


def walk() -> list[str]:
    """Returns the stops, with the arrows between them."""
    numbers = range(1, len(STOPS) + 1)
    parts = [arrow(place(n), place(n + 1), dashed=False) for n in numbers[:-1]]
    for number in COMPUTING:
        x, y = place(number)
        parts.append(arrow((x, y), (x, middle(row_of("ops")) - 16), dashed=True))
        parts.append(
            text(x, middle(row_of("ops")), "kernels", 14, anchor="middle", fill=ACCENT)
        )
    for number, stop in zip(numbers, STOPS, strict=True):
        x, y = place(number)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{ACCENT}"/>'
        )
        parts.append(
            text(
                x, y + 4, str(number), 14, anchor="middle", fill="white", weight="bold"
            )
        )
        anchor, dx, dy = SIDES[stop.side]
        for line, words in enumerate(stop.label):
            height = y + dy + 13 * (line - (len(stop.label) - 1) / 2)
            parts.append(text(x + dx, height, words, 14, anchor=anchor))
    return parts


def picture() -> str:
    """Returns the picture as SVG."""
    height = middle(len(LAYERS) - 1) + ROW / 2 + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif">'
    )
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        f'markerHeight="6" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{ACCENT}"/>'
        "</marker></defs>"
    )
    title = [
        text(MARGIN, 28, "Layers, and a step's walk through them", 19, weight="bold"),
        text(
            MARGIN,
            48,
            "A layer imports only from those below it. Numbers: the table of stops.",
            13,
            fill=GREY,
        ),
    ]
    background = f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>'
    parts = [head, tip, background, *title, *layers(), *wire(), *walk(), "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
