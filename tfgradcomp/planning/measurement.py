"""From the measurement of all workers to their common decision."""

from __future__ import annotations

from dataclasses import dataclass

import keras
import numpy as np

from tfgradcomp.collectives import Hosts
from tfgradcomp.engine.plan import Plan
from tfgradcomp.engine.settings_check import gather_json
from tfgradcomp.planning.arithmetic import typical_arithmetic
from tfgradcomp.planning.candidates import Option, options
from tfgradcomp.planning.decision import Decision, decide, exclusion
from tfgradcomp.planning.forecasts import Profile
from tfgradcomp.planning.layer_errors import (
    Gradients,
    WorstLayer,
    squared_errors,
    squared_lengths,
    worst_layer,
)
from tfgradcomp.planning.network import Link
from tfgradcomp.planning.observers import LayerSquares
from tfgradcomp.transports.costs import measure


@dataclass(frozen=True)
class Measurement:
    """The workers whose method is chosen.

    Attributes:
        inner: The inner optimizer.
        plan: The plan of the measured steps.
        hosts: The collectives between processes; None for a single process.
        risk: As `Auto` takes it.
        link: As `Auto` takes it.
        exclude: As `Auto` takes it.
        after: As `Auto` takes it.
    """

    inner: keras.optimizers.Optimizer
    plan: Plan
    hosts: Hosts | None
    risk: str
    link: str | None
    exclude: object
    after: int

    def decide(
        self, gradients: list[Gradients], compute: float, reads_clock: bool
    ) -> Decision:
        """Returns the decision of worker 0, which all workers must ask for together.

        Args:
            gradients: Those of this process' workers, in one step.
            compute: Seconds of a step without an exchange, on this worker.
            reads_clock: Whether durations of arithmetic may be measured.
        """
        number = self.plan.collectives.num_workers
        sums = self._sums(gradients) if gradients[0].names else {}
        every = self._gathered({"compute": compute, "sums": sums}, "measurement")
        errors = {}
        for name, (_, reply) in sums.items():
            own = np.sum([worker["sums"][name][0] for worker in every], 0)
            mean = squared_lengths(gradients[0].mean, gradients[0].shapes)
            names = gradients[0].names
            errors[name] = worst_layer(own, np.array(reply), mean, number, names)
        link, profile = None, Profile()
        if self.link is None:
            profile = profile._replace(costs=measure(self.hosts))
        else:
            link = Link.parse(self.link)
        if not reads_clock:
            profile = profile._replace(arithmetic=typical_arithmetic)
        decision = decide(
            self.inner,
            self._variables(),
            number,
            max(worker["compute"] for worker in every),
            risk=self.risk,
            link=link,
            link_name=f"links of {self.link}" if self.link else "measured links",
            profile=profile,
            errors=errors,
            exclude=self.exclude,
            warmup_steps=self.after,
        )
        # Forecasts differ between workers, which have measured their own arithmetic.
        first, *_ = self._gathered(decision.to_config(), "decision")
        return Decision.of(first)

    def _sums(self, gradients):
        """Returns the squared errors of the candidates whose errors matter, as lists.

        Those of the messages are added up over this process' workers.
        """
        sums = {}
        for option in filter(self._is_measured, options(self.inner)):
            errors = [
                squared_errors(option.candidate.method, g.own, g.mean, g.shapes)
                for g in gradients
            ]
            own = np.sum([one[0] for one in errors], 0)
            sums[option.name] = own.tolist(), errors[0][1].numpy().tolist()
        return sums

    def _is_measured(self, option: Option) -> bool:
        is_possible = not exclusion(option, self.risk, error=None)
        return is_possible and option.has_limit and option.risk != "none"

    def _variables(self):
        """Returns the variables but tables, whose rows alone travel."""
        buckets = [bucket for bucket in self.plan.buckets if bucket.takes_rows]
        tables = {position for bucket in buckets for position in bucket.positions}
        variables = enumerate(self.plan.variables)
        return [v for position, v in variables if position not in tables]

    def _gathered(self, value, call_site) -> list:
        if self.hosts is None:
            return [value]
        return gather_json(self.hosts, value, call_site)


def check_errors(
    squares: LayerSquares, workers: int, hosts: Hosts | None
) -> WorstLayer:
    """Returns the largest error of a layer in a later step; all workers must call it.

    The decoded reply is as long as the mean gradient and the error together.

    Args:
        squares: The figures of this process.
        workers: N.
        hosts: The collectives between processes; None for a single process.
    """
    own = squares.own
    if hosts is not None:
        found = gather_json(hosts, own.tolist(), "errors of layers")
        own = np.sum(found, 0)
    error = own / workers**2 + squares.reply
    mean = np.maximum(squares.update - error, 0.01 * squares.update)
    return worst_layer(own, squares.reply, mean, workers, squares.names)
