"""Main program of the planner: from the command line to the table."""

from __future__ import annotations

import importlib
import os
import sys

from tfgradcomp import planning
from tfgradcomp.planning import output
from tfgradcomp.planning.arguments import parse
from tfgradcomp.planning.network import SOFTWARE, Link


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` and returns the exit code."""
    options = parse(argv)
    # TensorFlow is imported after --help and most errors, and hides its INFO lines.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    measured = importlib.import_module("tfgradcomp.planning.measured")
    try:
        model = measured.find_model(options.model)
        if options.measure:
            compute = measured.measure_compute(model.keras_model(), options.batch_size)
        else:
            compute = options.compute_ms / 1e3
        link = Link(
            options.bandwidth,
            options.latency,
            options.devices_per_node,
            options.link_efficiency,
        )
        plan = planning.plan(
            model.shapes,
            compute,
            link,
            options.workers,
            methods=options.methods,
            examples=options.batch_size,
            local_steps=options.local_steps,
            ratio=options.ratio,
            profile=planning.Profile(SOFTWARE[options.software]),
        )
        if options.plot:
            output.plot(options.plot, plan, model.name)
    except (ValueError, OSError) as error:
        print(f"tfgradcomp-plan: {error}", file=sys.stderr)
        return 2
    if options.csv:
        output.write_csv(sys.stdout, plan)
    elif options.json:
        output.write_json(sys.stdout, plan)
    else:
        notes = [output.head(plan, model), *model.notes]
        print("\n".join([*notes, "", *output.table(plan), "", *output.sentences(plan)]))
    return 0
