"""A worker of `ParameterServerTrainer`, as the chief sees it."""

from __future__ import annotations

import tensorflow as tf

from tfgradcomp.compat import remote
from tfgradcomp.compat.per_replica_variable import PerReplicaVariable
from tfgradcomp.transports import PushPull

STALENESS = "staleness"

_SCALARS = ("seed", "previous_learning_rate", "skipped_steps")
_TOLD = ".server.told"
_STEPS = tf.TensorSpec([], tf.int32)


class RemoteWorker:
    """A worker's model, data and optimizer, driven from the chief.

    Attributes:
        device: The worker's device, `/job:worker/...`.
        model: Its replica of the model.
        optimizer: Its replica of the optimizer.
        spec: The `element_spec` of its dataset.
    """

    def __init__(self, device, model):
        self.device = device
        self.model, self.optimizer = model, model.optimizer
        self._iterator = self._rate = None

    def open(self, dataset_fn, num_workers, rank):
        """Opens the worker's dataset, if it is not open.

        Raises:
            ValueError: If it is none, or ends.
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

    def close(self):
        """Closes the worker's dataset."""
        self._iterator = None

    def join(self, rendezvous, rank):
        """Makes the worker one of those of a rendezvous."""
        self.optimizer.transport.collectives.join(rendezvous, rank)

        @tf.function(autograph=False)
        def run(iterator, steps):
            with tf.device(self.device):
                index = tf.while_loop(
                    lambda index: index < steps,
                    lambda index: (self._step(index, iterator),),
                    [tf.constant(0)],
                    parallel_iterations=1,
                )
                with tf.control_dependencies(index):
                    return self._result()

        @tf.function(autograph=False)
        def drain():
            with tf.device(self.device):
                self.optimizer.drain()

        # Traced now, as that says what servers must answer.
        with remote.losses_of(self.optimizer.transport.collectives.num_workers):
            self._function = run.get_concrete_function(self._iterator, _STEPS)
        if isinstance(self.optimizer.transport, PushPull):
            self.drain = drain.get_concrete_function()

    def _step(self, index, iterator):
        self.model.train_step(next(iterator))
        return index + 1

    def _result(self):
        logs = dict(self.model.get_metrics_result())
        if isinstance(self.optimizer.transport, PushPull):
            logs[STALENESS] = tf.convert_to_tensor(self.optimizer.staleness)
        self._names = [*logs]
        return tf.stack([tf.cast(value, tf.float32) for value in logs.values()])

    def run(self, steps):
        """Takes some steps; returns what the metrics are then."""
        return self._function(self._iterator, tf.constant(steps)).numpy()

    def named(self, values):
        """Returns the logs of these values."""
        return dict(zip(self._names, map(float, values), strict=True))

    def logs(self):
        """Returns what the worker's metrics are."""
        with tf.device(self.device):
            return self.named(self._result().numpy())

    def rounds(self):
        """Returns how many rounds it took part in, skipped ones included."""
        return int(self.optimizer.iterations.numpy()) + self.optimizer.skipped_steps

    def committed(self):
        """Returns what `Rendezvous.whole_states` asks of a worker."""
        told = {
            name.removesuffix(_TOLD): variable.numpy()
            for name, variable in self.state().items()
            if name.endswith(_TOLD)
        }
        return int(self.optimizer.iterations.numpy()), told

    def state(self):
        """Returns the variables of the method's state, by names."""
        return method_state(self.optimizer)

    def reset_metrics(self):
        """Forgets what the metrics have seen."""
        with tf.device(self.device):
            self.model.reset_metrics()
            if isinstance(self.optimizer.transport, PushPull):
                self.optimizer.staleness.assign(tf.zeros([], tf.int64))

    def take(self, values):
        """Takes over weights, counters and momenta."""
        with tf.device(self.device):
            own = shared_variables(self.model)
            for variable, value in zip(own, values, strict=True):
                variable.assign(value)

    def take_learning_rate(self, rate):
        """Takes over a learning rate, where it is another one."""
        if rate != self._rate:
            with tf.device(self.device):
                self.optimizer.learning_rate = self._rate = rate


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


def shared_variables(model):
    """The variables that a worker takes over from another, in any replica's order."""
    state = method_state(model.optimizer)
    same = [v for name, v in state.items() if name in _SCALARS or ".local." in name]
    return [*model.weights, *model.optimizer.inner_optimizer.variables, *same]


def values_of(variables):
    """Returns the variables' values, as arrays."""
    return [variable.numpy() for variable in variables]


def method_state(optimizer):
    """Returns the variables of a method's state, by names."""
    return {v.name: v for v in optimizer.variables if isinstance(v, PerReplicaVariable)}
