"""The Keras face of a method: an optimizer whose gradients travel compressed."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import keras
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.assignment.compatibility import check_inner_optimizer
from tfgradcomp.assignment.layer_method import LayerMethod, MethodSettings
from tfgradcomp.assignment.policy import Policy, moments_compressor
from tfgradcomp.assignment.rules import named_rules
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.strategy import create_variables
from tfgradcomp.compressors import Compressor, WeightDecay
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.engine import moments as second
from tfgradcomp.engine.consistency_check import check_same_at_start, check_still_same
from tfgradcomp.engine.plan import Settings, make_plan
from tfgradcomp.engine.residual_watchdog import ResidualWatchdog
from tfgradcomp.engine.state import OptimizerState, can_restore, saved_fallback
from tfgradcomp.engine.step import Stepper, StepVariables
from tfgradcomp.engine.summary import Summarized
from tfgradcomp.engine.uncompressed_steps import UncompressedSteps
from tfgradcomp.fit.check_strategy import check_strategy
from tfgradcomp.methods import Method
from tfgradcomp.optimizers.wrapper import InnerOptimizer, OptimizerWrapper
from tfgradcomp.servers import Server
from tfgradcomp.transports import Costs, Transport

NONFINITE = ("raise", "skip")
# Arguments of the whole optimizer, whatever its method.
COMMON_ARGUMENTS = (
    "transport",
    "exclude",
    "min_size",
    "seed",
    "nonfinite",
    "bucket_bytes",
    "fallback",
    "warmup_steps",
    "dense_every",
    "sparse",
    "verify_every",
    "policy",
    "name",
)
# Settings that an equal plan does not show to be equal.
_COMPARED = (
    "method",
    "uncompressed_steps",
    "microbatches",
    "seed",
    "nonfinite",
    "verify_every",
)


class CompressedOptimizer(Summarized, OptimizerWrapper):
    r"""Wraps a Keras optimizer and exchanges compressed gradients between workers.

    Each worker holds its own mean gradient \( g^{(i)} \). In a step

    1. the inner optimizer's own rules come first: loss scale, gradient accumulation,
       `clipnorm`, `clipvalue`, `global_clipnorm`;
    2. `compressor` turns the flat vector of gradients into a payload, which travels
       as packed words;
    3. `server` combines the payloads of all workers into one reply;
    4. the inner optimizer applies the decoded reply, with its weight decay, its
       learning rate schedule and its moving averages.

    Weights stay bit-identical on all workers. A gradient with a NaN or an infinity on
    any worker makes every worker skip the step: weights, residuals, momenta and
    counters stay as they were.

    Some compressors need second moments, the sums over examples of the squares of the
    terms of a gradient. `model.fit` computes them and hands them over.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        method: A `tfgradcomp.methods.Method`, such as `methods.terngrad()`; or a
            `Compressor`, the worker's half of one that the next three arguments
            complete. It may be given as `compressor`, too.
        server: The server's half, if `method` is a compressor.
        block_size: Elements a block, if `method` is a compressor. None: a block is a
            parameter tensor. `"model"`: the whole model is one block.
        weight_decay: A `WeightDecay` that workers add to the reply, if `method` is a
            compressor, or None. The inner optimizer's `weight_decay` is another term,
            and may be used beside it.
        transport: `"all_gather"`, `"all_reduce"`, `"sharded"`, or a `Transport`.
            `"auto"` takes for each bucket the one that should be quickest on this
            cluster, among those that give the same bits; it measures at the first
            step, or takes the `tfgradcomp.transports.Costs` given.
        exclude: What is not compressed: `"last"` (the model's last layer), a pattern
            of variable paths (`"*/bias"`), `"norms_and_biases"`, a layer class or
            `"layer:ClassName"`, a function of a variable, or a list of these. It
            travels as float32 with the method's mathematics kept.
        policy: Methods for some variables, instead of the wrapper's own: pairs of a
            rule as in `exclude` and `"float32"` or `Wrapper.for_layers(...)`, of which
            the first that names a variable decides; or a function from a variable to
            such a method or None. See docs/policy.md.
        min_size: Variables with fewer elements are not compressed either. None: the
            method's `min_size`, 1024 for most.
        seed: Integer in [0, 2**63), the key of all random numbers.
        nonfinite: What follows a skipped step: `"raise"` an error that names the
            variable and the worker, or `"skip"`: count it in `skipped_steps`.
        bucket_bytes: The gradients travel in buckets of at least so many bytes, as
            float32, cut between blocks: the last layers' first, while others are
            computed, a smaller one of the first layers last. None: 16 MiB, or an
            eighth of a larger model. However they are cut, the result is the same.
        fallback: `"float32"`: gradients travel uncompressed, with the method's
            mathematics kept, where `transport="auto"` finds that to be quicker. That
            changes results; the choice is saved with the state and taken again by a run
            that resumes. None: compression goes on, and a line in the log says so.
        warmup_steps: The first steps, this many, travel as float32, with the method's
            mathematics kept: momentum runs, and nothing is owed.
        dense_every: Of so many steps the last one travels as float32 as well; what is
            owed waits. None: none.
        sparse: `"rows"`: of the table of an `Embedding` only the rows that a worker has
            touched travel, are updated and have their residuals and momenta changed.
            `"dense"`: all rows. Or rules as in `exclude`, for other tables.
        verify_every: `fit` calls `verify` after so many steps, besides each epoch.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is out of range; the message names the choices.

    Example:
        ```python
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1),
            ErrorFeedback(TopK(0.01)),
            Mean(TopK(0.01)),
        )
        model.compile(optimizer, "mse")
        ```
    """

    # The signature of a method's function takes their place in a `MethodWrapper`.
    argument_names = ("inner_optimizer", "method", *COMMON_ARGUMENTS)
    refused_arguments: ClassVar[tuple[str, ...]] = ()
    stepper_class: type[Stepper] = Stepper

    def __init_subclass__(cls, **kwargs: Any):
        cls.__signature__ = _signature(cls)
        super().__init_subclass__(**kwargs)

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        method: Method | Compressor | None = None,
        server: Server | None = None,
        block_size: int | str | None = None,
        weight_decay: WeightDecay | None = None,
        transport: str | Transport | Costs = "auto",
        exclude: Any = None,
        min_size: int | None = None,
        seed: int = 0,
        nonfinite: str = "raise",
        bucket_bytes: int | None = None,
        fallback: str | None = None,
        warmup_steps: int = 0,
        dense_every: int | None = None,
        sparse: Any = "rows",
        verify_every: int | None = None,
        policy: Any = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        compressor = kwargs.pop("compressor", method)
        super().__init__(inner_optimizer, name, **kwargs)
        if not isinstance(method, Method):
            method = self.make_method(compressor, server, block_size, weight_decay)
        check_choice("nonfinite", nonfinite, NONFINITE)
        check_integer("seed", seed, 0, 2**63)
        if verify_every is not None:
            check_integer("verify_every", verify_every, 1)
        min_size = method.min_size if min_size is None else min_size
        self.keep_arguments(
            method=method,
            compressor=method.compressor,
            server=method.server,
            block_size=method.block_size,
            weight_decay=method.weight_decay,
            transport=transport,
            exclude=exclude,
            min_size=min_size,
            seed=seed,
            nonfinite=nonfinite,
            bucket_bytes=bucket_bytes,
            fallback=fallback,
            warmup_steps=warmup_steps,
            dense_every=dense_every,
            sparse=sparse,
            verify_every=verify_every,
            policy=policy,
        )
        self.uncompressed_steps = UncompressedSteps(warmup_steps, dense_every)
        inner = self.inner_optimizer
        check_inner_optimizer(method, inner, self.stepper_class.sends_momenta)
        self._policy = Policy(policy, inner, min_size) if policy else None
        self.microbatches = method.microbatches
        if self._policy and not method.needs_second_moments:
            self.microbatches = self._policy.microbatches
        self._is_checked = False
        self._arrears = ResidualWatchdog()
        # Raises where an argument is out of range.
        self._settings()
        check_strategy(self)

    @classmethod
    def make_method(
        cls,
        method: Compressor | None = None,
        server: Server | None = None,
        block_size: int | str | None = None,
        weight_decay: WeightDecay | None = None,
        compressor: Compressor | None = None,
    ) -> Method:
        """Returns the method that the constructor's arguments describe.

        Raises:
            ValueError: If an argument is out of range.
        """
        worker: Any = method if compressor is None else compressor
        halves: dict[str, Any] = {"compressor": worker, "server": server}
        return Method(**halves, weight_decay=weight_decay, block_size=block_size)

    @classmethod
    def for_layers(cls, **arguments: Any) -> LayerMethod:
        """Returns the wrapper's method for some of a model's variables.

        Args:
            **arguments: The wrapper's arguments that describe its method, and
                `min_size`, which defaults to that of the optimizer with the policy.

        Raises:
            ValueError: If an argument is out of range, or one of the whole optimizer.
            TypeError: If an argument is missing or unknown.

        Example:
            ```python
            optimizer = tfgradcomp.TernGrad(
                keras.optimizers.SGD(0.1),
                policy=[("*/embeddings", tfgradcomp.Strom.for_layers(threshold=0.01))],
            )
            ```
        """
        own = {*inspect.signature(cls.make_method).parameters, "min_size"}
        wrong = sorted({*arguments} & {"inner_optimizer", *COMMON_ARGUMENTS} - own)
        if wrong:
            raise ValueError(
                f"{cls.__name__}.for_layers() takes the arguments of the method and "
                "`min_size`. The inner optimizer and the other arguments are those of "
                f"the wrapper whose `policy` it stands in. Received: {wrong}"
            )
        return LayerMethod(cls, arguments)

    @property
    def stepper(self) -> Stepper:
        """The stepper of the built optimizer, with its buckets and scalars."""
        return self._stepper

    def finalize_variable_values(self, var_list):
        """Ends training: averages of `use_ema` become the weights."""
        if self.built:
            self._stepper.raise_unreported()
            self._arrears.look(self._plan)
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

    def build(self, variables):
        """Creates the state of the method and of the inner optimizer."""
        if not self.built:
            create_variables(self.inner_optimizer, self._build, variables)

    def _build(self, variables):
        self._strategy = check_strategy(self)
        self.inner_optimizer.build(variables)
        self._bind()
        self.built = True

    def _bind(self, is_fallback: bool | None = None) -> None:
        """Puts together all that does not change from step to step."""
        variables = compat.trainable_variables(self)
        self._plan = make_plan(
            compat.references(variables),
            # A variable that Keras overwrites with its gradient takes no update.
            [not compat.is_overwritten(self.inner_optimizer, v) for v in variables],
            self._settings(),
            self._strategy,
            accumulates=bool(self.inner_optimizer.gradient_accumulation_steps),
            is_fallback=is_fallback,
        )
        buckets = self._plan.buckets
        varies = any(bucket.has_variable_length for bucket in buckets)
        self._scalars = StepVariables.create(self.seed, counts_moved=varies)
        self._state = OptimizerState(self.name, self._scalars, self._plan)
        compat.track(self, tf.nest.flatten([bucket.state for bucket in buckets]))
        self._stepper = self.stepper_class(
            self.inner_optimizer,
            buckets,
            self._scalars,
            self._plan.replicas,
            variables,
            self.nonfinite == "raise",
            self.uncompressed_steps,
            self._plan.collectives,
        )

    def _settings(self):
        common = {name: getattr(self, name) for name in Settings.names()}
        own = MethodSettings(self.method, self.min_size)
        return Settings(own, self._policy, **common)

    # The step.

    def apply(self, grads, trainable_variables=None, second_moments=None):
        r"""Exchanges the gradients and updates the variables.

        Args:
            grads: Gradients of this replica's share of the loss, which Keras divides
                by the number of replicas.
            trainable_variables: Their variables, in the same order.
            second_moments: For compressors that need them: where a gradient is
                \( \sum_z g_z \) over examples z, \( \sum_z g_z^2 \), element by element
                and in the units of `grads`, whatever scale is in them.

        Raises:
            TypeError: If a gradient is not of a float type.
            ValueError: If there is not a gradient, or None, for each variable; if the
                workers' models differ, at the first step; if second moments are given
                to a method that needs none, or not to one that does; if a state was
                restored in part only.
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
                moments = [moment_of[id(variable)] for variable in variables]
                self._stepper.apply(grads, moments, variables)

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was not finite."""
        return int(self._scalars.skipped_steps.numpy()) if self.built else 0

    def verify(self, others=()):
        """Compares what the workers share, as `fit` does after each epoch.

        Warns, too, where what is owed has outgrown a fixed threshold. All workers must
        call it, outside of a graph.

        Args:
            others: Further variables that they share.

        Raises:
            RuntimeError: On all, if weights, learning rates or shared state differ.
        """
        if self.built:
            self._arrears.look(self._plan)
            shared = [*self._state.shared_variables(), *others]
            check_still_same(self._plan.hosts, self.inner_optimizer, shared)

    def _check_workers(self):
        """Compares the workers, and finishes a restore, before the first step."""
        if self._is_checked:
            return
        self._state.check_restore()
        if self._plan.hosts is not None:
            settings = {name: getattr(self, name) for name in _COMPARED}
            settings["plan"] = self._plan.describe()
            check_same_at_start(self._plan.hosts, self.inner_optimizer, settings)
        self._state.finish_restore()
        self._is_checked = True

    # State and configuration.

    @override
    def config_value(self, name):
        value = super().config_value(name)
        if name == "transport" and not isinstance(value, str):
            # A transport that was handed in belongs to its process.
            return "auto"
        has_rules = name in ("exclude", "sparse", "policy")
        return named_rules(value) if has_rules else value

    def save_own_variables(self, store):
        """Saves the method's state, of this worker alone, by local reads."""
        if self.built:
            self._state.save(store)

    def load_own_variables(self, store):
        """Restores what `save_own_variables` saved, here or on another worker.

        All workers must load. Where the files have parts of the server's state, the
        workers join them: at once if they have taken a step, else before the first.

        Raises:
            ValueError: On all workers, if the state is not complete on one of them.
                Before the first step, `apply` raises it.
        """
        if not can_restore(self.name, self.built, store):
            return
        is_fallback = saved_fallback(store)
        if is_fallback != self._plan.is_fallback and self.fallback:
            with self._strategy.scope():
                self._bind(is_fallback)
        self._state.restore(store, joins_at_once=self._is_checked)


def _signature(cls: type[CompressedOptimizer]) -> inspect.Signature:
    """Returns a wrapper's signature, with the arguments that `**kwargs` stands for."""
    own = [*inspect.signature(cls.__init__).parameters.values()][1:]
    if any(one.kind is one.VAR_POSITIONAL for one in own):
        # Those of the method, as a `MethodWrapper` hands them on.
        method = inspect.signature(cls.make_method).parameters.values()
        own = [own[0], *method, own[-1]]
    if own[-1].kind is own[-1].VAR_KEYWORD:
        own.pop()
        base = inspect.signature(cls.__mro__[1]).parameters.values()
        left_out = {*cls.refused_arguments, *(one.name for one in own)}
        if "server" in (one.name for one in base):
            # A subclass has arguments of its own for its method.
            left_out |= {*inspect.signature(CompressedOptimizer.make_method).parameters}
        own += [
            one.replace(kind=one.KEYWORD_ONLY)
            for one in base
            if one.name not in left_out and one.kind is not one.VAR_KEYWORD
        ]
    return inspect.Signature(own)
