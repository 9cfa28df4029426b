"""The one Keras class: an optimizer whose gradients travel compressed."""

from __future__ import annotations

import copy
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp import transports
from tfgradcomp.compressors.base import Compressor, Context, Layout
from tfgradcomp.compressors.weight_decay import WeightDecay
from tfgradcomp.transports.traffic import Traffic
from tfgradcomp.ops.block_sums import CHUNK
from tfgradcomp.optimizers import nonfinite
from tfgradcomp.optimizers import moments as second
from tfgradcomp.core.arguments import (
    check_choice,
    check_integer,
    refuse_wrappers,
)
from tfgradcomp.optimizers.bucket_ranges import Bucket, buckets_of
from tfgradcomp.optimizers.gradient_bucket import GradientBucket
from tfgradcomp.optimizers.partition import compressed_positions, rules_of
from tfgradcomp.optimizers.state import (
    for_replicas,
    names_of,
    restore_state,
    shards_of,
    whole_name,
    whole_state,
)
from tfgradcomp.compat import inner_optimizer as seam
from tfgradcomp.compat.conditional import conditional
from tfgradcomp.compat.fingerprint import check_same_everywhere, path_of
from tfgradcomp.compat.multi_worker_fit import enable_multi_worker_fit
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.per_example.second_moments import enable_second_moments
from tfgradcomp.compat.workers import across_hosts, is_multi_worker
from tfgradcomp.servers.base import Server
from tfgradcomp.transports import Costs, Transport, collectives
from tfgradcomp.transports.messages import fixed_words, message_words

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

    Some compressors need second moments, the sums over examples of the squares of the
    terms of a gradient. `model.fit` computes them and hands them over.

    Args:
        inner_optimizer: A Keras optimizer, its name or its config.
        compressor: The worker's half of the method.
        server: The server's half.
        block_size: What a block of the method is. None: a parameter tensor. An
            integer: that many elements of the flat vector. `"model"`: all of it.
        weight_decay: A `WeightDecay` that workers add to the reply, or None. The
            inner optimizer's own `weight_decay` is something else and works too.
        transport: `"all_gather"`, `"all_reduce"`, `"sharded"`, or a `Transport`.
            `"auto"` takes for each bucket the one that should be quickest on this
            cluster, or plain float32 where compression would lose; it measures at
            the first step, or takes the `tfgradcomp.transports.Costs` given.
        exclude: What is not compressed: `"last"` (the model's last layer), a pattern
            of variable paths (`"*/bias"`), a layer class or `"layer:ClassName"`, a
            function of a variable, or a list of these. It travels as float32 with
            the method's mathematics kept.
        min_size: Variables with fewer elements are not compressed either.
        seed: Integer in [0, 2**63), the key of all random numbers.
        nonfinite: What follows a skipped step: `"raise"` an error that names the
            variable and the worker, or `"skip"`: count it in `skipped_steps`.
        bucket_bytes: The gradients travel in buckets of at least so many bytes, as
            float32, cut between blocks: the last layers' first, while those of the
            others are computed. However they are cut, the result is the same.
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

    microbatches: int | None = None

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
        bucket_bytes: int = 64 * 2**20,
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
        if not isinstance(transport, (Transport, Costs)):
            check_choice("transport", transport, transports.NAMES)
        check_integer("min_size", min_size, 0)
        check_integer("seed", seed, 0, 2**63)
        check_integer("bucket_bytes", bucket_bytes, 1)
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
        self.bucket_bytes = bucket_bytes
        self._is_checked = False
        self._moved = None
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
        if self.needs_second_moments:
            enable_second_moments()
        return strategy

    @property
    def needs_second_moments(self) -> bool:
        """Whether `apply` wants second moments."""
        return self._compressor.needs_second_moments

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
        has_network = moves.num_workers > 1 and is_multi_worker(strategy)
        hosts = across_hosts(strategy) if has_network else None
        self._channels = tuple(self._make_channels(list(variables), moves, hosts))
        self._seed = PerReplicaVariable(tf.constant(self.seed, tf.int64), "seed")
        self._previous_learning_rate = PerReplicaVariable(
            tf.constant(0.0), "previous_learning_rate"
        )
        self._skipped = PerReplicaVariable(tf.constant(0, tf.int64), "skipped_steps")
        if any(channel.varies for channel in self._channels):
            # Steps, elements sent, words that varied.
            self._moved = PerReplicaVariable(tf.zeros([3], tf.int64), "moved")
        for channel in self._channels:
            for variable in tf.nest.flatten(channel.state):
                self._track_variable(variable)

    def _make_channels(self, variables, moves, hosts):
        # A variable that Keras overwrites with its gradient takes no update.
        trained = [not seam.is_overwritten(self.inner_optimizer, v) for v in variables]
        chosen = set(compressed_positions(variables, self.exclude, self.min_size))
        sizes = [v.shape.num_elements() for v in variables]
        plan = (
            ("compressed", True, self._compressor, self._server, self._block_size),
            (
                *("plain", False),
                *(self._compressor.uncompressed(), self._server.uncompressed()),
                "model",
            ),
        )
        for name, wanted, compressor, server, block_size in plan:
            positions = [
                i for i, t in enumerate(trained) if t and (i in chosen) == wanted
            ]
            held = [sizes[i] for i in positions]
            if not sum(held):
                continue
            layout = Layout.from_sizes(held, block_size)
            most = compressor.most_elements
            if most is not None:
                # A bucket's lead is shorter than a chunk.
                most -= CHUNK
                layout = layout.cut(most)
            buckets = [Bucket(0, layout.size)]
            if wanted and compressor.is_blockwise and server.is_blockwise:
                buckets = buckets_of(layout, max(self.bucket_bytes // 4, 1), most)
            carriers = transports.carriers(
                self.transport if wanted else "auto",
                compressor,
                server,
                [bucket.layout(layout) for bucket in buckets],
                moves,
                hosts if wanted else None,
            )
            names = [name]
            if len(buckets) > 1:
                names = [f"{name}.{index}" for index in range(len(buckets))]
            for own_name, bucket, carrier in zip(names, buckets, carriers, strict=True):
                yield GradientBucket(
                    *(own_name, positions, bucket, layout, *carrier, self._decay),
                    accumulates=wanted
                    and self.needs_second_moments
                    and bool(self.inner_optimizer.gradient_accumulation_steps),
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
        moved = [channel.words for channel in self._channels]
        compressed = [c for c in self._channels if c.name.startswith("compressed")]
        elements = sum(channel.size for channel in compressed)
        plain = sum(channel.size for channel in self._channels) - elements
        sent, varying = elements, 0.0
        if self._moved is not None:
            steps, sent, varying = self._moved.numpy().tolist()
            sent, varying = (x / steps if steps else np.nan for x in (sent, varying))
        up = sum(fixed_words(c.compressor.fields(c.layout)) for c in compressed)
        reply = sum(message_words(c.reply_fields(workers)) for c in compressed)
        return Traffic(
            num_workers=workers,
            elements_compressed=elements,
            elements_plain=plain,
            bits_per_element_up=32 * (up + varying) / max(elements, 1),
            bits_per_element_reply=32 * reply / max(elements, 1),
            words_sent=sum(words.sent for words in moved) + (workers - 1) * varying,
            words_received=sum(words.received for words in moved)
            + (workers - 1) * varying,
            elements_sent=sent + plain,
        )

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
            ValueError: If the workers' models differ, at the first step; if second
                moments are given to a method that needs none, or not to one that does.
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
        grads, variables = list(grads), list(trainable_variables)
        moments = second.checked(
            second_moments, grads, self._compressor, type(self).__name__
        )
        moment_of = dict(zip(map(id, variables), moments, strict=True))
        with keras.name_scope(self.name):
            grads, variables = seam.filtered(inner, grads, variables)
            if not grads:
                return
            moments = [moment_of[id(variable)] for variable in variables]
            # Keras divides the loss by N; undone first, so that clipping and the method
            # see this worker's own mean gradient, whatever N is.
            scale = self._collectives.num_workers / (inner.loss_scale_factor or 1)
            grads = [_dense(g, v) for g, v in zip(grads, variables, strict=True)]
            if inner.gradient_accumulation_steps or seam.clips(inner):
                grads = [g * tf.cast(scale, g.dtype) for g in grads]
                moments = second.multiplied(moments, scale)
                scale = 1.0

            def update(grads, moments):
                if inner.gradient_accumulation_steps:
                    grads = seam.accumulated(inner, grads, variables)
                clipped, kept = seam.clipped(inner, grads), None
                if seam.clips(inner) and self.needs_second_moments:
                    kept = second.kept(clipped, grads)
                self._update(clipped, moments, kept, variables, scale)

            def accumulate(grads, moments):
                seam.accumulate(inner, grads, variables)
                table = self._table(moments, variables)
                for channel in self._channels:
                    if channel.accumulates:
                        channel.accumulate(table)

            if inner.gradient_accumulation_steps:
                conditional(
                    seam.is_update_step(inner),
                    update,
                    accumulate,
                    args=(grads, moments),
                )
            else:
                update(grads, moments)

    def _table(self, values, variables):
        """A list over all variables of what there is of some, None for the others."""
        table = [None] * len(self._trainable_variables)
        for variable, value in zip(variables, values, strict=True):
            table[seam.position(self.inner_optimizer, variable)] = value
        return table

    def _update(self, gradients, moments, kept, variables, scale):
        inner = self.inner_optimizer
        table = self._table(gradients, variables)
        moments = self._table(moments, variables)
        kept = kept and self._table(kept, variables)
        context = self._context()
        pieces, steps = {}, []
        for channel in self._channels:
            own = context
            if channel.compressor.needs_second_moments:
                own = context._replace(
                    second_moments=channel.second_moments(
                        moments, scale, inner.gradient_accumulation_steps, kept
                    )
                )
            step = channel.step(
                channel.flatten(table, scale),
                lambda channel=channel: channel.flatten(self._trainable_variables),
                own,
                lambda channel=channel: nonfinite.locate(
                    {i: table[i] for i in channel.positions}, len(table), scale
                ),
            )
            pieces.update(channel.split(step.update))
            steps.append(step)
        variables_of_state = tf.nest.flatten([c.state for c in self._channels])
        new_state = tf.nest.flatten([step.state for step in steps])
        if self._moved is not None:
            varying = [
                tf.cast(tf.stack([0, step.elements_sent, step.varying_words]), tf.int64)
                for step, channel in zip(steps, self._channels, strict=True)
                if channel.varies
            ]
            one_step = tf.constant([1, 0, 0], tf.int64)
            moved = tf.add_n([tf.convert_to_tensor(self._moved), one_step, *varying])
            new_state.append(moved)
            variables_of_state.append(self._moved)
        self._commit(
            pieces,
            list(zip(variables_of_state, new_state, strict=True)),
            nonfinite.first_of([step.statuses for step in steps]),
            gradients,
            variables,
            context,
        )

    def _commit(self, pieces, state, statuses, gradients, variables, context):
        """Updates weights and state, or nothing where a status is not 0.

        Args:
            pieces: The decoded reply, by the pieces of variables.
            state: Pairs of a variable of the method's state and its new value.
            statuses: All workers' statuses.
            gradients: Tensors of the variables' shapes and types.
            variables: The variables to update.
            context: The step.
        """
        inner = self.inner_optimizer
        applied = [
            tf.cast(
                _joined(pieces, seam.position(inner, variable), gradient.shape),
                gradient.dtype,
            )
            for variable, gradient in zip(variables, gradients, strict=True)
        ]
        previous = context.if_moving(
            context.learning_rate, context.previous_learning_rate
        )
        targets = [*(variable for variable, _ in state), self._previous_learning_rate]
        new_state = [*(value for _, value in state), previous]

        def commit(applied, new_state, statuses):
            for variable, value in zip(targets, new_state, strict=True):
                variable.assign(value)
            seam.update(inner, applied, variables)

        def skip(applied, new_state, statuses):
            if inner.gradient_accumulation_steps:
                seam.drop_window(inner)
                for channel in self._channels:
                    channel.forget()
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
            max=tf.identity,
        )

    def _report(self, statuses):
        checks = []
        if self.nonfinite == "raise":
            paths = [path_of(v) for v in self._trainable_variables]
            checks = nonfinite.assertions(statuses, paths)
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
                f"transport={self.transport}, bucket_bytes={self.bucket_bytes}, "
                f"microbatches={self.microbatches}",
                seam.step_counter(self.inner_optimizer),
            )

    # State and configuration.

    def _own_state(self):
        return [v for v in self._variables if isinstance(v, PerReplicaVariable)]

    def _scalars(self):
        scalars = self._seed, self._previous_learning_rate, self._skipped
        return scalars if self._moved is None else (*scalars, self._moved)

    def _vectors(self):
        """The channels, by the vector that they are buckets of."""
        by_name = {}
        for channel in self._channels if self.built else ():
            by_name.setdefault(channel.name.partition(".")[0], []).append(channel)
        return list(by_name.values())

    def _shards(self):
        parts = [
            shards_of(channels, self._first_rank()) for channels in self._vectors()
        ]
        return np.concatenate([np.zeros([0, 2], np.int64), *parts])

    def _first_rank(self):
        index, processes = self._collectives.place
        return index * self._collectives.num_workers // processes

    def save_own_variables(self, store):
        """Saves the method's state, of this worker alone, by local reads."""
        store["place"] = self._collectives.place if self.built else (0, 1)
        for variable in self._scalars() if self.built else ():
            store[variable.name] = variable.local_values()
        for channels in self._vectors():
            for name, values in whole_state(channels, self._first_rank()).items():
                store[name] = values
        if len(self._shards()):
            store["shards"] = self._shards()

    def load_own_variables(self, store):
        """Restores what `save_own_variables` saved, here or on another worker."""
        scalars = {v.name: v for v in self._scalars()} if self.built else {}
        names = {*scalars, *(n for vector in self._vectors() for n in names_of(vector))}
        saved = set(store.keys()) - {"place", "shards"}
        fits = saved == {whole_name(name) for name in names}
        if "shards" in store.keys():
            same = np.array_equal(store["shards"][()], self._shards())
            fits = saved == names and same
        if not fits:
            warnings.warn(
                f"The state of {type(self).__name__} is not restored: the file has "
                f"{sorted(saved)}, expected {sorted(names)}. Was it saved with another "
                "method, or before the first step? A sharded server's state fits the "
                "same workers and buckets only; `python -m tfgradcomp.reshard` makes "
                "it whole.",
                stacklevel=2,
            )
            return
        for name, variable in scalars.items():
            replicas = len(variable.local_values())
            values = for_replicas(store[name][()], replicas)
            variable.assign_local_values(values.astype(variable.dtype))
        for channels in self._vectors():
            restore_state(channels, store, self._first_rank())
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
            "bucket_bytes": self.bucket_bytes,
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


def _joined(pieces, position, shape):
    """Joins the pieces of a variable's update."""
    own = sorted(piece for piece in pieces if piece.position == position)
    parts = [pieces[piece] for piece in own]
    vector = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
    return tf.reshape(vector, shape)


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
