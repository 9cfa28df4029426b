"""From the measurement of all workers to their common decision."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import Hosts
from tfgradcomp.engine.plan import Plan
from tfgradcomp.engine.settings_check import gather_json
from tfgradcomp.planning.arithmetic import ExchangeTimer, typical_arithmetic
from tfgradcomp.planning.candidates import options
from tfgradcomp.planning.decision import Decision, decide, exclusion
from tfgradcomp.planning.forecasts import Profile
from tfgradcomp.planning.layer_errors import (
    Gradients,
    WorstLayer,
    squared_errors,
    squared_lengths,
    worst_layer,
)
from tfgradcomp.planning.network import GRPC, NO_LINK, TCP, Link
from tfgradcomp.planning.observers import LayerSquares
from tfgradcomp.transports.costs import measure


@dataclass(frozen=True)
class Measurement:
    """The workers whose method is chosen.

    Attributes:
        inner: The inner optimizer.
        plan: The plan of the measured steps.
        risk: As `Auto` takes it.
        link: As `Auto` takes it.
        exclude: As `Auto` takes it.
        after: As `Auto` takes it.
    """

    inner: keras.optimizers.Optimizer
    plan: Plan
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
        sums = sums_of_errors(self.inner, self.risk, gradients)
        every = self._gathered({"compute": compute, "sums": sums}, "measurement")
        errors = worst_layers(gradients[0], [one["sums"] for one in every], number)
        link = NO_LINK if self.link is None else Link.parse(self.link)
        profile, timer = Profile(), None
        variables, between = self._variables(), self.plan.measured
        if between is not None:
            profile = Profile(GRPC if between is self.plan.hosts else TCP)
            if self.link is None:
                profile = profile._replace(costs=measure(between))
                timer = ExchangeTimer(between, variables, self.exclude).seconds
        if timer or not reads_clock:
            profile = profile._replace(arithmetic=typical_arithmetic)
        decision = decide(
            self.inner,
            variables,
            number,
            max(worker["compute"] for worker in every),
            risk=self.risk,
            link=link,
            link_name=f"links of {self.link}" if self.link else "measured links",
            profile=profile,
            errors=errors,
            exclude=self.exclude,
            warmup_steps=self.after,
            timer=timer,
        )
        # Where the link is given, each worker has measured its own arithmetic.
        first, *_ = self._gathered(decision.to_config(), "decision")
        return Decision.of(first)

    def _variables(self):
        """Returns the variables but tables, whose rows alone travel."""
        buckets = [bucket for bucket in self.plan.buckets if bucket.takes_rows]
        tables = {position for bucket in buckets for position in bucket.positions}
        variables = enumerate(self.plan.variables)
        return [v for position, v in variables if position not in tables]

    def _gathered(self, value, call_site) -> list:
        if self.plan.hosts is None:
            return [value]
        return gather_json(self.plan.hosts, value, call_site)


def decide_by_batches(
    inner: keras.optimizers.Optimizer,
    variables: Sequence,
    batches: Sequence[Sequence[tf.Tensor]],
    compute: float,
    *,
    workers: int,
    link: str,
    risk: str,
) -> Decision:
    """Returns the decision for workers that have a batch each, in turns.

    Args:
        inner: The inner optimizer.
        variables: The variables that have a gradient.
        batches: Their gradients of some batches, float32.
        compute: Seconds of a step without an exchange.
        workers: N.
        link: As `Auto` takes it.
        risk: As `Auto` takes it.
    """
    flat = [
        tf.concat([tf.reshape(gradient, [-1]) for gradient in batch], 0)
        for batch in itertools.islice(itertools.cycle(batches), workers)
    ]
    mean = tf.add_n(flat) / workers
    names = tuple(variable.path for variable in variables)
    shapes = tuple(tuple(variable.shape) for variable in variables)
    gradients = [Gradients(own, mean, names, shapes) for own in flat]
    sums = sums_of_errors(inner, risk, gradients)
    return decide(
        inner,
        variables,
        workers,
        compute,
        risk=risk,
        link=Link.parse(link),
        link_name=f"links of {link}",
        errors=worst_layers(gradients[0], [sums], workers),
    )


def sums_of_errors(
    inner: keras.optimizers.Optimizer, risk: str, gradients: list[Gradients]
) -> dict[str, tuple[list, list]]:
    """Returns squared errors by layers, of the candidates whose errors matter.

    Args:
        inner: The inner optimizer.
        risk: The class of risk.
        gradients: Those of several workers in one step.

    Returns:
        By names of candidates, the errors of the messages, added up over these workers,
        and that of the reply.
    """
    sums: dict[str, tuple[list, list]] = {}
    for option in options(inner) if gradients[0].names else []:
        is_possible = not exclusion(option, risk, error=None)
        if option.has_limit and option.risk != "none" and is_possible:
            errors = [
                squared_errors(option.candidate.method, g.own, g.mean, g.shapes).numpy()
                for g in gradients
            ]
            own = np.sum([one[0] for one in errors], 0)
            sums[option.name] = own.tolist(), errors[0][1].tolist()
    return sums


def worst_layers(
    gradients: Gradients, sums: list[dict], workers: int
) -> dict[str, WorstLayer]:
    """Returns the largest error of a layer, by names of candidates.

    Args:
        gradients: Those of any worker.
        sums: The results of `sums_of_errors` of all processes.
        workers: N.
    """
    mean = squared_lengths(gradients.mean, gradients.shapes).numpy()
    found = {}
    for name, (_, reply) in sums[0].items():
        own = np.sum([one[name][0] for one in sums], 0)
        reply = np.array(reply)
        found[name] = worst_layer(own, reply, mean, workers, gradients.names)
    return found


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
