"""Local steps: workers train on their own, and exchange what has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.collectives import across_hosts
from tfgradcomp.compat import inner_optimizer as compat
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.compat.strategy import create_variables
from tfgradcomp.core.arguments import check_instance, check_integer
from tfgradcomp.optimizers.agreement import check_same_at_start
from tfgradcomp.optimizers.compressed_optimizer import CompressedOptimizer
from tfgradcomp.optimizers.dense import with_values
from tfgradcomp.optimizers.summary import variables_to_build_for
from tfgradcomp.optimizers.supported import prepare
from tfgradcomp.optimizers.wrapper import InnerOptimizer, OptimizerWrapper
from tfgradcomp.transports import Traffic


class LocalSteps(OptimizerWrapper):
    r"""Takes H steps on each worker by itself, then exchanges the sum of them.

    Each worker i trains its own weights \( x_i \) by `inner_optimizer`, and nothing
    travels. After H = `every` steps the difference from the common weights
    \( \bar x \), the anchor, is the gradient that `outer` compresses, exchanges and
    takes a step with:

    \( \Delta_i = \bar x - x_i, \qquad \bar x \leftarrow \mathrm{outer}(\bar x,
    \Delta_1 \dots \Delta_N), \qquad x_i \leftarrow \bar x \)

    Messages of 1 bit an element every 16 steps are 512 times fewer bytes than float32
    in each step. With an `outer` that loses nothing and takes SGD(1), \( \bar x \) is
    the mean of the workers' weights; with H = 1 and SGD inside as well, it is
    synchronous SGD.

    All workers have the same weights, to the bit, after each exchange. One comes also
    as each epoch of `fit` ends, and before `evaluate` and `predict`; `synchronize` asks
    for one anywhere else. A model that is saved between two exchanges holds this
    worker's weights. The inner optimizer's state is each worker's own: backups, which
    every worker writes, hold it, and so a run that resumes between two exchanges ends
    in the same bits.

    A step whose gradient is not finite is left out, on that worker alone (several
    devices of one process do so together), and counted in `skipped_steps`. The next
    `synchronize` raises an error, unless `outer.nonfinite` is `"skip"`.

    Args:
        inner_optimizer: The optimizer of the local steps: a Keras optimizer, its name
            or its config.
        outer: A `CompressedOptimizer`, such as `DistEFBlockSGDM(SGD(0.7))`. Its
            learning rate multiplies whole differences of weights: about 1, less with
            momentum.
        every: H.
        warmup_steps: In the first steps, this many, there is an exchange after each.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is out of range, if `outer` needs second moments, or
            if the inner optimizer averages weights (`use_ema`).

    Example:
        ```python
        optimizer = tfgradcomp.LocalSteps(
            keras.optimizers.Adam(1e-3),
            tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(0.7)),
            every=16,
        )
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```

    References:
        Stich, Local SGD Converges Fast and Communicates Little, 2018; Basu et al.,
        Qsparse-local-SGD, 2019; Douillard et al., DiLoCo, 2023.
    """

    config_arguments: ClassVar[tuple[str, ...]] = ("outer", "every", "warmup_steps")
    needs_second_moments = False

    def __init__(
        self,
        inner_optimizer: InnerOptimizer,
        outer: CompressedOptimizer,
        every: int = 16,
        warmup_steps: int = 0,
        name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(inner_optimizer, name, **kwargs)
        check_instance("outer", outer, CompressedOptimizer)
        check_integer("every", every, 1)
        check_integer("warmup_steps", warmup_steps, 0)
        if outer.needs_second_moments:
            raise ValueError(
                "What `outer` compresses is a difference of weights, which has no "
                "second moments over examples. Expected: a method without, such as "
                f"DistEFBlockSGDM. Received: outer={type(outer).__name__}"
            )
        if self.inner_optimizer.use_ema:
            raise ValueError(
                "Averages of weights that differ between workers are of no use. "
                "Expected: `use_ema` of the optimizer in `outer`, which trains the "
                "common weights. Received: inner_optimizer.use_ema=True"
            )
        self.outer = outer
        self.every, self.warmup_steps = every, warmup_steps
        self._is_checked = False
        prepare(self)

    # Building.

    def build(self, variables):
        """Creates the anchors, and the state of both optimizers."""
        if not self.built:
            create_variables(self.inner_optimizer, self._build, variables)

    def _build(self, variables):
        self._strategy = prepare(self)
        self._hosts = across_hosts(self._strategy)
        self.inner_optimizer.build(variables)
        self._anchors = [compat.copy_of(self, variable) for variable in variables]
        # Steps since the last exchange, and steps left out.
        self._counts = PerReplicaVariable(tf.zeros([2], tf.int64), "local_steps")
        compat.track(self, [self._counts])
        self.outer.build(self._anchors)
        self._exchange_now = tf.function(self._exchange)
        self.built = True

    @property
    def variables(self):
        """The inner optimizer's variables, the anchors, the variables of `outer`."""
        own = [*self._anchors, self._counts] if self.built else []
        return self.inner_optimizer.variables + own + self.outer.variables

    @property
    def verify_every(self) -> int | None:
        """The argument of `outer`: `fit` compares the anchors after so many steps."""
        return self.outer.verify_every

    @property
    def skipped_steps(self) -> int:
        """Steps that this worker left out because a gradient was not finite."""
        return int(self._counts.numpy()[1]) if self.built else 0

    @property
    def traffic(self) -> Traffic:
        """The traffic of one worker in a step, as the mean over `every` steps.

        Raises:
            ValueError: If the optimizer is not built yet.
        """
        whole = self.outer.traffic
        names = "words_sent", "words_received", "elements_sent"
        means = {name: getattr(whole, name) / self.every for name in names}
        return dataclasses.replace(whole, **means)

    def summary(
        self,
        model: keras.Model | None = None,
        line_length: int | None = None,
        print_fn: Callable[[str], Any] | None = None,
    ) -> None:
        """Prints what travels in an exchange, every `every` steps, as `outer` does.

        Args:
            model: As `CompressedOptimizer.summary` takes it, like all arguments.
            line_length: Characters a line.
            print_fn: Called with each line instead of `print`.

        Raises:
            ValueError: If the optimizer is not built, and is not to be built here.
        """
        if not self.built:
            self.build(variables_to_build_for(self, model))
        self.outer.summary(line_length=line_length, print_fn=print_fn)
        (print_fn or print)(f"An exchange every {self.every} steps")

    # The step.

    def apply(self, grads, trainable_variables=None):
        """Takes a step on this replica alone, and an exchange if one is due.

        Args:
            grads: Gradients of this replica's share of the loss, which Keras divides
                by the number of replicas.
            trainable_variables: Their variables, in the same order.

        Raises:
            ValueError: If there is not a gradient, or None, for each variable; if the
                workers' models or arguments differ, at the first step.
        """
        grads, variables = self.begin_step(grads, trainable_variables)
        if not grads:
            return
        self._check_workers()
        with keras.name_scope(self.name):
            grads, variables = compat.filtered(self.inner_optimizer, grads, variables)
            if grads:
                self._take(grads, variables)

    def _take(self, gradients, variables):
        collectives = self.outer.stepper.collectives
        number = collectives.num_workers
        gradients = with_values(
            lambda values: [g * tf.cast(number, g.dtype) for g in values], gradients
        )
        values = [getattr(gradient, "values", gradient) for gradient in gradients]
        is_finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(value)) for value in values]
        )
        if number > collectives.num_processes:
            # Replicas of one process enter a conditional together.
            flag = tf.cast(tf.logical_not(is_finite), tf.float32)[tf.newaxis]
            is_finite = collectives.max(flag, "local_steps")[0] < 1
        counts = tf.convert_to_tensor(self._counts)
        is_warmup = tf.convert_to_tensor(self.outer.iterations) < self.warmup_steps

        def step(gradients):
            compat.apply_alone(self.inner_optimizer, gradients, variables)

        conditional(is_finite, step, lambda gradients: None, args=(gradients,))
        left_out = tf.cast(tf.logical_not(is_finite), tf.int64)
        self._counts.assign(counts + tf.stack([1, left_out]))
        is_due = tf.logical_or(counts[0] + 1 >= self.every, is_warmup)
        conditional(is_due, self._exchange, lambda: None)

    def _exchange(self):
        """Exchanges what the weights have moved since the last time."""
        variables = compat.trainable_variables(self.inner_optimizer)
        number = self.outer.stepper.collectives.num_workers
        pairs = list(zip(self._anchors, variables, strict=True))
        moved = [
            (tf.convert_to_tensor(anchor) - tf.convert_to_tensor(variable)) / number
            for anchor, variable in pairs
        ]
        # Keras divides by N, too.
        self.outer.apply(moved, self._anchors)
        for anchor, variable in pairs:
            variable.assign(tf.convert_to_tensor(anchor))
        self._counts.assign(tf.convert_to_tensor(self._counts) * [0, 1])

    @override
    def synchronize(self):
        """Exchanges what the weights have moved, so that they are equal everywhere.

        All workers must call it, outside of a graph. `fit` does as each epoch ends,
        `evaluate` and `predict` do as they begin.

        Raises:
            FloatingPointError: On all workers, if steps were left out because a
                gradient was not finite, and `outer.nonfinite` is `"raise"`.
        """
        if not self.built:
            return
        steps, left_out = self._counts.numpy().tolist()
        if not steps:
            return
        self._strategy.run(self._exchange_now)
        rows = np.array([[left_out]])
        if self._hosts:
            rows = self._hosts.gather(tf.constant([left_out]), "local_steps").numpy()
        by_rank = dict(enumerate(rows[:, 0].tolist()))
        if rows.any() and self.outer.nonfinite == "raise":
            raise FloatingPointError(
                "Local steps were left out because a gradient was NaN or Inf. Lower "
                "the learning rate, clip (clipnorm=...), or go on with "
                f"outer.nonfinite='skip'. Received: steps left out by worker={by_rank}"
            )

    def verify(self):
        """Compares what the workers share, as `fit` does after each epoch.

        These are the anchors and the state of `outer`, and the weights as well where no
        step has followed an exchange. All workers must call it, outside of a graph.

        Raises:
            RuntimeError: On all, if any differ.
        """
        if self.built:
            is_between = self._counts.numpy()[0]
            weights = compat.trainable_variables(self.inner_optimizer)
            self.outer.verify([] if is_between else weights)

    def _check_workers(self):
        """Compares what decides when workers meet, before the first step."""
        if self._is_checked:
            return
        if self._hosts is not None:
            settings = {
                "local_optimizer": compat.describe(self.inner_optimizer),
                "every": self.every,
                "warmup_steps": self.warmup_steps,
            }
            check_same_at_start(self._hosts, self.outer.inner_optimizer, settings)
        self._is_checked = True

    # State.

    def save_own_variables(self, store):
        """Saves the anchors and the counts, of this worker alone, by local reads."""
        if self.built:
            for index, anchor in enumerate(self._anchors):
                store[f"anchor_{index}"] = anchor.numpy()
            store["local_steps"] = self._counts.local_values()

    def load_own_variables(self, store):
        """Restores what `save_own_variables` saved.

        Raises:
            ValueError: If it is not of such an optimizer.
        """
        if not self.built:
            return
        names = [f"anchor_{index}" for index in range(len(self._anchors))]
        missing = [name for name in (*names, "local_steps") if name not in store]
        if missing:
            raise ValueError(
                f"The file holds no state of {self.name}. Expected: one that was saved "
                "with LocalSteps and the same model; to use the weights alone, load "
                "them into a model that is not compiled, and compile it afterwards. "
                f"Received: missing={missing}"
            )
        for name, anchor in zip(names, self._anchors, strict=True):
            anchor.assign(store[name])
        self._counts.assign_local_values(np.asarray(store["local_steps"]))
