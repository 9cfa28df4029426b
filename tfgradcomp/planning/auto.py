"""An optimizer that chooses the method itself, after some steps as bfloat16."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
from typing_extensions import override

from tfgradcomp.collectives import across_hosts
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.core.logging import logger
from tfgradcomp.fit.check_strategy import check_strategy
from tfgradcomp.optimizers.wrapper import InnerOptimizer, OptimizerWrapper
from tfgradcomp.planning.candidates import BFLOAT16, Candidate
from tfgradcomp.planning.decision import Decision
from tfgradcomp.planning.measurement import Measurement, check_errors
from tfgradcomp.planning.network import Link
from tfgradcomp.planning.observers import ErrorWatch, StepSample
from tfgradcomp.planning.risks import RISKS

_OBSERVER, _DECISION = "Auto", "decision"
# Errors are measured again at these multiples of `after`.
_WATCHED = (10, 100, 1000)


@keras.saving.register_keras_serializable("tfgradcomp")
class Auto(OptimizerWrapper):
    r"""Chooses a method for the model and its network, and trains on with it.

    The first `after` steps travel as bfloat16 and are the measurement. Then `fit`
    chooses the method whose step is the shortest among those that `risk` allows.
    Forecasts tell which methods may win, and the workers time the exchanges of these,
    for half a second each, with variables of the model's shapes: keep twice the model's
    memory free, and what the method keeps. A method must make a step shorter than
    bfloat16 and float32 do by a tenth; otherwise these remain.

    | risk | methods | condition |
    |---|---|---|
    | `"none"` | float32, bfloat16 | |
    | `"low"` | QSGD and ORQ with 9 and 17 levels, PowerSGD of rank 32 | error ≤ 0.6 |
    | `"medium"` | TernGrad, ORQ with 5 levels, PowerSGD of rank 4 | error ≤ 0.8 |
    | `"high"` | one bit with error feedback, by the inner optimizer | error ≤ 1.25 |

    The error of a layer is that of the mean gradient, over its length:
    \( \sqrt{\frac{1}{N^2} \sum_i |e_i|^2 + |e|^2} \,/\, |\bar g| \), with the rounding
    errors \( e_i \) of the workers' messages and \( e \) of the reply. It is measured
    on the gradients of the last step of the measurement, and the worst layer counts.

    Worker 0 decides, and all workers take its choice. The choice is a part of the
    configuration: files hold it, and it is taken again when they are loaded. `explain`
    prints the table of reasons. Save it with `decision.save("decision.json")`, and
    give `decision="decision.json"` for the same choice from the first step on. With
    `link` and `compute` no measured time enters the choice, so that two runs give the
    same bits.

    A choice never changes by itself. After 10, 100 and 1000 times `after` steps, the
    errors of QSGD, ORQ and TernGrad are measured again, and a larger error than `risk`
    allows is a warning.

    In a loop of your own, call `decide` on all workers, outside of a graph, after each
    step until it returns True; then make the `tf.function` of the step anew.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        risk: `"none"`, `"low"`, `"medium"` or `"high"`.
        link: Rate of each worker's link, such as `"1gbit"`; None: measured. Virtual
            workers need it.
        after: Steps of the measurement, 1 or more. A transformer needs more than 50.
        compute: Seconds of a step without an exchange; None: measured.
        decision: A choice that was made before: `Auto.decision`, or the file that its
            `save` has written; None: choose.
        carrier: As `CompressedOptimizer` takes it.
        exclude: Variables that are not compressed, as `CompressedOptimizer` takes them.
        seed: As `CompressedOptimizer` takes it.
        nonfinite: As `CompressedOptimizer` takes it.
        verify_every: As `CompressedOptimizer` takes it.
        name: Name of the optimizer.

    Attributes:
        current: The wrapper that exchanges.

    Raises:
        ValueError: If an argument is out of range; when it is built, if workers have
            several devices each, or if there is no network to measure.

    Example:
        ```python
        model.compile(tfgradcomp.Auto(keras.optimizers.Adam(1e-3)), "mse")
        ```
    """

    needs_second_moments = False

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        risk: str = "low",
        link: str | None = None,
        after: int = 150,
        compute: float | None = None,
        decision: Decision | Mapping | str | Path | None = None,
        carrier: str = "auto",
        exclude: Any = None,
        seed: int = 0,
        nonfinite: str = "raise",
        verify_every: int | None = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(inner_optimizer, name, **kwargs)
        check_choice("risk", risk, RISKS)
        check_integer("after", after, 1)
        if link is not None:
            Link.parse(link)
        if compute is not None and not compute > 0:
            raise ValueError(
                "compute must be the seconds of a step without an exchange, positive, "
                f"or None. Received: compute={compute!r}"
            )
        self.keep_arguments(
            risk=risk,
            link=link,
            after=after,
            compute=compute,
            carrier=carrier,
            exclude=exclude,
            seed=seed,
            nonfinite=nonfinite,
            verify_every=verify_every,
        )
        self._decision = None if decision is None else Decision.of(decision)
        self._sample: StepSample | None = None
        self._watch: ErrorWatch | None = None
        self._calls, self._watched_step, self._has_switched = 0, -1, False
        self.current = self._make_current()

    def _make_current(self):
        """Returns the wrapper of the choice, or that of the measurement."""
        names = "carrier", "exclude", "seed", "nonfinite", "verify_every"
        common = {name: getattr(self, name) for name in names}
        if self._decision is None:
            return Candidate(BFLOAT16).wrap(self.inner_optimizer, **common)
        if self._decision.candidate.keeps_momentum:
            compat.remove_momentum(self.inner_optimizer)
        return self._decision.wrap(self.inner_optimizer, **common)

    @property
    def decision(self) -> Decision | None:
        """The choice and its reasons; None before it is made."""
        return self._decision

    def __getattr__(self, name):
        """Returns an attribute of the wrapper that exchanges, or of the optimizer."""
        current = vars(self).get("current")
        if current is None or name.startswith("__"):
            return super().__getattr__(name)
        return getattr(current, name)

    # Building.

    @override
    def _build(self, variables):
        self._strategy = check_strategy(self)
        self._hosts = across_hosts(self._strategy)
        self.check_settings(self._strategy)
        self._build_current(variables)
        self.built = True

    def _build_current(self, variables):
        self.current.build(variables)
        plan = self.current.plan
        if plan.collectives.num_workers == 1:
            return
        if self._decision is None:
            self._check_measurable(plan)
            calls = self.inner_optimizer.gradient_accumulation_steps or 1
            self._sample = StepSample(plan, max(self.after - calls, 0))
            self.current.stepper.observers[_OBSERVER] = self._sample
            return
        self._warn_of_other_number(self._decision, plan.collectives.num_workers)
        if self._decision.candidate.has_unbiased_errors and not plan.devices:
            steps = [self.after * times for times in _WATCHED]
            self._watch = ErrorWatch(plan, steps)
            self.current.stepper.observers[_OBSERVER] = self._watch

    def _check_measurable(self, plan):
        if plan.devices:
            raise ValueError(
                "Auto measures workers with one device each. Expected: a method by "
                "name, such as QSGD, or decision=... of an earlier run. "
                f"Received: devices={plan.devices_per_worker} in each worker"
            )
        if self.link is None and self._hosts is None:
            raise ValueError(
                "The workers of one process have no network that could be measured. "
                "Expected: link='1gbit' or another rate. "
                f"Received: link=None, workers={plan.collectives.num_workers}"
            )

    def _warn_of_other_number(self, decision, number):
        if number != decision.workers and self._is_first_worker:
            logger.warning(
                "The decision was made for %d workers, and there are %d. Leave "
                "`decision` out to choose anew.",
                decision.workers,
                number,
            )

    @property
    def _is_first_worker(self):
        return self._hosts is None or self._hosts.rank == 0

    @property
    def variables(self):
        """The variables of the wrapper that exchanges."""
        return self.current.variables

    # The step.

    def apply(self, grads, trainable_variables=None):
        """Takes a step with the wrapper that exchanges.

        Arguments and errors are those of `CompressedOptimizer.apply`.
        """
        grads, variables = self.begin_step(grads, trainable_variables)
        if grads:
            self.current.apply(grads, variables)

    def verify(self, others=()):
        """Compares what the workers share, as `CompressedOptimizer.verify` does."""
        self.current.verify(others)

    @override
    def finalize_variable_values(self, var_list):
        self.current.finalize_variable_values(var_list)

    # The decision.

    @override
    def decide(self):
        """Chooses the method once the measurement is over, on all workers.

        `fit` calls it after each step. Later calls measure the errors again, rarely.

        Returns:
            True if the method has changed, so that the step must be traced anew.
        """
        self._calls += 1
        if self._sample is not None and self._sample.step + 1 >= self.after:
            self._choose(self._sample)
        elif self._watch is not None and self._calls % self.after == 0:
            self._look_at_errors(self._watch, self._decision)
        has_switched, self._has_switched = self._has_switched, False
        return has_switched

    def _choose(self, sample):
        """Makes the decision, and exchanges by it from now on."""
        began = time.perf_counter()
        measurement = Measurement(
            inner=self.inner_optimizer,
            plan=self.current.plan,
            risk=self.risk,
            link=self.link,
            exclude=self.exclude,
            after=self.after,
        )
        compute = self.compute or sample.compute_seconds()
        decision = measurement.decide(
            sample.gradients(), compute, reads_clock=None in (self.link, self.compute)
        )
        self._take(decision)
        if self._is_first_worker:
            logger.info(
                "Auto has chosen after %d steps, in %.1f s: %s\n%s",
                self.after,
                time.perf_counter() - began,
                decision.call(self.inner_optimizer),
                decision,
            )

    def _take(self, decision):
        """Exchanges by a decision from now on."""
        variables = compat.trainable_variables(self.inner_optimizer)
        self._decision, self._has_switched = decision, True
        self._sample = self._watch = None
        with self._strategy.scope():
            self.current = self._make_current()
            self._build_current(variables)

    def _look_at_errors(self, watch, decision):
        """Warns if the errors are beyond those that the risk allows."""
        step = watch.step
        if step <= self._watched_step:
            return
        self._watched_step = step
        number = self.current.plan.collectives.num_workers
        worst = check_errors(watch.read(), number, self._hosts)
        limit = decision.limit
        if worst.error > limit and self._is_first_worker:
            logger.warning(
                "Step %d: the gradient of %s has %.1f times the error that risk=%r "
                "allows. The choice stays. Expected: a new run with a larger `after` "
                "or another risk. Received: %s, error=%.2g, limit=%g",
                step,
                worst.layer,
                worst.error / limit,
                self.risk,
                decision.candidate.name,
                worst.error,
                limit,
            )

    def explain(self, print_fn: Callable[[str], Any] | None = None) -> None:
        """Prints all candidates and why each was left out.

        Args:
            print_fn: Called with each line instead of `print`.
        """
        write = print_fn or print
        if self._decision is not None:
            text = str(self._decision)
        elif self.built and self._sample is None:
            text = "One worker exchanges nothing: there is nothing to choose."
        else:
            text = f"Auto chooses after {self.after} steps, which travel as bfloat16."
        for line in text.splitlines():
            write(line)

    # State.

    @override
    def config_value(self, name):
        if name == _DECISION:
            return self._decision and self._decision.to_config()
        return super().config_value(name)

    def save_own_variables(self, store):
        """Saves the decision; `current` saves its own state."""
        if self._decision is not None:
            content = json.dumps(self._decision.to_config()).encode()
            store[_DECISION] = np.frombuffer(content, np.uint8)

    def load_own_variables(self, store):
        """Takes the decision of a file, before the state of `current` is read."""
        if not self.built or _DECISION not in store.keys():
            return
        content = np.asarray(store[_DECISION][()], np.uint8).tobytes()
        decision = Decision.of(json.loads(content))
        if self._decision is None or decision.candidate != self._decision.candidate:
            self._take(decision)
