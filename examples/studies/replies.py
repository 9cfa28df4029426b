"""Train with quantized replies, and with error feedback in front of momentum.

    python examples/studies/replies.py
    python examples/studies/replies.py --tables
    python examples/studies/replies.py --quick

The four models of the leaderboard train on four virtual workers, as there, and are
compared with float32 from the same weights and batches:

    replies    QSGD and ORQ with 9 levels, whose reply is float32, rounded again, or
               rounded again with error feedback on workers and server, around SGD
    feedback   error feedback in front of a momentum of 0.9, which wrappers refuse, and
               without momentum

Writes examples/results/replies.csv and the tables of docs/methods/qsgd.md and of
docs/methods/index.md; an interrupted run resumes. `--quick` takes two steps of two
methods and writes nothing.
"""

import study

import ways  # isort: skip
import leaderboard  # isort: skip

REPLIES = {
    "`float32`": ("momentum", {}),
    "`requantize`": ("momentum", {"reply": "requantize"}),
    "`requantize`, feedback": (
        "SGD",
        {"reply": "requantize", "error_feedback": True},
    ),
}
# Names of the optimizers of the leaderboard, as the tables have them.
INNER = {"momentum": "SGD, momentum", "SGD": "SGD"}
# Feedback goes with SGD without momentum.
QUANTIZERS = {
    (name, reply, inner): ways.wrapped(name, inner, arguments=arguments)
    for name in ("QSGD", "ORQ")
    for reply, (inner, arguments) in REPLIES.items()
}
FEEDBACK = {
    ("DistEFBlockSGD", "", inner): ways.wrapped(
        "DistEFBlockSGD", inner, arguments={"allow_inner_momentum": True}
    )
    for inner in INNER
}
PLAIN = {("float32", "", inner): ways.WAYS[inner] for inner in INNER}
WAYS = PLAIN | QUANTIZERS | FEEDBACK


def measure(key, steps=None):
    """Return the accuracy of a training in percent."""
    task = leaderboard.TASKS[key["model"]]
    way = WAYS[key["method"], key["reply"], key["inner"]]

    def datasets():
        batches, test = task.datasets(key["seed"])
        return batches if steps is None else batches.take(steps), test

    accuracy, _ = study.train(
        study.strategy_of(leaderboard.WORKERS),
        key["seed"],
        task.make,
        lambda steps: ways.make_optimizer(way, task.rates, steps),
        datasets,
        1,
    )
    return {"accuracy": 100 * accuracy}


def table(rows, own):
    """Return a table of accuracies less float32's with the same inner optimizer.

    Args:
        rows: The rows of the study.
        own: The ways in the table.
    """
    models = [*dict.fromkeys(row["model"] for row in rows)]
    has_reply = any(reply for _, reply, _ in own)

    def by_seed(model, *way):
        return {
            row["seed"]: row
            for row in rows
            if (row["model"], row["method"], row["reply"], row["inner"])
            == (model, *way)
        }

    def less(model, way):
        plain = by_seed(model, "float32", "", way[-1])
        found = study.less(by_seed(model, *way), plain)
        return study.interval_text(found, "+") if found else ""

    lines = [
        [f"`{way[0]}`", *([way[1]] if has_reply else []), INNER[way[-1]]]
        + [less(model, way) for model in models]
        for way in own
    ]
    titles = ["method", *(["reply"] if has_reply else []), "inner optimizer", *models]
    return study.markdown(titles, lines, right=len(models))


def main():
    """Train the missing rows, and write the tables."""
    parser = study.arguments(__doc__, parts=("replies", "feedback"))
    given = parser.parse_args()
    own = {"replies": QUANTIZERS, "feedback": FEEDBACK}
    trained = [*PLAIN, *(way for part in given.parts for way in own[part])]
    models, names = [*leaderboard.TASKS], ("method", "reply", "inner")
    if given.quick:
        trained, models, given.seeds = [*PLAIN, *FEEDBACK], ["CNN"], [0]
    keys = [
        {"model": model, **dict(zip(names, way, strict=True)), "seed": seed}
        for seed in given.seeds
        for model in models
        for way in trained
    ]
    if given.quick:
        print(table([key | measure(key, 2) for key in keys], FEEDBACK))
        return
    rows = study.complete(
        "replies",
        keys,
        None if given.tables else measure,
        ["accuracy"],
        processes=study.one_thread_each(),
    )
    pages = {"replies": "methods/qsgd.md", "feedback": "methods/index.md"}
    for part in given.parts:
        text = table(rows, own[part])
        print(text)
        seeds = ", ".join(map(str, given.seeds))
        where = f"{leaderboard.WORKERS} virtual workers, seeds {seeds}"
        study.write_page(pages[part], text, where, part)


if __name__ == "__main__":
    main()
