"""Conclusions about local steps: the rows of their studies still say so."""

import statistics

from tests.docs.claims import check, each_of, rows

PAGE = "docs/studies/local-language.md"


def points(way):
    """The mean accuracy of LeNet in percent."""
    found = rows("examples/results/local_causes.csv")
    return statistics.mean(float(r["accuracy"]) for r in found if r["way"] == way)


def costs(way, base, expected):
    """Tells whether the accuracy of `way` is `expected` points below that of `base`."""
    return round(points(base) - points(way), 1) == expected


def loss(exchange, every, momentum="none", inner="Adam"):
    """The loss of the language model with the first seed."""
    key = (exchange, str(every), momentum, inner, "3072", "0.002", "0")
    columns = ("exchange", "every", "momentum", "inner", "steps", "rate", "seed")
    for row in rows("examples/results/local_language.csv"):
        if tuple(row[name] for name in columns) == key:
            return float(row["loss"])
    raise LookupError(key)


def more(expected, exchange, every, inner="Adam"):
    """Tells whether a loss is `expected` percent above the baseline's.

    The baseline has the same inner optimizer, and exchanges bfloat16 in each step.
    """
    own, plain = loss(exchange, every, "none", inner), loss("bfloat16", 1, inner=inner)
    return round(100 * (own / plain - 1), 1) == expected


CLAIMS = [
    (
        PAGE,
        "float16 loses 1.1 points without momentum, one bit 0.5 more, two bits 0.2",
        lambda: (
            costs("float16", "float32, each step", 1.1)
            and costs("1 bit", "float16", 0.5)
            and costs("2 bits", "float16", 0.2)
        ),
    ),
    (
        PAGE,
        "one bit costs 0.2 points instead of 0.5",
        lambda: costs("1 bit, first tenth as float32", "float16", 0.2),
    ),
    (
        PAGE,
        "With momentum outside the bit costs 1.7 points",
        lambda: costs("1 bit, momentum in front", "float16, momentum", 1.7),
    ),
    (
        "docs/local-steps.md",
        "at twice the rate reaches 88.6 % in each step, 87.7 % with 16 steps and "
        "float16 without momentum, and 87.2 % with one bit",
        lambda: all(
            abs(points(f"{way}, twice the rate") - expected) < 0.1
            for way, expected in (
                ("float32, each step", 88.6),
                ("float16", 87.7),
                ("1 bit", 87.2),
            )
        ),
    ),
    (
        PAGE,
        "6.0 %, with AdamW 16.1 %, with Adam 15.3 %",
        lambda: all(
            more(expected, "float16", 32, inner)
            for inner, expected in (("Muon", 6.0), ("AdamW", 16.1), ("Adam", 15.3))
        ),
    ),
    (
        "docs/local-steps.md",
        "6.4 % above Muon's own baseline and 4.5 % below Adam's with an exchange in "
        "each step",
        lambda: (
            more(6.4, "2 bits", 32, "Muon")
            and round(
                100 * (1 - loss("2 bits", 32, inner="Muon") / loss("bfloat16", 1)), 1
            )
            == 4.5
        ),
    ),
    (
        "docs/local-steps.md",
        "it reaches the loss of AdamW with bfloat16 in each step",
        lambda: loss("2 bits", 64, inner="Muon") < loss("bfloat16", 1, inner="AdamW"),
    ),
]


@each_of(CLAIMS)
def test_a_claim_stands_on_its_page_and_holds(page, sentence, holds):
    check(page, sentence, holds)
