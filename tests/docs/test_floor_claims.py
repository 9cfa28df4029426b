"""Conclusions about distances from the floor: their tables still say so."""

from tests.docs.claims import check, each_of, rows

PAGE = "benchmarks/README.md"
FOUR = ("TernGrad", "SignSGD", "Signum", "DistEFBlockSGDM")


def of_floors(table):
    """How many times its floor a step takes where memory is slow, by methods.

    Rounded, as a text tells it.
    """
    return {
        row["variant"]: round(float(row["x_floor"]), 1)
        for row in rows(f"benchmarks/results/slow_memory/{table}.csv")
        if row["framework"] == "tfgradcomp"
    }


def are(table, of_four, of_power_sgd):
    """Tells whether these are the greatest ratio of four methods, and `PowerSGD`'s."""
    found = of_floors(table)
    return (max(found[m] for m in FOUR), found["PowerSGD"]) == (of_four, of_power_sgd)


def shares(*names):
    """The least and the greatest share of parts of the processor time, in percent."""
    table = rows("benchmarks/results/slow_memory/processor_time.csv")
    found = [row for row in table if row["method"] != "float32"]
    for name in names:
        percent = [100 * float(row[name]) / float(row["busy_ms"]) for row in found]
        yield round(min(percent)), round(max(percent))


CLAIMS = [
    (
        PAGE,
        "1.0 times the floor with `TernGrad`, 1.3 with `SignSGD`, 1.1 with `Signum`, "
        "1.3 with `DistEFBlockSGDM` and 1.7 with `PowerSGD`",
        lambda: (
            of_floors("exchange")
            == dict(zip((*FOUR, "PowerSGD"), (1.0, 1.3, 1.1, 1.3, 1.7), strict=True))
        ),
    ),
    (
        PAGE,
        "the first four take at most 1.2 times at 10 Gbit/s and at most 1.3 at 1 "
        "Gbit/s, `PowerSGD` 1.6 and 2.2 times",
        lambda: (
            are("virtual_cluster_10gbit", 1.2, 1.6)
            and are("virtual_cluster_1gbit", 1.3, 2.2)
        ),
    ),
    (
        PAGE,
        "these are 56 to 81, 4 to 12, 8 to 17 and 3 to 10 %",
        lambda: (
            [*shares("own operations", "kernel", "TensorFlow", "C library")]
            == [(56, 81), (4, 12), (8, 17), (3, 10)]
        ),
    ),
]


@each_of(CLAIMS)
def test_a_claim_stands_on_its_page_and_holds(page, sentence, holds):
    check(page, sentence, holds)
