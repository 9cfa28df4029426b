"""A worker of `ParameterServerTrainer`, as the chief sees it."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfgradcomp.compat import remote
from tfgradcomp.core import State
from tfgradcomp.fit.seeds import seed_states
from tfgradcomp.parameter_server.worker_function import WorkerFunction

STALENESS = "staleness"

_STEPS = tf.TensorSpec([], tf.int32)


class RemoteWorker:
    """A worker's compiled model, its data and its optimizer, driven from the chief.

    Attributes:
        device: The worker's device, `/job:worker/...`.
        spec: The `element_spec` of the worker's dataset.
        traced: The worker's functions, which other workers may share.
    """

    def __init__(self, device: str, model: keras.Model):
        self.device = device
        self.model, self.optimizer = model, model.optimizer
        self._iterator = None
        self._rate: float | None = None
        self._names: list[str] = []
        with tf.device(device), tf.device("CPU:0"):
            self._requested = tf.Variable(tf.constant(0, tf.int64))
            self._received = tf.Variable(tf.constant(0, tf.int64))

    def open(self, dataset_fn: Callable, num_workers: int, rank: int) -> None:
        """Opens the worker's dataset, if it is not open.

        Raises a ValueError if `dataset_fn` does not return an endless dataset.
        """
        if self._iterator is None:
            context = tf.distribute.InputContext(num_workers, rank, num_workers)
            with tf.device(self.device):
                dataset = _endless(dataset_fn, context)
                self.spec = dataset.element_spec
                self._iterator = iter(dataset)
                remote.build(self.model, self.spec)

    def close(self) -> None:
        """Closes the worker's dataset."""
        self._iterator = None

    def join(self, channel, rank: int, first: RemoteWorker | None = None) -> None:
        """Connects the worker to a channel, with a rank.

        Tracing its steps declares the messages that servers must answer. The traced
        functions of `first`, a worker on that channel, are reused if they fit.
        """
        stepper = self.optimizer.stepper
        stepper.collectives.join(channel, rank)
        for bucket in stepper.buckets:
            bucket.rebind()
        if first and first.spec == self.spec:
            local = self._in_place_of(first)
            if all(function.fits(local) for function in first.traced.values()):
                self._place(first.traced, local)
                self._names = first._names
                return
        with remote.losses_of(stepper.collectives.num_workers):
            traced = self._trace()
        self._place(traced, self._in_place_of(self))

    def _place(self, traced, local):
        self.traced, rank = traced, self.optimizer.stepper.collectives.peer
        self._functions = {
            name: function.on(self.device, rank, self._iterator, local)
            for name, function in traced.items()
        }

    def _trace(self):
        return {"run": self._traced(self._run, _STEPS)}

    def _traced(self, call, *specs):
        def called(rank, *arguments):
            with self.optimizer.stepper.collectives.traced_with(rank):
                return call(*arguments)

        return WorkerFunction(called, self._iterator, *specs)

    def _run(self, iterator, steps):
        index = tf.while_loop(
            lambda index: index < steps,
            lambda index: (self._step(index, iterator),),
            [tf.constant(0)],
            parallel_iterations=1,
        )
        with tf.control_dependencies(index):
            return self._result()

    def _in_place_of(self, other):
        """Returns this worker's tensors by the `id`s of another worker's tensors."""
        theirs, local = other._variables(), self._variables()
        if [(v.shape, v.dtype) for v in theirs] != [(v.shape, v.dtype) for v in local]:
            return {}
        endpoint = other.optimizer.stepper.collectives
        peer = self.optimizer.stepper.collectives.peer
        return {
            **endpoint.channel.queues.in_place_of(endpoint.peer, peer),
            **{id(a.handle): b.handle for a, b in zip(theirs, local, strict=True)},
        }

    def _variables(self):
        """Returns the variables of the worker's functions."""
        model, optimizer = self.model, self.optimizer
        found = [*model.variables, *model.metrics_variables, *optimizer.variables]
        return [*(v.value for v in found), self._requested, self._received]

    def _step(self, index, iterator):
        with tf.control_dependencies([self._requested.assign_add(1)]):
            batch = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            self._received.assign_add(1)
        self.model.train_step(batch)
        return index + 1

    def batches(self) -> tuple[int, int]:
        """Returns the numbers of batches requested from the dataset, and received."""
        with tf.device(self.device):
            return int(self._requested.numpy()), int(self._received.numpy())

    def metrics(self) -> dict[str, tf.Tensor]:
        """Returns the values of the worker's logs."""
        return dict(self.model.get_metrics_result())

    def _result(self):
        logs = self.metrics()
        self._names = [*logs]
        return tf.stack([tf.cast(value, tf.float32) for value in logs.values()])

    def run(self, steps: int) -> np.ndarray:
        """Takes some steps; returns the values of the metrics after them."""
        with tf.device(remote.host_device()):
            return self._functions["run"](tf.constant(steps)).numpy()

    def named(self, values: np.ndarray) -> dict[str, float]:
        """Returns the logs with these values, by name."""
        return dict(zip(self._names, map(float, values), strict=True))

    def logs(self) -> dict[str, float]:
        """Returns the current logs."""
        with tf.device(self.device):
            return self.named(self._result().numpy())

    @property
    def batches_per_round(self) -> int:
        """Batches per round: the optimizer's `gradient_accumulation_steps`, or 1."""
        return self.optimizer.inner_optimizer.gradient_accumulation_steps or 1

    def rounds(self) -> int:
        """Returns the worker's number of rounds, skipped rounds included."""
        return self.committed_steps() + self.optimizer.skipped_steps

    def committed_steps(self) -> int:
        """Returns the number of steps that the worker has committed."""
        return int(self.optimizer.iterations.numpy())

    def kept_states(self) -> dict[str, State]:
        """Returns the worker's part of the servers' states, as arrays, by call site."""
        return {
            bucket.name: tf.nest.map_structure(lambda v: v.numpy(), bucket.state.server)
            for bucket in self.optimizer.stepper.buckets
        }

    def reset_metrics(self) -> None:
        """Resets the metrics."""
        with tf.device(self.device):
            self.model.reset_metrics()

    def drop_window(self) -> None:
        """Drops the accumulated gradients of an unfinished round."""
        with tf.device(self.device):
            self.optimizer.stepper.drop_window()

    def take(self, values: list[np.ndarray]) -> None:
        """Sets weights, counters and momenta to the values of `shared_values`."""
        with tf.device(self.device):
            assign_shared_values(self.model, values)
        self.drop_window()

    def take_seeds(self, seeds: list[int], rank: int) -> None:
        """Starts new random streams of the layers, such as dropout.

        The streams depend only on the step, the rank and the generators' seeds, which
        are the same for all workers, so that a resumed training draws the same numbers
        as an uninterrupted training.
        """
        states = seed_states(self.model).values()
        with tf.device(self.device):
            for state, seed in zip(states, seeds, strict=True):
                entropy = [seed % 2**64, rank, self.rounds()]
                (worker_seed,) = np.random.SeedSequence(entropy).generate_state(1)
                state.assign([int(worker_seed), 0])

    def take_learning_rate(self, rate: float) -> None:
        """Sets the learning rate, if it has changed."""
        if rate != self._rate:
            with tf.device(self.device):
                self.optimizer.learning_rate = self._rate = rate


