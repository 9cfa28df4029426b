"""Training with parameter servers: weights stay on the workers, words travel."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.collectives.stalls import Limits
from tfgradcomp.compat import remote
from tfgradcomp.compat.trainer import first_epoch
from tfgradcomp.core.arguments import check_choice, check_integer
from tfgradcomp.fit.seeds import seed_states
from tfgradcomp.optimizers import CompressedOptimizer
from tfgradcomp.parameter_server.checkpoint import ClusterCheckpoint
from tfgradcomp.parameter_server.cluster import cluster_of_chief, connect
from tfgradcomp.parameter_server.heartbeat import Heartbeat
from tfgradcomp.parameter_server.membership import Membership
from tfgradcomp.parameter_server.model_factory import ModelFactory
from tfgradcomp.parameter_server.push_log import bound_of_staleness
from tfgradcomp.parameter_server.remote_worker import shared_variables, values_of
from tfgradcomp.parameter_server.rounds import BarrierRounds, PushRounds
from tfgradcomp.transports import Traffic

_ROUNDS = {"sync": BarrierRounds, "async": PushRounds}
MODES = tuple(_ROUNDS)
ON_WORKER_LOSS = ("continue", "wait")


class ParameterServerTrainer:
    """Trains a Keras model on workers that meet on parameter servers.

    Run one script in all roles, with `TF_CONFIG` set: a chief, workers and parameter
    servers (ps). Workers and servers never get past the constructor: they serve. The
    chief goes on, and `fit` drives them. Every worker has weights of its own, which
    cross the wire when training begins, when an epoch ends (one worker's, to the
    chief) and when a worker joins again. In a step words cross it: payloads to the
    servers, one reply back. The weights of all workers are the same bits. What saves
    the chief's model saves the residuals of all workers and servers, too.

    Args:
        make_model: Function that returns a new Keras model, not compiled; called
            once for the chief and once for each worker.
        optimizer: A compressed optimizer with `transport="auto"`. It is copied for
            the chief and for each worker.
        loss: As in `keras.Model.compile`.
        metrics: As in `keras.Model.compile`.
        mode: `"sync"`: all workers take a step together. `"async"`: each pushes when
            it has a gradient, and then applies what others pushed before it, and its
            own, in the servers' order. History has the mean staleness: how many pushes
            of others came in between.
        on_worker_loss: What follows the loss of a worker: `"continue"` with the
            others, or `"wait"` until it has been started again. A worker that is back
            gets the weights; where training went on, at the next epoch.
        steps_per_execution: Steps that workers take before the chief hears of them; as
            many as the inner optimizer's `gradient_accumulation_steps`, or a multiple,
            where it has some.
        max_staleness: With `"async"`, how many pushes of others may come between the
            weights that a gradient is of and its own push. A worker that is ahead by
            more waits, so that what the servers keep for a slow one is bounded, too.
            None: eight times the number of workers; no less than that number.

    Attributes:
        model: The chief's model, with the weights as of the last epoch.
        optimizer: Its optimizer, with counters and momenta as of then.

    Raises:
        ValueError: If an argument is out of range, or `TF_CONFIG` does not describe a
            chief, workers and parameter servers.

    Example:
        ```python
        trainer = tfgradcomp.ParameterServerTrainer(
            make_model,
            tfgradcomp.TernGrad(keras.optimizers.SGD(0.1)),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
        history = trainer.fit(dataset_fn, epochs=3, steps_per_epoch=200)
        ```
    """

    def __init__(
        self,
        make_model: Callable[[], keras.Model],
        optimizer: CompressedOptimizer,
        loss,
        metrics=(),
        mode: str = "sync",
        on_worker_loss: str = "continue",
        steps_per_execution: int = 1,
        max_staleness: int | None = None,
    ):
        check_choice("mode", mode, MODES)
        check_choice("on_worker_loss", on_worker_loss, ON_WORKER_LOSS)
        check_integer("steps_per_execution", steps_per_execution, 1)
        if mode == "sync" and max_staleness is not None:
            raise ValueError(
                "Workers that take steps together are never stale: leave "
                f"max_staleness=None. Received: mode='sync', {max_staleness=}"
            )
        _check_optimizer(optimizer, mode)
        self._cluster = cluster_of_chief()
        bound_of_staleness(max_staleness, len(self._cluster.workers))
        models = ModelFactory(make_model, optimizer, loss, metrics)
        self._limits = Limits.of_environment()
        with Heartbeat(self._cluster, self._limits):
            connect()
        self._rounds_class = _ROUNDS[mode]
        self._steps_per_execution = steps_per_execution
        self._membership = Membership(
            self._cluster,
            models,
            self._rounds_class.transport_class,
            self._rounds_class.worker_class,
            waits_for_lost=on_worker_loss == "wait",
            **({"max_staleness": max_staleness} if mode == "async" else {}),
        )
        self.model = models.make_chief()
        self.optimizer = self.model.optimizer

    def fit(
        self,
        dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        epochs: int = 1,
        steps_per_epoch: int = 1,
        validation_data=None,
        callbacks=None,
        verbose=1,
        initial_epoch: int = 0,
    ) -> keras.callbacks.History:
        """Trains the model, as `keras.Model.fit` does.

        Args:
            dataset_fn: Function of a `tf.distribute.InputContext` that returns a
                worker's dataset, batched and without an end (`repeat()`). It is called
                for each worker, which then runs its operations. A Python generator
                would stay in the chief's process, and its batches cross the network.
            epochs: The epoch to end with.
            steps_per_epoch: Steps an epoch, which take a batch from every worker; in
                mode `"async"` from one. With `gradient_accumulation_steps=k` a round
                or a push has the mean gradient of k batches of a worker, and this is a
                multiple of k.
            validation_data: What the chief evaluates after each epoch: anything that
                `keras.Model.evaluate` takes.
            callbacks: Keras callbacks; their model is the chief's.
            verbose: As in `keras.Model.fit`.
            initial_epoch: The epoch to begin with.

        Returns:
            The history of logs, which are means over the workers.

        Raises:
            ValueError: If a worker's dataset ends, or if an epoch would end before the
                gradients of its last batches are applied.
            ConnectionError: If a parameter server is gone.
            RuntimeError: If all workers are gone.
            tf.errors.InvalidArgumentError: If a gradient is not finite and the
                optimizer's `nonfinite` is `"raise"`.
        """
        check_integer("steps_per_epoch", steps_per_epoch, 1)
        _check_windows(steps_per_epoch, self.optimizer.gradient_accumulation_steps)
        with Heartbeat(self._cluster, self._limits):
            membership = self._membership
            membership.begin(dataset_fn)
            remote.build(self.model, membership.workers[0].spec)
            ClusterCheckpoint(membership).attach(self.optimizer)
            callbacks = keras.callbacks.CallbackList(
                callbacks,
                add_history=True,
                add_progbar=verbose != 0,
                verbose=verbose,
                epochs=epochs,
                steps=steps_per_epoch,
                model=self.model,
            )
            self.model.stop_training = False
            callbacks.on_train_begin()
            shared = values_of(shared_variables(self.model))
            for worker in membership.workers:
                worker.take(shared)
            rounds = self._rounds_class(
                self._cluster, membership, callbacks, self._steps_per_execution
            )
            logs = {}
            for epoch in range(first_epoch(self.model) or initial_epoch, epochs):
                logs = self._train_epoch(
                    epoch, steps_per_epoch, rounds, callbacks, validation_data
                )
                if self.model.stop_training:
                    break
            self.optimizer.finalize_variable_values(self.model.trainable_variables)
            callbacks.on_train_end(logs)
        return self.model.history

    @property
    def num_workers(self) -> int:
        """The number of workers that take part."""
        return len(self._membership.workers) or len(self._cluster.workers)

    @property
    def traffic(self) -> Traffic:
        """The traffic of one worker in one step; available after `fit`."""
        return self._membership.workers[0].optimizer.traffic

    def weights_of_workers(self) -> list[list[np.ndarray]]:
        """Returns the trainable weights of each worker, as they are now."""
        workers = self._membership.workers
        return [values_of(worker.model.trainable_variables) for worker in workers]

    def _train_epoch(self, epoch, steps, rounds, callbacks, validation_data):
        membership = self._membership
        membership.with_recovery(membership.readmit)
        callbacks.on_epoch_begin(epoch)
        membership.with_recovery(self._reset_metrics)
        membership.with_recovery(self._send_seeds)
        done, logs = 0, {}
        while done < steps and not self.model.stop_training:
            membership.with_recovery(self._send_learning_rate)
            taken, logs = rounds.run(done, steps)
            done += taken
        membership.with_recovery(self._fetch)
        logs = dict(logs)
        if validation_data is not None:
            seen = self.model.evaluate(
                validation_data, verbose=0, callbacks=callbacks, return_dict=True
            )
            logs.update({f"val_{name}": value for name, value in seen.items()})
        callbacks.on_epoch_end(epoch, logs)
        return logs

    def _send_learning_rate(self):
        rate = self.optimizer.learning_rate
        # A schedule is followed by the workers themselves.
        if isinstance(rate, keras.Variable):
            for worker in self._membership.workers:
                worker.take_learning_rate(float(rate.numpy()))

    def _send_seeds(self):
        # The first number is the generator's seed, the second counts what was drawn.
        states = seed_states(self.model).values()
        seeds = [int(state.numpy()[0]) for state in states]
        for rank, worker in enumerate(self._membership.workers):
            worker.take_seeds(seeds, rank)

    def _reset_metrics(self):
        for worker in self._membership.workers:
            worker.reset_metrics()

    def _fetch(self):
        """Brings the weights, counters and momenta to the chief."""
        workers = self._membership.workers
        first = values_of(shared_variables(workers[0].model))
        for own, value in zip(shared_variables(self.model), first, strict=True):
            own.assign(value)
        # What no gradient changes, as the statistics of a batch, differs by worker.
        others = [values_of(w.model.non_trainable_weights) for w in workers]
        for own, values in zip(
            self.model.non_trainable_weights, zip(*others, strict=True), strict=True
        ):
            if np.issubdtype(values[0].dtype, np.floating):
                own.assign(np.mean(values, axis=0))


def _check_windows(steps_per_epoch, accumulation_steps):
    if accumulation_steps and steps_per_epoch % accumulation_steps:
        raise ValueError(
            "With parameter servers an epoch ends with an update: steps_per_epoch must "
            "be a multiple of the inner optimizer's gradient_accumulation_steps. "
            f"Received: {steps_per_epoch=}, "
            f"gradient_accumulation_steps={accumulation_steps}"
        )


def _check_optimizer(optimizer, mode):
    if not isinstance(optimizer, CompressedOptimizer):
        raise ValueError(
            "optimizer must be a compressed one, such as tfgradcomp.TernGrad("
            f"keras.optimizers.SGD(0.1)). Received: optimizer={optimizer!r}"
        )
    if optimizer.transport != "auto":
        raise ValueError(
            "With parameter servers there is one way for gradients: leave transport="
            f"'auto'. Received: transport={optimizer.transport!r}"
        )
    if optimizer.fallback is not None:
        raise ValueError(
            "With parameter servers gradients are always compressed: leave "
            f"fallback=None. Received: fallback={optimizer.fallback!r}"
        )
    if optimizer.uncompressed_steps:
        raise ValueError(
            "With parameter servers gradients are always compressed: leave "
            "warmup_steps=0 and dense_every=None. Received: "
            f"warmup_steps={optimizer.uncompressed_steps.warmup_steps}, "
            f"dense_every={optimizer.uncompressed_steps.dense_every}"
        )
    if optimizer.verify_every is not None:
        raise ValueError(
            "With parameter servers all workers apply what the servers send, and are "
            "not compared: leave verify_every=None. "
            f"Received: verify_every={optimizer.verify_every}"
        )
    inner = optimizer.inner_optimizer
    if mode == "async" and inner.gradient_accumulation_steps and inner.use_ema:
        raise ValueError(
            "Keras averages weights at every batch, also at those whose gradients are "
            "only accumulated, and without a barrier each worker has these when it "
            "has them: the averages would differ. Expected: mode='sync', use_ema=False "
            "or gradient_accumulation_steps=None. Received: mode='async', "
            f"use_ema={inner.use_ema}, "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps}"
        )
