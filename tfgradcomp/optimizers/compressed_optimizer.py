"""The one Keras class: an optimizer whose gradients travel compressed."""

from __future__ import annotations

import copy
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.compressors.base import Compressor, Context, Layout
from tfgradcomp.compressors.weight_decay import WeightDecay
from tfgradcomp.monitoring.traffic import Traffic
from tfgradcomp.optimizers import finite_vote
from tfgradcomp.optimizers.arguments import (
    check_choice,
    check_integer,
    refuse_wrappers,
)
from tfgradcomp.optimizers.channel import Channel
from tfgradcomp.optimizers.partition import compressed_positions, rules_of
from tfgradcomp.seam import inner_optimizer as seam
from tfgradcomp.seam.conditional import conditional
from tfgradcomp.seam.fingerprint import check_same_everywhere, path_of
from tfgradcomp.seam.multi_worker_fit import enable_multi_worker_fit
from tfgradcomp.seam.per_worker_variable import PerWorkerVariable
from tfgradcomp.servers.base import Server
from tfgradcomp.transports import NAMES as TRANSPORTS
from tfgradcomp.transports import Transport, choose, collectives
from tfgradcomp.wire.words import message_words

NONFINITE = ("raise", "skip")


class CompressedOptimizer(keras.optimizers.Optimizer):
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

    `learning_rate`, `iterations` and the like are those of the inner optimizer.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        compressor: The worker's half of the method.
        server: The server's half.
        block_size: What a block of the method is. None: a parameter tensor. An
            integer: that many elements of the flat vector. `"model"`: all of it.
        weight_decay: A `WeightDecay` that workers add to the reply, or None. The
            inner optimizer's own `weight_decay` is something else and works too.
        transport: `"auto"`, `"all_gather"`, `"all_reduce"`, or a `Transport`.
        exclude: What is not compressed: `"last"` (the model's last layer), a pattern
            of variable paths (`"*/bias"`), a layer class or `"layer:ClassName"`, a
            function of a variable, or a list of these. It travels as float32 with
            the method's mathematics kept.
        min_size: Variables with fewer elements are not compressed either.
        seed: Integer in [0, 2**63), the key of all random numbers.
        nonfinite: What follows a skipped step: `"raise"` an error that names the
            variable and the worker, or `"skip"`: count it in `skipped_steps`.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is out of range; the message names the choices.

    Example:
        ```python
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.1),
            compressor=ErrorFeedback(TopK(0.01)),
            server=Mean(TopK(0.01)),
        )
        model.compile(optimizer, "mse")
        ```
    """

    def __init__(
        self,
        inner_optimizer,
        compressor: Compressor,
        server: Server,
        block_size: int | str | None = None,
        weight_decay: WeightDecay | None = None,
        transport: str | Transport = "auto",
        exclude=None,
        min_size: int = 1024,
        seed: int = 0,
        nonfinite: str = "raise",
        name: str | None = None,
        **kwargs,
    ):
        if kwargs:
            raise ValueError(
                f"{type(self).__name__} does not take {sorted(kwargs)}: arguments of "
                "the update (learning_rate, clipnorm, use_ema, ...) belong to "
                f"`inner_optimizer`. Received: {kwargs}"
            )
        super().__init__(learning_rate=0.0, name=name)
        inner_optimizer = keras.optimizers.get(inner_optimizer)
        refuse_wrappers(inner_optimizer)
        check_choice("nonfinite", nonfinite, NONFINITE)
        if not isinstance(transport, Transport):
            check_choice("transport", transport, TRANSPORTS)
        check_integer("min_size", min_size, 0)
        check_integer("seed", seed, 0, 2**63)
        rules_of(exclude)
        if block_size not in (None, "model"):
            check_integer("block_size", block_size, 1)
        for argument, value, kind in (
            ("compressor", compressor, Compressor),
            ("server", server, Server),
        ):
            if not isinstance(value, kind):
                raise ValueError(
                    f"{argument} must be a {kind.__name__}. "
                    f"Received: {argument}={value!r}"
                )
        self.inner_optimizer = inner_optimizer
        # Subclasses have arguments of the same names and a meaning of their own.
        self.compressor = self._compressor = compressor
        self.server = self._server = server
        self.block_size = self._block_size = block_size
        self.weight_decay = self._decay = weight_decay
        self.transport = transport
        self.exclude = exclude
        self.min_size = min_size
        self.seed = seed
        self.nonfinite = nonfinite
        self._is_checked = False
        self._prepare_strategy()

    # What Keras asks of an optimizer, answered by the inner one.

    @property
    def learning_rate(self):
        """The inner optimizer's learning rate; settable."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate):
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self):
        """The inner optimizer's number of steps."""
        return self.inner_optimizer.iterations

    @property
    def loss_scale_factor(self):
        """The inner optimizer's loss scale."""
        return self.inner_optimizer.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value):
        # Keras' constructor sets it before there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            self.inner_optimizer.loss_scale_factor = value

    def scale_loss(self, loss):
        """Scales the loss as the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list):
        """Ends training: averages of `use_ema` become the weights."""
        self._raise_unreported()
        self.inner_optimizer.finalize_variable_values(var_list)

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        """Not to be had: workers cannot exchange gradients without variables.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{type(self).__name__} keeps residuals in variables and exchanges "
            "gradients between workers, which `stateless_apply` cannot. Expected: "
            "`apply(gradients, variables)` or `model.fit`, with the TensorFlow "
            "backend."
        )

    @property
    def variables(self):
        """The method's state, then the inner optimizer's variables."""
        return self._own_state() + self.inner_optimizer.variables

    # Building.

    def _prepare_strategy(self):
        strategy = tf.distribute.get_strategy()
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            raise ValueError(
                f"{type(self).__name__} works without a strategy, under "
                "MirroredStrategy and under MultiWorkerMirroredStrategy. "
                f"Received: {type(strategy).__name__}"
            )
        if tf.distribute.has_strategy():
            enable_multi_worker_fit()
        return strategy

    def build(self, variables):
        """Creates the state of the method and of the inner optimizer."""
        if self.built:
            return
        strategy = self._prepare_strategy()
        self.inner_optimizer.build(variables)
        super().build(variables)
        if isinstance(self.transport, Transport):
            moves = self.transport.collectives
        else:
            moves = collectives.for_strategy(strategy)
        self._collectives = moves
        self._channels = tuple(self._make_channels(list(variables), moves))
        self._seed = PerWorkerVariable(tf.constant(self.seed, tf.int64), "seed")
        self._previous_learning_rate = PerWorkerVariable(
            tf.constant(0.0), "previous_learning_rate"
        )
        self._skipped = PerWorkerVariable(tf.constant(0, tf.int64), "skipped_steps")
        for channel in self._channels:
            for variable in tf.nest.flatten(channel.state):
                self._track_variable(variable)

    def _make_channels(self, variables, moves):
        # A variable that Keras overwrites with its gradient takes no update.
        trained = [not seam.is_overwritten(self.inner_optimizer, v) for v in variables]
        chosen = set(compressed_positions(variables, self.exclude, self.min_size))
        plan = (
            ("compressed", True, self._compressor, self._server),
            (
                "plain",
                False,
                self._compressor.uncompressed(),
                self._server.uncompressed(),
            ),
        )
        for name, wanted, compressor, server in plan:
            positions = [
                i
                for i in range(len(variables))
                if trained[i] and (i in chosen) == wanted
            ]
            shapes = [tf.TensorShape(variables[i].shape) for i in positions]
            sizes = [shape.num_elements() for shape in shapes]
            if not sum(sizes):
                continue
            layout = Layout.from_sizes(sizes, self._block_size if wanted else "model")
            if wanted and isinstance(self.transport, Transport):
                transport = self.transport
            else:
                kind = (
                    self.transport
                    if wanted and self.transport in TRANSPORTS
                    else "auto"
                )
                transport = choose(kind, compressor, server, layout, moves)
            yield Channel(
                name,
                positions,
                shapes,
                layout,
                compressor,
                server,
                transport,
                self._decay,
            )

    @property
    def traffic(self) -> Traffic:
        """What one worker moves in one step, by the fields that travel.

        Raises:
            ValueError: If the optimizer is not built yet.
        """
        if not self.built:
            raise ValueError(
                "`traffic` depends on the model's variables; ask after `fit`, or call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        workers = self._collectives.num_workers
        moved = [channel.words(workers) for channel in self._channels]
        by_name = {channel.name: channel for channel in self._channels}
        bits_up = bits_reply = 0.0
        if "compressed" in by_name:
            channel = by_name["compressed"]
            layout = channel.layout
            fields = channel.compressor.fields(layout)
            reply = channel.transport.reply_fields(
                channel.compressor, channel.server, layout, workers
            )
            bits_up = 32 * message_words(fields) / layout.size
            bits_reply = 32 * message_words(reply) / layout.size
        sizes = {name: channel.layout.size for name, channel in by_name.items()}
        return Traffic(
            num_workers=workers,
            elements_compressed=sizes.get("compressed", 0),
            elements_plain=sizes.get("plain", 0),
            bits_per_element_up=bits_up,
            bits_per_element_reply=bits_reply,
            words_sent=sum(words.sent for words in moved),
            words_received=sum(words.received for words in moved),
        )

    # The step.

    def apply(self, grads, trainable_variables=None):
        """Exchanges the gradients and updates the variables.

        Args:
            grads: Gradients of this replica's share of the loss, which Keras divides
                by the number of replicas.
            trainable_variables: Their variables, in the same order.

        Raises:
            TypeError: If a gradient is not of a float type.
            ValueError: If the workers' models differ, at the first step.
            tf.errors.InvalidArgumentError: If a gradient is not finite and
                `nonfinite="raise"`.
        """
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                f"{type(self).__name__}.apply() must be called in a replica context, "
                "inside `strategy.run`."
            )
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        if not self.built:
            with keras.name_scope(self.name):
                self.build(list(trainable_variables))
        self._check_workers()
        inner = self.inner_optimizer
        with keras.name_scope(self.name):
            grads, variables = seam.filtered(inner, grads, list(trainable_variables))
            if not grads:
                return
            # Keras divides the loss by N; undone first, so that clipping and the method
            # see this worker's own mean gradient, whatever N is.
            factor = self._collectives.num_workers / (inner.loss_scale_factor or 1)
            grads = [
                _dense(g, v) * tf.cast(factor, g.dtype)
                for g, v in zip(grads, variables, strict=True)
            ]

            def update(grads):
                if inner.gradient_accumulation_steps:
                    grads = seam.accumulated(inner, grads, variables)
                self._update(seam.clipped(inner, grads), variables)

            if inner.gradient_accumulation_steps:
                conditional(
                    seam.is_update_step(inner),
                    update,
                    lambda grads: seam.accumulate(inner, grads, variables),
                    args=(grads,),
                )
            else:
                update(grads)

    def _update(self, gradients, variables):
        inner = self.inner_optimizer
        positions = [seam.position(inner, v) for v in variables]
        table = [None] * len(self._trainable_variables)
        for position, gradient in zip(positions, gradients, strict=True):
            table[position] = gradient
        context = self._context()
        vectors = [channel.flatten(table) for channel in self._channels]
        compressed = [
            channel.compress(vector, context)
            for channel, vector in zip(self._channels, vectors, strict=True)
        ]
        payloads = [payload for payload, _ in compressed]
        status = finite_vote.status_of(vectors, payloads, table)
        updates, states, statuses = {}, [], None
        for channel, (payload, worker) in zip(self._channels, compressed, strict=True):
            update, state, seen = channel.exchange(
                payload,
                lambda channel=channel: channel.flatten(self._trainable_variables),
                context,
                # All workers see all statuses with the first exchange.
                status if statuses is None else tf.zeros_like(status),
            )
            statuses = seen if statuses is None else statuses
            updates.update(channel.split(update))
            states.append({"worker": worker, **state})
        applied = [
            tf.cast(updates[position], gradient.dtype)
            for position, gradient in zip(positions, gradients, strict=True)
        ]
        previous = context.if_moving(
            context.learning_rate, context.previous_learning_rate
        )
        new_state = [*tf.nest.flatten(states), previous]

        def commit(applied, new_state, statuses):
            variables_of_state = [
                *tf.nest.flatten([channel.state for channel in self._channels]),
                self._previous_learning_rate,
            ]
            for variable, value in zip(variables_of_state, new_state, strict=True):
                variable.assign(value)
            seam.update(inner, applied, variables)

        def skip(applied, new_state, statuses):
            if inner.gradient_accumulation_steps:
                seam.drop_window(inner)
            self._report(statuses)

        conditional(
            tf.reduce_all(tf.equal(statuses, 0)),
            commit,
            skip,
            args=(applied, new_state, statuses),
        )

    def _context(self):
        inner = self.inner_optimizer
        return Context(
            step=tf.cast(tf.convert_to_tensor(inner.iterations), tf.int64),
            seed=tf.convert_to_tensor(self._seed),
            rank=self._collectives.rank,
            num_workers=self._collectives.num_workers,
            learning_rate=tf.cast(
                tf.convert_to_tensor(inner.learning_rate), tf.float32
            ),
            previous_learning_rate=tf.convert_to_tensor(self._previous_learning_rate),
            max=lambda vector: self._collectives.max(vector, "agreed"),
        )

    def _report(self, statuses):
        checks = []
        if self.nonfinite == "raise":
            paths = [path_of(v) for v in self._trainable_variables]
            checks = finite_vote.assertions(statuses, paths)
        # Inside XLA assertions vanish; then this counts, and `fit` raises at its end.
        with tf.control_dependencies([check for check in checks if check is not None]):
            self._skipped.assign(self._skipped + 1)

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was not finite."""
        return int(self._skipped.numpy()) if self.built else 0

    def _raise_unreported(self):
        if self.nonfinite == "raise" and self.skipped_steps:
            count = self.skipped_steps
            self._skipped.assign(tf.zeros([], tf.int64))
            raise FloatingPointError(
                f"{count} steps were skipped because a gradient was NaN or Inf. Lower "
                "the learning rate, clip (clipnorm=...), or go on with "
                "nonfinite='skip'."
            )

    def _check_workers(self):
        if not self._is_checked:
            self._is_checked = True
            check_same_everywhere(
                self._trainable_variables,
                f"compressor={self._compressor}, server={self._server}, "
                f"block_size={self._block_size}, weight_decay={self._decay}, "
                f"exclude={self.exclude}, min_size={self.min_size}, seed={self.seed}, "
                f"transport={self.transport}",
                seam.step_counter(self.inner_optimizer),
            )

    # State and configuration.

    def _own_state(self):
        return [v for v in self._variables if isinstance(v, PerWorkerVariable)]

    def save_own_variables(self, store):
        """Saves the method's state, of this worker alone, by local reads."""
        store["place"] = self._collectives.place if self.built else (0, 1)
        for variable in self._own_state():
            store[variable.name] = variable.local_values()

    def load_own_variables(self, store):
        """Restores what `save_own_variables` saved, here or on another worker."""
        names = {variable.name for variable in self._own_state()}
        saved = set(store.keys()) - {"place"}
        if names != saved:
            warnings.warn(
                f"The state of {type(self).__name__} is not restored: the file has "
                f"{sorted(saved)}, expected {sorted(names)}. Was it saved with another "
                "method, or before the first step?",
                stacklevel=2,
            )
            return
        for variable in self._own_state():
            values = store[variable.name][()]
            replicas = variable.local_values().shape[0]
            if len(values) != replicas:
                # Another number of devices: what is owed on average stays. Integers
                # are the same on all, and a seed is no exact float.
                is_float = np.issubdtype(values.dtype, np.floating)
                values = values.mean(0, keepdims=True) if is_float else values[:1]
                values = values.repeat(replicas, 0)
            variable.assign_local_values(values.astype(variable.dtype))
        self._notice_origin(*(int(number) for number in store["place"][()]))

    def _notice_origin(self, rank, num_workers):
        here, count = self._collectives.place
        first_stranger = 1 if rank == 0 else 0
        if (num_workers, here) != (count, rank) and here == min(
            first_stranger, count - 1
        ):
            print(
                f"{type(self).__name__}: residuals and momenta are those of worker "
                f"{rank} of {num_workers}, now on all of {count}. A folder a worker "
                "keeps each worker's own (tfgradcomp.callbacks.BackupAndRestore); "
                "`python -m tfgradcomp.reshard` changes their number.",
                file=sys.stderr,
            )

    _own_arguments = ("compressor", "server", "block_size", "weight_decay")

    def get_config(self):
        """Returns the constructor's arguments, serialized by Keras."""
        exclude = self.exclude
        common = {
            "inner_optimizer": self.inner_optimizer,
            # A transport that was handed in belongs to its process.
            "transport": self.transport if isinstance(self.transport, str) else "auto",
            "exclude": [_serializable(rule) for rule in exclude]
            if isinstance(exclude, (list, tuple))
            else _serializable(exclude),
            "min_size": self.min_size,
            "seed": self.seed,
            "nonfinite": self.nonfinite,
            "name": self.name,
        }
        own = {name: getattr(self, name) for name in self._own_arguments}
        return {
            name: keras.saving.serialize_keras_object(value)
            for name, value in {**common, **own}.items()
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Returns the optimizer that `get_config` describes."""
        # Keras writes an inner optimizer's schedule into the dict that it reads.
        config = copy.deepcopy(config)
        return cls(
            **{
                name: keras.saving.deserialize_keras_object(value, custom_objects)
                for name, value in config.items()
            }
        )


def _dense(gradient, variable) -> tf.Tensor:
    """An `IndexedSlices` counts as the dense tensor that it stands for."""
    gradient = tf.convert_to_tensor(gradient)
    if not gradient.dtype.is_floating:
        raise TypeError(
            "Gradients must be of a float type to be compressed. Received: "
            f"dtype={gradient.dtype.name} for variable {path_of(variable)}; train it "
            "with an optimizer of its own, or split it into real parts."
        )
    return gradient


def _serializable(rule):
    if isinstance(rule, type):
        return f"layer:{rule.__name__}"
    return rule
