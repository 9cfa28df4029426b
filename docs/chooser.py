"""Write the table of choices in docs/methods/index.md, by the rule of `Auto`.

    python docs/chooser.py

Reads no clock: arithmetic, software and computing time are those of one machine, so the
same table comes out everywhere.
"""

import re
from pathlib import Path

import keras

from tfgradcomp import planning
from tfgradcomp.planning.arithmetic import typical_arithmetic

PAGE = Path(__file__).parent / "methods" / "index.md"
# Milliseconds of a step without an exchange.
MODELS = {"lenet": 5, "resnet50": 200}
WORKERS = 4, 16
LINKS = "100mbit", "1gbit", "10gbit"
INNER = {
    "momentum": keras.optimizers.SGD(momentum=0.9),
    "Adam": keras.optimizers.Adam(),
}
RISKS = "low", "medium", "high"


def choice(name, workers, link, inner, risk):
    """Return the name of the choice."""
    decision = planning.decide(
        inner,
        planning.stand_ins(planning.MODELS[name]()),
        workers,
        MODELS[name] / 1e3,
        risk=risk,
        link=planning.Link.parse(link),
        profile=planning.Profile(arithmetic=typical_arithmetic),
        warmup_steps=150,
    )
    return decision.candidate


def short(candidate):
    """Return a candidate in few characters."""
    arguments = candidate.arguments
    if candidate.wrapper in ("QSGD", "ORQ"):
        reply = "" if arguments["reply"] == "float32" else ", requantized"
        return f"{candidate.wrapper}-{arguments['levels']}{reply}"
    if candidate.wrapper == "PowerSGD":
        return f"PowerSGD, rank {arguments['rank']}"
    return candidate.wrapper


def line(name, workers, link):
    """Return a line of the table."""
    chosen = [
        short(choice(name, workers, link, inner, risk))
        for inner in INNER.values()
        for risk in RISKS
    ]
    return f"| {' | '.join([name, str(workers), link, *chosen])} |"


def table():
    """Return the lines of the table."""
    heads = [f"{optimizer}, {risk}" for optimizer in INNER for risk in RISKS]
    lines = [
        "| " + " | ".join(["model", "workers", "link", *heads]) + " |",
        "|" + "---|" * (3 + len(heads)),
    ]
    for name in MODELS:
        for workers in WORKERS:
            for link in LINKS:
                lines.append(line(name, workers, link))
    return lines


def updated(text):
    """Return the page with a new table."""
    begin, end = "<!-- choices: begin -->", "<!-- choices: end -->"
    content = "\n".join([begin, *table(), end])
    return re.sub(f"{begin}.*{end}", lambda _: content, text, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
