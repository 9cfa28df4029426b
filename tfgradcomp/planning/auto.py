"""An optimizer that chooses the method itself, after some steps as bfloat16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import across_hosts
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.core.logging import logger
from tfgradcomp.engine.create_variables import create_variables
from tfgradcomp.engine.settings_check import gather_json
from tfgradcomp.engine.summary import variables_to_build_for
from tfgradcomp.fit.check_strategy import check_strategy
from tfgradcomp.optimizers.wrapper import InnerOptimizer, OptimizerWrapper
from tfgradcomp.planning.arithmetic import measured_arithmetic, typical_arithmetic
from tfgradcomp.planning.candidates import BFLOAT16, LIMITS, RISKS, options
from tfgradcomp.planning.decision import Decision, decide
from tfgradcomp.planning.forecasts import Profile
from tfgradcomp.planning.layer_errors import squared_errors
from tfgradcomp.planning.network import Link, bits_per_second
from tfgradcomp.planning.sample import StepSample
from tfgradcomp.transports.costs import measure

_OBSERVER = "Auto"
_DECISION = "decision"


@keras.saving.register_keras_serializable("tfgradcomp")
class Auto(OptimizerWrapper):
    """Chooses a method for the model and the network, and trains with it."""

    needs_second_moments = False

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        risk: str = "low",
        link: str | None = None,
        after: int = 150,
        compute: float | None = None,
        decision: Decision | Mapping | str | Path | None = None,
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
            bits_per_second(link)
        self.keep_arguments(
            risk=risk,
            link=link,
            after=after,
            compute=compute,
            exclude=exclude,
            seed=seed,
            nonfinite=nonfinite,
            verify_every=verify_every,
        )
        self._decision = None if decision is None else Decision.of(decision)
        self._sample: StepSample | None = None
        self.current = self._wrapped()

    def _wrapped(self):
        """Returns the wrapper of the choice, or that of the measurement."""
        common = {
            name: getattr(self, name)
            for name in ("exclude", "seed", "nonfinite", "verify_every")
        }
        if self._decision is None:
            return BFLOAT16.wrap(self.inner_optimizer, **common)
        if self._decision.moves_momentum:
            compat.remove_momentum(self.inner_optimizer)
        return self._decision.candidate.wrap(self.inner_optimizer, **common)

    @property
    def decision(self) -> Decision | None:
        """The choice; None before it is made."""
        return self._decision

    def __getattr__(self, name):
        current = vars(self).get("current")
        if current is None or name.startswith("_"):
            return super().__getattr__(name)
        return getattr(current, name)

    # Building.

    def build(self, variables):
        """Creates the state of the wrapper that exchanges."""
        if not self.built:
            create_variables(self.inner_optimizer, self._build, variables)

    def _build(self, variables):
        self._strategy = check_strategy(self)
        self._hosts = across_hosts(self._strategy)
        self.check_settings(self._strategy)
        self._build_current(variables)
        self.built = True

    def _build_current(self, variables):
        self.current.build(variables)
        plan = self.current.plan
        if self._decision is None and plan.collectives.num_workers > 1:
            every = self.inner_optimizer.gradient_accumulation_steps or 1
            last = (max(self.after - every, 0), np.iinfo(np.int64).max)
            self._sample = StepSample(plan, [last])
            self.current.stepper.observers[_OBSERVER] = self._sample

    @property
    def variables(self):
        return self.current.variables

    def apply(self, grads, trainable_variables=None):
        grads, variables = self.begin_step(grads, trainable_variables)
        if grads:
            self.current.apply(grads, variables)

    def verify(self, others=()):
        """Compares what the workers share, as `CompressedOptimizer.verify` does."""
        self.current.verify(others)

    def finalize_variable_values(self, var_list):
        """Ends training as the wrapper that exchanges does."""
        self.current.finalize_variable_values(var_list)

    # The decision.

    def decide(self) -> bool:
        """Chooses the method, if the measurement is over and none is chosen yet."""
        if self._sample is None or self._sample.step + 1 < self.after:
            return False
        self._decision = self._decide()
        self._switch()
        return True

    def _switch(self):
        variables = compat.trainable_variables(self.inner_optimizer)
        self._sample = None
        with self._strategy.scope():
            self.current = self._wrapped()
            self._build_current(variables)

    def _decide(self) -> Decision:
        sample, plan = self._sample, self.current.plan
        workers = plan.collectives.num_workers
        gradients = sample.gradients()
        sums = {}
        for option in options(self.inner_optimizer):
            if RISKS.index(option.risk) > RISKS.index(self.risk) or option.risk == "none" or option.reason or not option.has_limit:
                continue
            rows = [squared_errors(option.candidate.method, one) for one in gradients]
            sums[option.name] = [
                np.sum([own for own, _ in rows], 0).tolist(),
                rows[0][1].tolist(),
            ]
        mine = {"errors": sums, "compute": self.compute or sample.compute_seconds()}
        all_ = [mine]
        if self._hosts is not None:
            all_ = gather_json(self._hosts, mine, "measurement")
        squares = gradients[0].squares(gradients[0].mean)
        errors = {}
        for name, (_, reply) in sums.items():
            own = np.sum([one["errors"][name][0] for one in all_], 0)
            ratio = np.sqrt((own / workers**2 + np.array(reply)) / np.maximum(squares, 1e-30))
            worst = int(ratio.argmax())
            errors[name] = float(ratio[worst]), gradients[0].names[worst]
        shapes = [tuple(v.shape) for v in plan.variables]
        link, profile = None, Profile(arithmetic=measured_arithmetic)
        if self.link:
            link = Link(bits_per_second(self.link))
            if self.compute:
                profile = Profile(arithmetic=typical_arithmetic)
        else:
            profile = profile._replace(costs=measure(self._hosts))
        with tf.init_scope():
            mine = decide(
                self.inner_optimizer, shapes, workers,
                max(one["compute"] for one in all_),
                risk=self.risk, link=link, link_name=self.link or "measured link",
                profile=profile, errors=errors,
            )
        if self._hosts is None:
            return mine
        found = gather_json(self._hosts, mine.to_config(), "decision")
        return Decision.of(found[0])
