"""The Keras side of the engine: an optimizer that has a plan, a state and a stepper."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfgradcomp.assignment.policy import Policy, moments_compressor
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.engine import moments as second
from tfgradcomp.engine.consistency_check import (
    check_same_at_start,
    check_same_gradients,
    check_still_same,
)
from tfgradcomp.engine.plan import Plan, Settings, make_plan
from tfgradcomp.engine.residual_watchdog import ResidualWatchdog
from tfgradcomp.engine.state import OptimizerState, can_restore, saved_fallback
from tfgradcomp.engine.step import Stepper
from tfgradcomp.engine.step_variables import StepVariables
from tfgradcomp.engine.summary import (
    print_summary,
    traffic_of,
    variables_to_build_for,
)
from tfgradcomp.engine.uncompressed_steps import UncompressedSteps
from tfgradcomp.engine.variable_copies import originals_of
from tfgradcomp.fit.check_strategy import check_strategy
from tfgradcomp.methods import Method
from tfgradcomp.optimizers.wrapper import InnerOptimizer, OptimizerWrapper
from tfgradcomp.transports import Traffic


class ExchangeOptimizer(OptimizerWrapper):
    """An optimizer that exchanges gradients by a plan.

    `CompressedOptimizer`, its subclass, has the arguments and makes the settings of the
    plan from them.

    Attributes:
        method: The method.
        seed: The key of all random numbers.
        nonfinite: `"raise"` or `"skip"`.
        fallback: `"float32"` or None.
        uncompressed_steps: The steps that travel as float32.
        stepper_class: Class of the stepper.
    """

    method: Method
    seed: int
    nonfinite: str
    fallback: str | None
    uncompressed_steps: UncompressedSteps
    stepper_class: ClassVar[type[Stepper]] = Stepper
    # Whether weights differ between workers from one exchange to the next.
    has_local_steps: ClassVar[bool] = False
    # Whether the inner optimizer must be unbuilt, so that nothing else shares it.
    needs_new_inner: ClassVar[bool] = False
    _policy: Policy | None

    def __init__(
        self, inner_optimizer: InnerOptimizer, name: str | None, **kwargs: Any
    ):
        super().__init__(inner_optimizer, name, **kwargs)
        self._is_checked = False
        # Sets of variables with a gradient that the workers have compared.
        self._compared_positions: set[frozenset[int]] = set()
        self._watchdog = ResidualWatchdog()

    @abc.abstractmethod
    def plan_settings(self) -> Settings:
        """Returns the settings of the plan.

        Raises:
            ValueError: If one is out of range.
        """

    @property
    def plan(self) -> Plan:
        """The plan of the built optimizer."""
        return self._plan

    @property
    def stepper(self) -> Stepper:
        """The stepper of the built optimizer, with its buckets and variables."""
        return self._stepper

    def finalize_variable_values(self, var_list):
        """Ends training: averages of `use_ema` become the weights."""
        if self.built:
            self._stepper.raise_unreported(self._state.skipped_before)
            self._watchdog.look(self._plan)
        self.inner_optimizer.finalize_variable_values(var_list)

    @property
    def variables(self):
        """The inner optimizer's variables, then the method's state."""
        own = self._state.variables() if self.built else []
        return self.inner_optimizer.variables + own

    # Building.

    @property
    def needs_second_moments(self) -> bool:
        """True if `apply` needs second moments."""
        return moments_compressor(self.method, self._policy).needs_second_moments

    def build(self, variables: Any, group: Collection[int] | None = None) -> None:
        """Creates the state of the method and of the inner optimizer.

        Args:
            variables: The variables that the inner optimizer trains.
            group: The positions of those that are exchanged here; None: all.
        """
        if not self.built:
            self._group = group
            super().build(variables)

    def _build(self, variables):
        self._strategy = check_strategy(self)
        if self._group is None:
            # Otherwise the divider of the variables has compared the settings.
            self.check_settings(self._strategy)
        self.inner_optimizer.build(variables)
        self._bind()
        self.built = True

    def _bind(self, is_fallback: bool | None = None) -> None:
        """Creates the plan, the state and the stepper."""
        variables = compat.trainable_variables(self)
        self._plan = make_plan(
            originals_of(variables),
            # A variable that Keras overwrites with its gradient takes no update.
            [
                (self._group is None or index in self._group)
                and not compat.is_overwritten(self.inner_optimizer, variable)
                for index, variable in enumerate(variables)
            ],
            self.plan_settings(),
            self._strategy,
            accumulates=bool(self.inner_optimizer.gradient_accumulation_steps),
            is_fallback=is_fallback,
        )
        buckets = self._plan.buckets
        self._scalars = StepVariables.create(self.seed, buckets)
        self._state = OptimizerState(
            self.name, self._scalars, self._plan, self.settings_of_state()
        )
        compat.track(self, tf.nest.flatten([bucket.state for bucket in buckets]))
        raises = self.nonfinite == "raise"
        self._stepper = self.stepper_class(
            self.inner_optimizer, self._plan, self._scalars, raises
        )

    def settings_of_state(self) -> dict[str, list[int]]:
        """Returns numbers that a saved state must have in common with this one."""
        return {}

    # The step.

    def apply(self, grads, trainable_variables=None, second_moments=None):
        r"""Exchanges the gradients and updates the variables.

        Args:
            grads: Gradients of this replica's share of the loss, which Keras divides
                by the number of replicas.
            trainable_variables: Their variables, in the same order.
            second_moments: For compressors that need them: \( \sum_z g_z^2 \) for a
                gradient \( \sum_z g_z \) over examples z, element by element and in the
                units of `grads`, whatever their scale.

        Raises:
            TypeError: If a gradient is not of a float type.
            ValueError: If the numbers of gradients and variables differ; at the first
                step, if the workers' models differ; if a variable has a gradient on
                some workers only; if second moments are missing, or
                given to a method that needs none; if a state was restored in part only.
            tf.errors.InvalidArgumentError: If a gradient is not finite and
                `nonfinite="raise"`.
        """
        grads, variables = self.begin_step(grads, trainable_variables)
        if not grads:
            return
        self._check_workers()
        compressor = moments_compressor(self.method, self._policy)
        moments = second.checked(second_moments, grads, compressor, type(self).__name__)
        moment_of = dict(zip(map(id, variables), moments, strict=True))
        with keras.name_scope(self.name):
            grads, variables = compat.filtered(self.inner_optimizer, grads, variables)
            if grads:
                self._check_gradients(variables)
                moments = [moment_of[id(variable)] for variable in variables]
                self._stepper.apply(grads, moments, variables)

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was not finite."""
        return int(self._scalars.skipped_steps.numpy()) if self.built else 0

    def verify(self, others=()):
        """Compares what the workers share, as `fit` does after each epoch.

        It also warns if residuals have outgrown a fixed threshold. All workers must
        call it, outside of a graph.

        Args:
            others: Further variables that workers share.

        Raises:
            RuntimeError: On all workers, if weights, learning rates or shared state
                differ.
        """
        if self.built:
            shared = [*self.shared_state(), *others]
            check_still_same(self._plan.hosts, self.inner_optimizer, shared)

    def shared_state(self) -> list:
        """Returns the method's state that workers share; warns as `verify` does."""
        self._watchdog.look(self._plan)
        return self._state.shared_variables()

    def _check_workers(self):
        """Compares the workers, and finishes a restore, before the first step."""
        if self._is_checked:
            return
        self._state.check_restore()
        if self._plan.hosts is not None:
            plan = self._plan.describe()
            check_same_at_start(self._plan.hosts, self.inner_optimizer, plan)
        self._state.finish_restore()
        self._is_checked = True

    def _check_gradients(self, variables):
        """Compares which variables have a gradient, once for each set of them."""
        inner = self.inner_optimizer
        positions = compat.positions(inner, variables)
        if self._plan.hosts is None or positions in self._compared_positions:
            return
        check_same_gradients(self._plan.hosts, inner, positions)
        self._compared_positions.add(positions)

    # Reports.

    @property
    def traffic(self) -> Traffic:
        """The traffic of one worker in a compressed step, by the fields that travel.

        Raises:
            ValueError: If the optimizer is not built yet.
        """
        if not self.built:
            raise ValueError(
                "`traffic` depends on the model's variables; ask after `fit`, or call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        return traffic_of(self._plan, self._scalars.traffic_counters)

    def summary(
        self,
        model: keras.Model | None = None,
        line_length: int | None = None,
        print_fn: Callable[[str], Any] | None = None,
    ) -> None:
        """Prints which variables are compressed, how they travel, and why others not.

        Totals follow: bits an element, and bytes a step beside those of float32.

        Args:
            model: The model to build the optimizer for; None: the model that was
                compiled with it. If there are several processes, all workers must have
                built the optimizer before.
            line_length: The most characters of a line; None: any number.
            print_fn: Called with each line instead of `print`.

        Raises:
            ValueError: If the optimizer is not built and cannot be built here.
        """
        if not self.built:
            self.build(variables_to_build_for(self, model))
        print_summary(self._plan, self.traffic, line_length, print_fn)

    # State.

    def save_own_variables(self, store):
        """Saves the method's state, of this worker alone, by local reads."""
        if self.built:
            self._state.save(store)

    def load_own_variables(self, store):
        """Restores what `save_own_variables` saved, here or on another worker.

        All workers must load. If the files have parts of the server's state, the
        workers join them: at once if they have taken a step, else before the first
        step.

        Raises:
            ValueError: On all workers, if the state is not complete on one of them.
                Before the first step, `apply` raises it. If `fallback="float32"` chose
                otherwise in the file, and a step has been taken here.
        """
        if not can_restore(self.name, self.built, store):
            return
        is_fallback = saved_fallback(store)
        if is_fallback != self._plan.is_fallback and self.fallback:
            if self._is_checked:
                names = {True: "float32", False: self.method.name}
                raise ValueError(
                    f"The state of {self.name} was saved by a training that used "
                    f"{names[is_fallback]}, and fallback='float32' has chosen "
                    f"{names[not is_fallback]} here. Expected: a file that is loaded "
                    "before the first step, or a model that is compiled with a new "
                    f"optimizer. Received: steps={int(self.iterations)}"
                )
            with self._strategy.scope():
                self._bind(is_fallback)
        self._state.restore(store, joins_at_once=self._is_checked)
