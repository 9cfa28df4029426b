"""Main program of the planner: from the command line to the table."""

from __future__ import annotations

import importlib
import os
import sys

from tfgradcomp import planning
from tfgradcomp.planning import output
from tfgradcomp.planning.arguments import parse
from tfgradcomp.planning.network import SOFTWARE, Link


def _decision(options, profile, shapes, compute, link):
    """Returns what `Auto` would choose for the largest number of workers."""
    keras = importlib.import_module("keras")
    inner = {
        "SGD": keras.optimizers.SGD(),
        "momentum": keras.optimizers.SGD(momentum=0.9),
        "Adam": keras.optimizers.Adam(),
    }[options.optimizer]
    return planning.decide(
        inner,
        planning.stand_ins(shapes),
        max(options.workers),
        compute,
        risk=options.risk,
        link=link,
        link_name=f"links of {output.rate(link.bandwidth)}",
        # Its float32 travels as a method's messages do.
        profile=profile._replace(stock=None),
    )


# Beside float32, the baseline of every table.
_BASELINE = "HalfPrecision"


def _announced(arithmetic):
    """Returns a measurement that names each method once on the standard error."""
    told: set[str] = set()

    def measured(kind, method, layout, num_workers):
        if method.name not in told:
            told.add(method.name)
            print(f" {method.name}", end="", file=sys.stderr, flush=True)
        return arithmetic(kind, method, layout, num_workers)

    return measured


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` and returns the exit code."""
    options = parse(argv)
    print("tfgradcomp-plan: measures each method here:", file=sys.stderr, flush=True)
    # TensorFlow is imported after --help and most errors, and hides its INFO lines.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    measured = importlib.import_module("tfgradcomp.planning.measured")
    try:
        shapes, model = measured.find_model(options.model)
        if not options.measure:
            compute = options.compute_ms / 1e3
        elif model is None:
            raise ValueError(
                f"--measure needs a model that can run, but {options.model} is a list "
                "of shapes. Give --compute-ms, a .keras file or module:function. "
                f"Received: model={options.model!r}"
            )
        else:
            compute = measured.measure_compute(model, options.batch_size)
        link = Link(
            options.bandwidth,
            options.latency,
            options.devices_per_node,
            options.link_efficiency,
        )
        software, stock = SOFTWARE[options.software]
        profile = planning.Profile(software, stock=stock)
        profile = profile._replace(arithmetic=_announced(profile.arithmetic))
        methods = options.methods
        plan = planning.plan(
            shapes,
            compute,
            link,
            options.workers,
            methods=methods and [*dict.fromkeys([_BASELINE, *methods])],
            examples=options.batch_size,
            local_steps=options.local_steps,
            delay=options.delay,
            ratio=options.ratio,
            profile=profile,
        )
        decision = None
        if options.risk:
            decision = _decision(options, profile, shapes, compute, link)
        if options.plot:
            output.plot(options.plot, plan, options.model)
    except (ValueError, OSError) as error:
        print(f"\ntfgradcomp-plan: {error}", file=sys.stderr)
        return 2
    print(file=sys.stderr)
    if options.csv:
        output.write_csv(sys.stdout, plan)
    elif options.json:
        output.write_json(sys.stdout, plan)
    else:
        lines = [output.head(plan, options.model, shapes)]
        if measured.has_embeddings(options.model, model):
            lines.append(output.EMBEDDINGS)
        lines += ["", *output.table(plan), "", *output.sentences(plan)]
        if decision:
            lines += ["", str(decision)]
        print("\n".join(lines))
    return 0