class PushingWorker(RemoteWorker):
    """A worker that does not wait for others; its stepper is a `PushLogStepper`."""

    @override
    def _trace(self):
        stepper = self.optimizer.stepper
        return {**super()._trace(), "drain": self._traced(lambda _: stepper.drain())}

    @override
    def _variables(self):
        return [*super()._variables(), self.optimizer.stepper.staleness.value]

    def drain(self) -> None:
        """Applies the rest of the log."""
        with tf.device(remote.host_device()):
            self._functions["drain"]()

    @property
    def staleness(self) -> int:
        """The staleness of pushes since the last `reset_metrics`."""
        return int(self.optimizer.stepper.staleness.numpy())

    @override
    def metrics(self):
        staleness = tf.convert_to_tensor(self.optimizer.stepper.staleness)
        return {**super().metrics(), STALENESS: staleness}

    @override
    def reset_metrics(self):
        super().reset_metrics()
        with tf.device(self.device):
            self.optimizer.stepper.staleness.assign(tf.zeros([], tf.int64))


def _endless(dataset_fn, context):
    if not callable(dataset_fn):
        raise ValueError(
            "dataset_fn must be a function of a tf.distribute.InputContext that "
            f"returns a worker's dataset. Received: {dataset_fn=}"
        )
    dataset = dataset_fn(context)
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            "dataset_fn must return a tf.data.Dataset of batches. "
            f"Received: dataset_fn(context)={dataset!r}"
        )
    cardinality = dataset.cardinality().numpy()
    if cardinality >= 0:
        raise ValueError(
            f"The dataset of worker {context.input_pipeline_id} ends. Append "
            ".repeat(); steps_per_epoch ends an epoch. "
            f"Received: a dataset of {cardinality} batches"
        )
    return dataset


def shared_values(model: keras.Model) -> list[np.ndarray]:
    """Returns the values that are equal on all workers: weights, counters, momenta.

    Their order is the same in the models of the chief and of all workers.
    """
    return [variable.numpy() for variable in _shared_variables(model)]


def assign_shared_values(model: keras.Model, values: list[np.ndarray]) -> None:
    """Assigns the values of `shared_values`."""
    for variable, value in zip(_shared_variables(model), values, strict=True):
        variable.assign(value)


def _shared_variables(model):
    stepper = model.optimizer.stepper
    scalars = stepper.scalars
    return [
        *model.weights,
        *model.optimizer.inner_optimizer.variables,
        scalars.seed,
        scalars.previous_learning_rate,
        scalars.skipped_steps,
        *tf.nest.flatten([bucket.state.local for bucket in stepper.buckets]),
    ]
