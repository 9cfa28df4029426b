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
    """A worker's model, data and optimizer, driven from the chief.

    Attributes:
        device: The worker's device, `/job:worker/...`.
        model: The worker's replica of the model, compiled.
        optimizer: The optimizer of that model.
        spec: The `element_spec` of its dataset.
        traced: Its functions, which others may have as well.
    """

    def __init__(self, device: str, model: keras.Model):
        self.device = device
        self.model, self.optimizer = model, model.optimizer
        self._iterator = None
        self._rate: float | None = None
        self._names: list[str] = []
        with tf.device(device), tf.device("CPU:0"):
            self._asked, self._got = (
                tf.Variable(tf.constant(0, tf.int64)) for _ in range(2)
            )

    def open(self, dataset_fn: Callable, num_workers: int, rank: int) -> None:
        """Opens the worker's dataset, if it is not open.

        Raises:
            ValueError: If `dataset_fn` returns no dataset, or one that ends.
        """
        if self._iterator is None:
            with tf.device(self.device):
                dataset = _endless(
                    dataset_fn,
                    tf.distribute.InputContext(num_workers, rank, num_workers),
                )
                self.spec = dataset.element_spec
                self._iterator = iter(dataset)
                remote.build(self.model, self.spec)

    def close(self) -> None:
        """Closes the worker's dataset."""
        self._iterator = None

    def join(self, channel, rank: int, first: RemoteWorker | None = None) -> None:
        """Makes the worker one of those of a channel.

        Tracing its steps declares what servers must answer.

        Args:
            channel: Where the workers meet.
            rank: The worker's rank there.
            first: One that has joined it. If both train the same, nothing is traced.
        """
        stepper = self.optimizer.stepper
        stepper.collectives.join(channel, rank)
        for bucket in stepper.buckets:
            bucket.rebind()
        if first and first.spec == self.spec:
            own = self._in_place_of(first)
            if all(one.fits(own) for one in first.traced.values()):
                self._place(first.traced, own)
                self._names = first._names
                return
        with remote.losses_of(stepper.collectives.num_workers):
            traced = self._trace()
        self._place(traced, self._in_place_of(self))

    def _place(self, traced, own):
        self.traced, rank = traced, self.optimizer.stepper.collectives.peer
        self._functions = {
            name: one.on(self.device, rank, self._iterator, own)
            for name, one in traced.items()
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
        """Returns this worker's tensors by the `id`s of another's."""
        theirs, own = other._variables(), self._variables()
        if [(v.shape, v.dtype) for v in theirs] != [(v.shape, v.dtype) for v in own]:
            return {}
        endpoints = [w.optimizer.stepper.collectives for w in (other, self)]
        return {
            **endpoints[0].channel.queues.in_place_of(
                *(endpoint.peer for endpoint in endpoints)
            ),
            **{id(a.handle): b.handle for a, b in zip(theirs, own, strict=True)},
        }

    def _variables(self):
        """Returns the variables of its functions."""
        model, optimizer = self.model, self.optimizer
        found = [*model.variables, *model.metrics_variables, *optimizer.variables]
        return [*(variable.value for variable in found), self._asked, self._got]

    def _step(self, index, iterator):
        with tf.control_dependencies([self._asked.assign_add(1)]):
            batch = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            self._got.assign_add(1)
        self.model.train_step(batch)
        return index + 1

    def batches(self) -> tuple[int, int]:
        """Returns how many batches its steps have asked the dataset for, and got."""
        with tf.device(self.device):
            return int(self._asked.numpy()), int(self._got.numpy())

    def measured(self) -> dict[str, tf.Tensor]:
        """Returns what the worker's logs are made of."""
        return dict(self.model.get_metrics_result())

    def _result(self):
        logs = self.measured()
        self._names = [*logs]
        return tf.stack([tf.cast(value, tf.float32) for value in logs.values()])

    def run(self, steps: int) -> np.ndarray:
        """Takes some steps; returns the values of the metrics then."""
        with tf.device(remote.host_device()):
            return self._functions["run"](tf.constant(steps)).numpy()

    def named(self, values: np.ndarray) -> dict[str, float]:
        """Returns the logs that have these values."""
        return dict(zip(self._names, map(float, values), strict=True))

    def logs(self) -> dict[str, float]:
        """Returns the logs as they are now."""
        with tf.device(self.device):
            return self.named(self._result().numpy())

    @property
    def batches_per_round(self) -> int:
        """Batches a round: the optimizer's `gradient_accumulation_steps`, or 1."""
        return self.optimizer.inner_optimizer.gradient_accumulation_steps or 1

    def rounds(self) -> int:
        """Returns how many rounds it took part in, skipped ones included."""
        return self.committed_steps() + self.optimizer.skipped_steps

    def committed_steps(self) -> int:
        """Returns how many steps it has committed."""
        return int(self.optimizer.iterations.numpy())

    def kept_states(self) -> dict[str, State]:
        """Returns what it keeps of the servers' states, as arrays, by call sites."""
        return {
            bucket.name: tf.nest.map_structure(lambda v: v.numpy(), bucket.state.server)
            for bucket in self.optimizer.stepper.buckets
        }

    def reset_metrics(self) -> None:
        """Forgets what the metrics have seen."""
        with tf.device(self.device):
            self.model.reset_metrics()

    def drop_window(self) -> None:
        """Forgets gradients of a round that it has begun and does not end."""
        with tf.device(self.device):
            self.optimizer.stepper.drop_window()

    def take(self, values: list[np.ndarray]) -> None:
        """Takes over weights, counters and momenta."""
        with tf.device(self.device):
            own = shared_variables(self.model)
            for variable, value in zip(own, values, strict=True):
                variable.assign(value)
        self.drop_window()

    def take_seeds(self, seeds: list[int], rank: int) -> None:
        """Begins new streams of what its layers draw, such as dropout.

        They follow from the step and the arguments alone, so that a training that
        resumes draws what it would have drawn.

        Args:
            seeds: A seed for each generator, the same for all workers.
            rank: The worker's rank.
        """
        states = seed_states(self.model).values()
        with tf.device(self.device):
            for state, seed in zip(states, seeds, strict=True):
                entropy = [seed % 2**64, rank, self.rounds()]
                (own,) = np.random.SeedSequence(entropy).generate_state(1)
                state.assign([int(own), 0])

    def take_learning_rate(self, rate: float) -> None:
        """Takes over a learning rate, where it is another one."""
        if rate != self._rate:
            with tf.device(self.device):
                self.optimizer.learning_rate = self._rate = rate


class PushingWorker(RemoteWorker):
    """A worker that waits for nobody; its optimizer has a `PushLogStepper`."""

    @override
    def _trace(self):
        stepper = self.optimizer.stepper
        return {**super()._trace(), "drain": self._traced(lambda _: stepper.drain())}

    @override
    def _variables(self):
        return [*super()._variables(), self.optimizer.stepper.staleness.value]

    def drain(self) -> None:
        """Applies what is left of the log, to its end."""
        with tf.device(remote.host_device()):
            self._functions["drain"]()

    @property
    def staleness(self) -> int:
        """Pushes of others that came in between, over all own pushes of an epoch."""
        return int(self.optimizer.stepper.staleness.numpy())

    @override
    def measured(self):
        staleness = tf.convert_to_tensor(self.optimizer.stepper.staleness)
        return {**super().measured(), STALENESS: staleness}

    @override
    def reset_metrics(self):
        super().reset_metrics()
        with tf.device(self.device):
            self.optimizer.stepper.staleness.assign(tf.zeros([], tf.int64))


def _endless(dataset_fn, context):
    if not callable(dataset_fn):
        raise ValueError(
            "dataset_fn must be a function of a tf.distribute.InputContext that "
            f"returns a worker's dataset. Received: dataset_fn={dataset_fn!r}"
        )
    dataset = dataset_fn(context)
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            "dataset_fn must return a tf.data.Dataset of batches. "
            f"Received: {type(dataset).__name__}"
        )
    cardinality = dataset.cardinality().numpy()
    if cardinality >= 0:
        raise ValueError(
            f"The dataset of worker {context.input_pipeline_id} ends after "
            f"{cardinality} batches. Append .repeat(); steps_per_epoch says when an "
            "epoch ends."
        )
    return dataset


def shared_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that a worker takes over from another.

    Their order is the same in the model of every worker and of the chief.
    """
    stepper = model.optimizer.stepper
    scalars = stepper.scalars
    return [
        *model.weights,
        *model.optimizer.inner_optimizer.variables,
        scalars.seed,
        scalars.previous_learning_rate,
        scalars.skipped_steps,
        *(v for bucket in stepper.buckets for v in tf.nest.flatten(bucket.state.local)),
    ]


def values_of(variables: list) -> list[np.ndarray]:
    """Returns the variables' values, as arrays."""
    return [variable.numpy() for variable in variables]
