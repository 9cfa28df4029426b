"""The trainer for a cluster of a chief, workers and parameter servers."""

from __future__ import annotations

import os
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
from tfgradcomp.parameter_server.remote_worker import (
    assign_shared_values,
    shared_values,
)
from tfgradcomp.parameter_server.rounds import BarrierRounds, PushRounds
from tfgradcomp.transports import Traffic

_ROUNDS = {"sync": BarrierRounds, "async": PushRounds}
MODES = tuple(_ROUNDS)
ON_WORKER_LOSS = ("continue", "wait")
# Arguments of the optimizer with only one supported value, and why.
_REQUIRED = {
    "transport": ("auto", "all gradients go to the servers"),
    "carrier": ("auto", "messages travel by TensorFlow's remote calls"),
    "fallback": (None, "gradients are always compressed"),
    "warmup_steps": (0, "gradients are always compressed"),
    "dense_every": (None, "gradients are always compressed"),
    "verify_every": (None, "workers are not compared, as all apply the same replies"),
}


class ParameterServerTrainer:
    """Trains a Keras model on workers that exchange gradients over parameter servers.

    Run one script in all roles, with `TF_CONFIG` set: a chief, workers and parameter
    servers (ps). Workers and servers do not return from the constructor: they serve.
    The chief continues, and drives them in `fit`. Each worker holds all weights, with
    the same bits on all workers. Weights cross the network when training begins, when
    an epoch ends (from one worker to the chief) and when a worker rejoins. A step sends
    compressed payloads to the servers, and one reply back. Saving the chief's model
    also saves the residuals of all workers and servers.

    Args:
        make_model: Function that returns a new Keras model, not compiled; called
            once for the chief and once for each worker.
        optimizer: A compressed optimizer with `transport="auto"`. It is copied for
            the chief and for each worker.
        loss: As in `keras.Model.compile`.
        metrics: As in `keras.Model.compile`.
        mode: `"sync"`: all workers take each step together. `"async"`: each worker
            pushes its gradient as soon as it is ready, and then applies all pushes up
            to its own in the servers' order. The history has the mean staleness: the
            number of pushes of other workers in between.
        on_worker_loss: `"continue"` without a lost worker, or `"wait"` until it has
            been restarted. A worker that is back receives the weights; with
            `"continue"`, at the next epoch.
        steps_per_execution: Steps between two reports to the chief. Rounded up to a
            multiple of the inner optimizer's `gradient_accumulation_steps`.
        max_staleness: With `"async"`, the largest number of other workers' pushes
            between the weights of a gradient and its push. A worker that is further
            ahead waits, which also bounds the replies that servers keep for a slow
            worker. None: eight times the number of workers; at least that number.

    Attributes:
        model: The chief's model, with the weights of the last epoch.
        optimizer: Its optimizer, with the counters and momenta of the last epoch.

    Raises:
        ValueError: If an argument is out of range, or if `TF_CONFIG` does not describe
            a chief, workers and parameter servers.

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
                "Workers that take steps together are never stale: use mode='async' or "
                f"leave max_staleness=None. Received: mode='sync', {max_staleness=}"
            )
        _check_optimizer(optimizer, mode)
        self._cluster = cluster_of_chief()
        bound_of_staleness(max_staleness, len(self._cluster.workers))
        models = ModelFactory(make_model, optimizer, loss, metrics)
        self._limits = Limits.of_environment()
        with Heartbeat(self._cluster, self._limits):
            connect(os.environ["TF_CONFIG"])
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
        """Trains the model, like `keras.Model.fit`.

        Args:
            dataset_fn: Function of a `tf.distribute.InputContext` that returns a
                worker's dataset, batched and endless (`repeat()`). It is called for
                each worker, which then runs its operations. A Python generator would
                run in the chief's process, and its batches would cross the network.
            epochs: The number of the last epoch.
            steps_per_epoch: Steps per epoch. A step takes a batch from every worker,
                or from one worker with `"async"`. With `gradient_accumulation_steps=k`
                a round or a push has the mean gradient of k batches of a worker, and
                this must be a multiple of k.
            validation_data: Data for `keras.Model.evaluate` on the chief after each
                epoch.
            callbacks: Keras callbacks; their model is the chief's.
            verbose: As in `keras.Model.fit`.
            initial_epoch: The first epoch.

        Returns:
            The history of logs, which are means over the workers.

        Raises:
            ValueError: If a worker's dataset ends, or if an epoch would end before the
                gradients of its last batches are applied.
            ConnectionError: If a parameter server is lost.
            RuntimeError: If all workers are lost.
            tf.errors.InvalidArgumentError: If a gradient is not finite and the
                optimizer's `nonfinite` is `"raise"`.
        """
        check_integer("steps_per_epoch", steps_per_epoch, 1)
        accumulated = self.optimizer.gradient_accumulation_steps
        if accumulated and steps_per_epoch % accumulated:
            raise ValueError(
                "With parameter servers an epoch ends with an update: steps_per_epoch "
                "must be a multiple of the inner optimizer's "
                "gradient_accumulation_steps. Received: "
                f"{steps_per_epoch=}, gradient_accumulation_steps={accumulated}"
            )
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
            values = shared_values(self.model)
            for worker in membership.workers:
                worker.take(values)
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
        """Returns the current trainable weights of each worker."""
        workers = self._membership.workers
        return [[v.numpy() for v in w.model.trainable_variables] for w in workers]

    def _train_epoch(self, epoch, steps, rounds, callbacks, validation_data):
        membership = self._membership
        membership.with_recovery(membership.readmit)
        callbacks.on_epoch_begin(epoch)
        membership.with_recovery(self._begin_epoch)
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
        # Workers follow a schedule themselves.
        if isinstance(rate, keras.Variable):
            for worker in self._membership.workers:
                worker.take_learning_rate(float(rate.numpy()))

    def _begin_epoch(self):
        """Resets the workers' metrics, and starts new random streams."""
        # The first number is the generator's seed, the second counts random numbers.
        states = seed_states(self.model).values()
        seeds = [int(state.numpy()[0]) for state in states]
        for rank, worker in enumerate(self._membership.workers):
            worker.reset_metrics()
            worker.take_seeds(seeds, rank)

    def _fetch(self):
        """Copies weights, counters and momenta to the chief."""
        workers = self._membership.workers
        assign_shared_values(self.model, shared_values(workers[0].model))
        # Weights without gradients, such as moving averages, differ between workers.
        by_worker = [worker.model.non_trainable_weights for worker in workers]
        for variable, *others in zip(
            self.model.non_trainable_weights, *by_worker, strict=True
        ):
            values = [other.numpy() for other in others]
            if np.issubdtype(values[0].dtype, np.floating):
                variable.assign(np.mean(values, axis=0))


def _check_optimizer(optimizer, mode):
    if not isinstance(optimizer, CompressedOptimizer):
        raise ValueError(
            "optimizer must be a compressed optimizer, such as tfgradcomp.TernGrad("
            f"keras.optimizers.SGD(0.1)). Received: optimizer={optimizer!r}"
        )
    for name, (value, reason) in _REQUIRED.items():
        found = getattr(optimizer, name)
        if found != value:
            raise ValueError(
                f"With parameter servers {reason}. Expected: {name}={value!r}. "
                f"Received: {name}={found!r}"
            )
    inner = optimizer.inner_optimizer
    if mode == "async" and inner.gradient_accumulation_steps and inner.use_ema:
        raise ValueError(
            "Keras averages weights at every batch, also while gradients accumulate. "
            "Without a barrier these batches come at different times on each worker, "
            "so the averages would differ. Expected: mode='sync', use_ema=False or "
            "gradient_accumulation_steps=None. Received: mode='async', "
            f"use_ema={inner.use_ema}, "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps}"
        )
