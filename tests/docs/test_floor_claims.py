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


def span(table, methods=FOUR):
    """The least and the greatest ratio of some methods."""
    found = of_floors(table)
    ratios = [found[method] for method in methods]
    return min(ratios), max(ratios)


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
        "1.1 times the floor with `TernGrad`, 1.2 with `SignSGD`, 1.2 with `Signum`, "
        "1.3 with `DistEFBlockSGDM` and 1.4 with `PowerSGD`",
        lambda: (
            of_floors("exchange")
            == dict(zip((*FOUR, "PowerSGD"), (1.1, 1.2, 1.2, 1.3, 1.4), strict=True))
        ),
    ),
    (
        PAGE,
        "the first four take at most 1.3 times at 10 Gbit/s, `PowerSGD` 1.6",
        lambda: (
            span("virtual_cluster_10gbit")[1] == 1.3
            and of_floors("virtual_cluster_10gbit")["PowerSGD"] == 1.6
        ),
    ),
    (
        PAGE,
        "at 1 Gbit/s the first four take at most 1.2 times, and `PowerSGD` 1.4",
        lambda: (
            span("virtual_cluster_1gbit")[1] == 1.2
            and of_floors("virtual_cluster_1gbit")["PowerSGD"] == 1.4
        ),
    ),
    (
        PAGE,
        "the first four take 1.2 to 1.3 times and `PowerSGD` 1.7",
        lambda: (
            span("virtual_cluster_100mbit") == (1.2, 1.3)
            and of_floors("virtual_cluster_100mbit")["PowerSGD"] == 1.7
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
