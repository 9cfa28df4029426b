"""Find out what one bit loses in local steps, by changing one thing at a time.

    python examples/studies/local_causes.py
    python examples/studies/local_causes.py --tables
    python examples/studies/local_causes.py --quick

The LeNet of `rounds.py`, its data, its rates and its number of steps, with an exchange
after 16 steps. Writes examples/results/local_causes.csv (an interrupted run resumes)
and a table of docs/studies/local-language.md; `--quick` takes few steps of some
trainings and writes nothing.
"""

import datetime
import statistics
from collections.abc import Callable

import outers
import rounds
import study

import tfgradcomp

EVERY, EPOCHS = 16, 3
TASK = rounds.TASKS["LeNet"]
PAGE = "studies/local-language.md"
COLUMNS, WORDS = ("accuracy",), ("date",)
FLOAT32 = "float32, each step"
# Half and twice Adam's rate.
RATES = {"half the rate": 0.5, "twice the rate": 2.0}


def exchanges_of(steps: int) -> int:
    """Return the number of exchanges in all epochs, each of which ends with one."""
    return EPOCHS * -(-steps // EPOCHS // EVERY)


def ways(steps: int) -> dict[str, tuple[float, Callable | None]]:
    """Return a factor of Adam's rate, and a function that makes the outer optimizer.

    Args:
        steps: Number of steps in the training.
    """
    plain = {FLOAT32: (1.0, None)}
    for exchange in ("float16", "1 bit", "2 bits", "4 bits"):
        plain[exchange] = (1.0, _outer(outers.METHODS[exchange]))
    for name, method in outers.one_bit_changes(exchanges_of(steps)).items():
        plain[name] = (1.0, _outer(method, transport="all_gather"))
    for name, factor in RATES.items():
        plain[f"{FLOAT32}, {name}"] = (factor, None)
        for exchange in ("float16", "1 bit"):
            plain[f"{exchange}, {name}"] = (factor, plain[exchange][1])
    sign = outers.METHODS["1 bit"]
    plain["1 bit, outer rate 0.7"] = (1.0, _outer(sign, rate=0.7))
    float16 = outers.METHODS["float16"]
    plain["float16, momentum"] = (1.0, _outer(float16, "behind"))
    for momentum in ("in front", "behind"):
        name = f"1 bit, momentum {momentum}"
        plain[name] = (1.0, _outer(sign, momentum))
        decays = outers.feedback(decay=0.8)
        plain[f"{name}, decay 0.8"] = (
            1.0,
            _outer(decays, momentum, None, "all_gather"),
        )
    return plain


def _outer(method, momentum="none", rate=None, transport="sharded") -> Callable:
    return lambda: outers.outer(method, momentum, rate, transport)


def make_optimizer(way: str, steps: int):
    """Return the optimizer of a way."""
    factor, make_outer = ways(steps)[way]
    adam = rounds.adam(factor * TASK.rate, steps)
    if make_outer is None:
        return adam
    return tfgradcomp.LocalSteps(adam, make_outer(), every=EVERY)


def train(key: dict, is_quick: bool = False) -> dict:
    """Return the accuracy in percent."""

    def make_datasets():
        batches, test = rounds.datasets("LeNet", key["seed"])
        batches = batches.take(rounds.QUICK_STEPS) if is_quick else batches
        return batches, test

    accuracy, _ = study.train(
        study.strategy_of(rounds.WORKERS),
        key["seed"],
        TASK.make,
        lambda steps: make_optimizer(key["way"], steps),
        make_datasets,
        1 if is_quick else EPOCHS,
    )
    return {"accuracy": 100 * accuracy, "date": str(datetime.date.today())}


def table(rows: list[dict]) -> str:
    """Return the table: float16 is what one bit is compared with."""
    found: dict[str, dict] = {}
    for row in rows:
        found.setdefault(row["way"], {})[row["seed"]] = row
    lines = []
    for way, own in found.items():
        rates = [name for name in RATES if way.endswith(name)]
        cells = [way, f"{statistics.mean(row['accuracy'] for row in own.values()):.2f}"]
        for base in (FLOAT32, "float16"):
            base = ", ".join([base, *rates])
            less = study.less(own, found.get(base, {})) if way != base else []
            cells.append(study.interval_text(less, "+") if less else "")
            cells.append(", ".join(f"{one:+.2f}" for one in less))
        lines.append(cells)
    titles = ["exchange", "accuracy, %", "less float32 each step", "by seeds"]
    return study.markdown([*titles, "less float16", "by seeds"], lines)


def quick():
    """Take a few steps in some ways."""
    keys = [
        {"way": way, "seed": 0}
        for way in ("float16", "1 bit, last exchange as float32")
    ]
    print(table([key | train(key, is_quick=True) for key in keys]), flush=True)


def main():
    """Run the study."""
    parser = study.arguments(__doc__, parts=("causes",))
    parser.add_argument("--most", type=int, help="the most rows to train")
    given = parser.parse_args()
    if given.quick:
        quick()
        return
    processes = study.one_thread_each()
    # The steps determine only which exchanges are the last.
    names = [*ways(EPOCHS * EVERY)]
    keys = [{"way": way, "seed": seed} for seed in given.seeds for way in names]
    study.complete(
        "local_causes",
        keys,
        None if given.tables else train,
        COLUMNS,
        processes,
        words=WORDS,
        most=given.most,
    )
    every_key = [{"way": way, "seed": seed} for way in names for seed in range(10)]
    rows = study.complete("local_causes", every_key, None, COLUMNS, words=WORDS)
    if rows:
        seeds = sorted({row["seed"] for row in rows})
        where = f"{study.trainings(rows)}; "
        where += f"{rounds.WORKERS} virtual workers, seeds {', '.join(map(str, seeds))}"
        text = table(rows)
        print(text, flush=True)
        study.write_page(PAGE, text, where, "images", rows)


if __name__ == "__main__":
    main()
