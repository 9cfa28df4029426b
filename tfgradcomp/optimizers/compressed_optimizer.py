"""The Keras face of a method: an optimizer whose gradients travel compressed."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from typing_extensions import override

from tfgradcomp.assignment.compatibility import check_inner_optimizer
from tfgradcomp.assignment.layer_method import LayerMethod, MethodSettings
from tfgradcomp.assignment.policy import Policy
from tfgradcomp.assignment.rules import named_rules
from tfgradcomp.compressors import Compressor, WeightDecay
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.engine.plan import Settings
from tfgradcomp.engine.uncompressed_steps import UncompressedSteps
from tfgradcomp.fit.check_strategy import check_strategy
from tfgradcomp.methods import Method
from tfgradcomp.optimizers.exchange_optimizer import ExchangeOptimizer
from tfgradcomp.optimizers.signature import full_signature
from tfgradcomp.optimizers.wrapper import InnerOptimizer
from tfgradcomp.servers import Server
from tfgradcomp.transports import Costs, Transport

NONFINITE = ("raise", "skip")
# Arguments of the whole optimizer, whatever its method.
COMMON_ARGUMENTS = (
    "transport",
    "carrier",
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
    "allow_inner_momentum",
    "name",
)


class CompressedOptimizer(ExchangeOptimizer):
    r"""Wraps a Keras optimizer and exchanges compressed gradients between workers.

    Each worker holds its own mean gradient \( g^{(i)} \). In a step

    1. the inner optimizer's rules come first: loss scale, gradient accumulation,
       `clipnorm`, `clipvalue`, `global_clipnorm`;
    2. the method's compressor turns the flat vector of gradients into a payload, which
       travels as packed words;
    3. the method's server combines the payloads of all workers into a reply;
    4. the inner optimizer applies the decoded reply, with its weight decay, its
       learning rate schedule and its moving averages.

    Weights stay bit-identical on all workers. A gradient with a NaN or an infinity on
    any worker makes every worker skip the step: weights, residuals, momenta and
    counters stay as they were.

    Some compressors need second moments: the sums over examples of the squares of the
    terms of a gradient. `model.fit` computes them and passes them to `apply`.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        method: A `tfgradcomp.methods.Method`, such as `methods.terngrad()`; or a
            `Compressor`, the worker's half of a method that the next three arguments
            complete. The name `compressor` works as well.
        server: The server's half, if `method` is a compressor.
        block_size: Elements a block, if `method` is a compressor. None: a block is a
            parameter tensor. `"model"`: the whole model is one block.
        weight_decay: A `WeightDecay` that workers add to the reply, if `method` is a
            compressor, or None. It is independent of the inner optimizer's
            `weight_decay`.
        transport: `"all_gather"`, `"all_reduce"`, `"sharded"`, or a `Transport`.
            `"auto"` chooses for each bucket the transport that should be fastest on
            this cluster, among those that give the same bits. It measures at the first
            step, or uses the `tfgradcomp.transports.Costs` given.
        carrier: `"grpc"`: messages between processes travel by TensorFlow's own
            collectives. `"tcp"`: by TCP connections of this package, which take less
            time, with the same bits. `"auto"`: by these where workers train on CPUs
            and can connect, otherwise by gRPC. It has no effect within a process. See
            docs/transports.md.
        exclude: Variables that are not compressed: `"last"` (the model's last layer), a
            pattern of variable paths (`"*/bias"`), `"norms_and_biases"`, a layer class
            or `"layer:ClassName"`, a function of a variable, or a list of these. They
            travel as float32, with the method's mathematics kept.
        min_size: Variables with fewer elements are not compressed either. None: the
            method's `min_size`, 1024 for most methods.
        seed: Integer in [0, 2**63), the key of all random numbers.
        nonfinite: Consequence of a skipped step: `"raise"` an error that names the
            variable and the worker, or `"skip"`: count it in `skipped_steps`.
        bucket_bytes: Least size of a gradient bucket, in bytes of float32. Buckets are
            cut between blocks. The bucket of the last layers travels first, while
            other gradients are computed; the bucket of the first layers is smaller.
            None: 16 MiB, or an eighth of a larger model, with `PowerSGD` a half.
            Results do not depend on it.
        fallback: `"float32"`: gradients travel uncompressed, with the method's
            mathematics kept, if `transport="auto"` finds that to be faster. This
            changes results; the choice is saved with the state, and a run that resumes
            keeps it. None: gradients stay compressed, and a line in the log tells.
        warmup_steps: Number of steps at the start that travel as float32, with the
            method's mathematics kept: momenta are updated, residuals stay zero.
        dense_every: Every `dense_every`-th step travels as float32 as well, while
            residuals wait. None: no such step.
        sparse: `"rows"`: only the rows of an `Embedding` that a worker has touched
            travel, are updated and have their residuals and momenta changed.
            `"dense"`: all rows. Or rules as in `exclude`, for other tables.
        verify_every: Number of steps after which `fit` calls `verify`, besides each
            epoch; None for epochs alone.
        policy: Other methods for some variables: pairs of a rule as in `exclude` and a
            method (`methods.terngrad()`, `Wrapper.for_layers(...)` or `"float32"`), of
            which the first pair that names a variable decides; or a function from a
            variable to such a method or None. See docs/policy.md.
        allow_inner_momentum: Whether the inner optimizer may have momentum or averages
            of squares where they are known to fail: behind error feedback, and with a
            method that holds a momentum itself.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is out of range, or the inner optimizer does not go
            with the method; the message names the choices.

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

    def __init_subclass__(cls, **kwargs: Any):
        cls.__signature__ = full_signature(cls)
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
        allow_inner_momentum: bool = False,
        carrier: str = "auto",
        name: str | None = None,
        **kwargs: Any,
    ):
        compressor = kwargs.pop("compressor", None)
        super().__init__(inner_optimizer, name, **kwargs)
        parts = {
            "server": server,
            "block_size": block_size,
            "weight_decay": weight_decay,
            "compressor": compressor,
        }
        if isinstance(method, Method):
            _refuse_other(method, **parts)
        else:
            method = self.make_method(method, **parts)
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
            carrier=carrier,
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
            allow_inner_momentum=allow_inner_momentum,
        )
        self.uncompressed_steps = UncompressedSteps(warmup_steps, dense_every)
        inner = self.inner_optimizer
        if not (allow_inner_momentum or self.stepper_class.sends_momenta):
            check_inner_optimizer(method, inner)
        self._policy = None
        if policy:
            self._policy = Policy(policy, inner, min_size, allow_inner_momentum)
        self.microbatches = method.microbatches
        if self._policy and not method.needs_second_moments:
            self.microbatches = self._policy.microbatches
        # Raises if an argument is out of range.
        self.plan_settings()
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
            ValueError: If an argument is out of range, or both `method` and
                `compressor` are given.
        """
        if method is not None and compressor is not None:
            raise ValueError(
                "The worker's half is given once, as `method` or as `compressor`. "
                f"Received: method={method!r}, compressor={compressor!r}"
            )
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

    @override
    def plan_settings(self):
        common = {name: getattr(self, name) for name in Settings.names()}
        own = MethodSettings(self.method, self.min_size)
        return Settings(own, self._policy, **common)

    @override
    @classmethod
    def arguments_from(cls, config, custom_objects=None):
        arguments = super().arguments_from(config, custom_objects)
        if "allow_inner_momentum" in cls.argument_names:
            # Before version 0.3 only methods with a momentum refused a second one.
            arguments.setdefault("allow_inner_momentum", True)
        return arguments

    @override
    def config_value(self, name):
        value = super().config_value(name)
        if name == "transport" and not isinstance(value, str):
            # A transport that was handed in belongs to its process.
            return "auto"
        has_rules = name in ("exclude", "sparse", "policy")
        return named_rules(value) if has_rules else value


def _refuse_other(method: Method, **parts: Any) -> None:
    """Raises ValueError if a method is given, and parts that it does not have."""
    for name, value in parts.items():
        if value is not None and value != getattr(method, name):
            raise ValueError(
                f"{name} is part of the method, so it cannot be given beside it. "
                f"Received: method={method.name}, {name}={value!r}"
            )
