"""Training with parameter servers: weights stay on the workers, words travel."""

from __future__ import annotations

import functools
import os
import queue
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp.distribute.asynchronous import asynchronous
from tfgradcomp.monitoring.traffic import Traffic
from tfgradcomp.ops import native
from tfgradcomp.optimizers import CompressedOptimizer
from tfgradcomp.optimizers.arguments import check_choice, check_integer
from tfgradcomp.seam import remote
from tfgradcomp.seam.per_worker_variable import PerWorkerVariable
from tfgradcomp.seam.trainer import epoch_to_resume_at
from tfgradcomp.transports import (
    Log,
    LogCollectives,
    Meeting,
    ParameterServer,
    PushPull,
    ServerCollectives,
)

MODES = ("sync", "async")
ON_WORKER_LOSS = ("continue", "wait")

_THREADS = 16
_PROBE_SECONDS = 5.0
_POLL_SECONDS = 0.5
_END_SECONDS = 60.0
_SCALARS = ("seed", "previous_learning_rate", "skipped_steps")
_STALENESS, _TOLD = "staleness", ".server.told"
_STEPS = tf.TensorSpec([], tf.int32)
_GONE = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


class ParameterServerTrainer:
    """Trains a Keras model on workers that meet on parameter servers.

    Run one script in all roles, with `TF_CONFIG` set: a chief, workers and parameter
    servers (ps). Workers and servers never get past the constructor: they serve. The
    chief goes on, and `fit` drives them. Every worker has weights of its own, which
    cross the wire when training begins, when an epoch ends (one worker's, to the
    chief) and when a worker joins again. In a step words cross it: payloads to the
    servers, one reply back. The weights of all workers are the same bits.

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
        steps_per_execution: Steps that workers take before the chief hears of them.

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
    ):
        check_choice("mode", mode, MODES)
        check_choice("on_worker_loss", on_worker_loss, ON_WORKER_LOSS)
        check_integer("steps_per_execution", steps_per_execution, 1)
        _check_optimizer(optimizer)
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        cluster = resolver.cluster_spec()
        _check_cluster(cluster)
        if resolver.task_type in ("worker", "ps"):
            serve(resolver)
        self._addresses = {
            f"/job:{job}/replica:0/task:{index}": cluster.task_address(job, index)
            for job in ("worker", "ps")
            for index in range(cluster.num_tasks(job))
        }
        # This process loses what variables it has when it connects.
        self._optimizer_config = optimizer.get_config()
        self._optimizer_class = type(optimizer)
        _connect(os.environ["TF_CONFIG"])
        self._make_model = make_model
        self._loss, self._metrics = loss, list(metrics)
        self._is_sync = mode == "sync"
        self._on_worker_loss = on_worker_loss
        self._steps_per_execution = steps_per_execution
        self._workers = []
        self.optimizer = self._optimizer_class.from_config(self._optimizer_config)
        self.model = self._compiled(self.optimizer)

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
                for each worker, which then runs its operations.
            epochs: The epoch to end with.
            steps_per_epoch: Rounds an epoch, which take a batch from every worker; in
                mode `"async"` pushes, which take one batch.
            validation_data: What the chief evaluates after each epoch: anything that
                `keras.Model.evaluate` takes.
            callbacks: Keras callbacks; their model is the chief's.
            verbose: As in `keras.Model.fit`.
            initial_epoch: The epoch to begin with.

        Returns:
            The history of logs, which are means over the workers.

        Raises:
            ConnectionError: If a parameter server is gone.
            RuntimeError: If all workers are gone.
            tf.errors.InvalidArgumentError: If a gradient is not finite and the
                optimizer's `nonfinite` is `"raise"`.
        """
        check_integer("steps_per_epoch", steps_per_epoch, 1)
        self._dataset_fn = dataset_fn
        for worker in self._workers:
            worker.close()
        # Workers that were lost, and are back, are taken in when an epoch begins.
        present = [worker.device for worker in self._workers]
        self._assemble(present or self._devices("worker"), self._workers)
        remote.build(self.model, self._workers[0].spec)
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
        for worker in self._workers:
            worker.take(_values(_shared(self.model)))
        self._rounds = self._workers[0].rounds()
        logs = {}
        for epoch in range(epoch_to_resume_at(self.model) or initial_epoch, epochs):
            self._welcome()
            callbacks.on_epoch_begin(epoch)
            self._surely(self._reset_metrics)
            done = 0
            while done < steps_per_epoch and not self.model.stop_training:
                taken, logs = self._run(done, steps_per_epoch, callbacks)
                done += taken
            self._surely(self._fetch)
            logs = dict(logs)
            if validation_data is not None:
                seen = self.model.evaluate(
                    validation_data, verbose=0, callbacks=callbacks, return_dict=True
                )
                logs.update({f"val_{name}": value for name, value in seen.items()})
            callbacks.on_epoch_end(epoch, logs)
            if self.model.stop_training:
                break
        self.optimizer.finalize_variable_values(self.model.trainable_variables)
        callbacks.on_train_end(logs)
        return self.model.history

    @property
    def traffic(self) -> Traffic:
        """What one worker moves in one step; to be asked after `fit`."""
        return self._workers[0].optimizer.traffic

    def weights_of_workers(self) -> list[list[np.ndarray]]:
        """Returns the trainable weights of each worker, as they are now."""
        return [_values(w.model.trainable_variables) for w in self._workers]

    def _new_worker(self, device, rank):
        kind = self._optimizer_class
        if self._is_sync:
            transport = ParameterServer(ServerCollectives(self._meeting, rank))
        else:
            kind = asynchronous(kind)
            transport = PushPull(LogCollectives(self._meeting, rank))
        with tf.device(device):
            optimizer = kind.from_config(self._optimizer_config)
            optimizer.transport = transport
            return _Worker(device, self._compiled(optimizer))

    def _compiled(self, optimizer):
        model = self._make_model()
        metrics = keras.tree.map_structure(_copy, self._metrics)
        model.compile(optimizer, self._loss, metrics=metrics)
        return model

    # Some steps.

    def _run(self, done, end, callbacks):
        """Lets the workers take some steps; `done` of `end` have been taken.

        Returns:
            How many were taken, and the logs.
        """
        self._surely(self._send_learning_rate)
        before = self._rounds
        run = self._run_together if self._is_sync else self._run_freely
        taken, logs, errors = run(done, end, callbacks)
        self._rounds += taken
        if errors:
            remote.forget_errors()
            self._go_on(self._survivors(errors))
            logs = self._surely(self._workers[0].logs)
        return self._rounds - before, logs

    def _surely(self, action):
        """Returns what an action returns, repeated without workers that are lost."""
        while True:
            try:
                return action()
            except _GONE as error:
                remote.forget_errors()
                current = [*self._serving, *(w.device for w in self._workers)]
                self._go_on(self._survivors(dict.fromkeys(current, error)))

    def _send_learning_rate(self):
        rate = self.optimizer.learning_rate
        # A schedule is followed by the workers themselves.
        if isinstance(rate, keras.Variable):
            for worker in self._workers:
                worker.take_learning_rate(float(rate.numpy()))

    def _reset_metrics(self):
        for worker in self._workers:
            worker.reset_metrics()

    def _run_together(self, done, end, callbacks):
        """All workers take the same steps; returns how many, the logs, and errors."""
        callbacks.on_train_batch_begin(done)
        steps = min(self._steps_per_execution, end - done)
        calls = {w.device: functools.partial(w.run, steps) for w in self._workers}
        for device, functions in self._serving.items():
            calls[device] = functools.partial(functions["rounds"], tf.constant(steps))
        waiting, values, errors = {*calls}, [], {}
        told = _start([*calls.items()])
        while waiting:
            device, outcome = _next(told, errors)
            waiting.discard(device)
            if isinstance(outcome, Exception):
                errors[device] = outcome
            elif device not in self._serving:
                values.append(outcome)
            if errors:
                # Replies stay open until no server can give them to some workers only.
                serves = not waiting.isdisjoint(self._serving)
                with remote.own_executor():
                    self._meeting.close("up" if serves else "down")
        if errors:
            return 0, {}, errors
        logs = self._workers[0].named(np.mean(values, axis=0))
        callbacks.on_train_batch_end(done + steps - 1, logs)
        return steps, logs, {}

    def _run_freely(self, done, end, callbacks):
        """Each worker pushes when it can; as `_run_together`."""
        budget = _Budget(end - done, self._steps_per_execution)
        told = queue.SimpleQueue()

        def drive(worker):
            while steps := budget.take():
                told.put((worker.device, (steps, worker.run(steps))))

        serving = [
            (device, function)
            for device, functions in self._serving.items()
            for function in functions.values()
        ]
        served = _start(serving)
        drives = [(w.device, functools.partial(drive, w)) for w in self._workers]
        _start(drives, told)
        waiting, values, errors, logs, pushes = {*dict(drives)}, {}, {}, {}, 0
        while waiting:
            device, outcome = told.get()
            if isinstance(outcome, tuple):
                steps, values[device] = outcome
                callbacks.on_train_batch_begin(done + pushes)
                pushes += steps
                logs = self._workers[0].named(np.mean([*values.values()], axis=0))
                logs[_STALENESS] *= len(values) / (done + pushes)
                callbacks.on_train_batch_end(done + pushes - 1, logs)
                if self.model.stop_training:
                    budget.end()
                continue
            waiting.discard(device)
            if isinstance(outcome, Exception):
                errors[device] = outcome
                # The loss of a worker is no reason for the others to end.
                if device not in self._lost(errors):
                    budget.end()
        self._meeting.stop()
        for _ in serving:
            device, outcome = _next(served, errors)
            if isinstance(outcome, Exception):
                errors[device] = outcome
        self._meeting.end()
        drains = [(w.device, w.drain) for w in self._workers if w.device not in errors]
        drained = _start(drains)
        for _ in drains:
            device, outcome = _next(drained, errors)
            if isinstance(outcome, Exception):
                errors[device] = outcome
        return 0 if errors else pushes, logs, errors

    def _survivors(self, errors):
        """Returns the workers left, or raises what cannot be borne."""
        if not errors:
            return self._workers
        lost = self._lost(errors)
        servers = [device for device in lost if device in self._serving]
        if servers:
            raise ConnectionError(
                "Parameter servers are gone, with the state that they held. Start all "
                "tasks again and resume from the last checkpoint, for example by "
                f"keras.callbacks.BackupAndRestore. Received: {servers}"
            )
        if not lost:
            raise _cause(errors)
        survivors = [w for w in self._workers if w.device not in lost]
        if not survivors:
            raise RuntimeError(
                "All workers are gone. Start all tasks again and resume from the last "
                f"checkpoint. Received: {lost}"
            )
        return survivors

    def _lost(self, errors):
        gone = [device for device in errors if not self._answers(device)]
        # One that was started again at once answers, but does not know this cluster.
        new = [
            device
            for device, error in errors.items()
            if isinstance(error, _GONE) and f"target {device}" in str(error)
        ]
        return sorted({*gone, *new})

    def _answers(self, device):
        host, _, port = self._addresses[device].rpartition(":")
        try:
            address = host.strip("[]"), int(port)
            with socket.create_connection(address, _PROBE_SECONDS):
                return True
        except OSError:
            return False

    # Who takes part.

    def _devices(self, job):
        return [device for device in self._addresses if f"/job:{job}/" in device]

    def _go_on(self, survivors):
        rounds = {worker.rounds() for worker in survivors}
        if len(rounds) > 1:
            raise RuntimeError(f"The workers took different numbers of steps: {rounds}")
        (self._rounds,) = rounds
        devices = [worker.device for worker in survivors]
        lost = ", ".join(w.device for w in self._workers if w.device not in devices)
        if self._on_worker_loss == "continue":
            _say(f"lost {lost}; going on with {len(survivors)} worker(s)")
            self._assemble(devices, survivors)
            return
        _say(f"lost {lost}; waiting until started again")
        while not all(map(self._answers, self._addresses)):
            time.sleep(_POLL_SECONDS)
        remote.reconnect()
        self._assemble([worker.device for worker in self._workers], survivors)

    def _welcome(self):
        """Takes in workers that were lost and are back."""
        back = {*self._devices("worker")} - {w.device for w in self._workers}
        if back and all(map(self._answers, self._addresses)):
            _say(f"back: {', '.join(sorted(back))}")
            remote.reconnect()
            self._assemble(self._devices("worker"), self._workers)

    def _assemble(self, devices, old):
        """Makes the workers of these devices meet, of which `old` are there already."""
        states, shared = {}, None
        if old:
            steps = int(old[0].optimizer.iterations.numpy())
            states = self._meeting.whole_states(steps, old[0].told())
            shared = _values(_shared(old[0].model))
            self._meeting.free()
        servers = [f"{device}/device:CPU:0" for device in self._devices("ps")]
        name = f"tfgradcomp/{uuid.uuid4().hex}"
        kind = Meeting if self._is_sync else Log
        self._meeting = kind(name, servers, len(devices), states)
        by_device = {worker.device: worker for worker in old}
        self._workers = []
        for rank, device in enumerate(devices):
            worker = by_device.get(device)
            if worker is None:
                worker = self._new_worker(device, rank)
            worker.open(self._dataset_fn, len(devices), rank)
            worker.join(self._meeting, rank)
            if shared and device not in by_device:
                worker.take(shared)
            self._workers.append(worker)
        self._serving = {}
        for index, device in enumerate(self._devices("ps")):
            served = self._meeting.serve(index)
            self._serving[device] = {"rounds": served} if self._is_sync else served

    def _fetch(self):
        """Brings the weights, counters and momenta to the chief."""
        first = self._workers[0].model
        for own, value in zip(
            _shared(self.model), _values(_shared(first)), strict=True
        ):
            own.assign(value)
        # What no gradient changes, as the statistics of a batch, differs by worker.
        others = [_values(w.model.non_trainable_weights) for w in self._workers]
        for own, values in zip(
            self.model.non_trainable_weights, zip(*others, strict=True), strict=True
        ):
            if np.issubdtype(values[0].dtype, np.floating):
                own.assign(np.mean(values, axis=0))


class _Worker:
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
        """Opens the worker's dataset, if it is not open."""
        if self._iterator is None:
            with tf.device(self.device):
                dataset = dataset_fn(
                    tf.distribute.InputContext(num_workers, rank, num_workers)
                )
                self.spec = dataset.element_spec
                self._iterator = iter(dataset)
                remote.build(self.model, self.spec)

    def close(self):
        """Closes the worker's dataset."""
        self._iterator = None

    def join(self, meeting, rank):
        """Makes the worker one of those of a meeting."""
        self.optimizer.transport.collectives.join(meeting, rank)

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
        self._function = run.get_concrete_function(self._iterator, _STEPS)
        if isinstance(self.optimizer.transport, PushPull):
            self.drain = drain.get_concrete_function()

    def _step(self, index, iterator):
        self.model.train_step(next(iterator))
        return index + 1

    def _result(self):
        logs = dict(self.model.get_metrics_result())
        if isinstance(self.optimizer.transport, PushPull):
            logs[_STALENESS] = tf.convert_to_tensor(self.optimizer.staleness)
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

    def told(self):
        """Returns what the transport keeps to tell the servers, by call sites."""
        states = {v.name: v for v in self.optimizer.variables}
        return {
            name.removesuffix(_TOLD): variable.numpy()
            for name, variable in states.items()
            if name.endswith(_TOLD)
        }

    def reset_metrics(self):
        """Forgets what the metrics have seen."""
        with tf.device(self.device):
            self.model.reset_metrics()
            if isinstance(self.optimizer.transport, PushPull):
                self.optimizer.staleness.assign(tf.zeros([], tf.int64))

    def take(self, values):
        """Takes over weights, counters and momenta."""
        with tf.device(self.device):
            for variable, value in zip(_shared(self.model), values, strict=True):
                variable.assign(value)

    def take_learning_rate(self, rate):
        """Takes over a learning rate, where it is another one."""
        if rate != self._rate:
            with tf.device(self.device):
                self.optimizer.learning_rate = self._rate = rate


def serve(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
    """Serves as the worker or the parameter server that `resolver` says, for ever."""
    try:
        native.library()
    except native.UnavailableError as error:
        _say(f"the native operations are missing here: {error}")
    # What waits for other tasks may hold a thread each; were all held, it would wait
    # for ever. Waiting threads cost no core.
    threads = int(os.environ.get("TF_NUM_INTEROP_THREADS", 0))
    threads = max(_THREADS, threads, os.cpu_count())
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads),
    )
    server.join()


@functools.cache
def _connect(config):
    """Connects this process with all tasks of a cluster, once."""
    return tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )


class _Budget:
    """Steps that threads take from, some at a time."""

    def __init__(self, steps, at_once):
        self._steps, self._at_once = steps, at_once
        self._lock = threading.Lock()

    def take(self):
        """Returns how many steps the caller is to take."""
        with self._lock:
            steps = min(self._at_once, self._steps)
            self._steps -= steps
        return steps

    def end(self):
        """Leaves nothing to take."""
        with self._lock:
            self._steps = 0


def _start(calls, told=None):
    """Calls functions in threads of their own.

    Args:
        calls: Pairs of a device and a function, which is called for it.
        told: The queue of pairs of a device and what the function returned, or the
            error that it ended in; None: a new one.

    Returns:
        The queue.
    """
    told = told or queue.SimpleQueue()

    def run(device, call):
        try:
            with remote.own_executor(), tf.device(device):
                told.put((device, call()))
        except Exception as error:
            told.put((device, error))

    for pair in calls:
        threading.Thread(target=run, args=pair, daemon=True).start()
    return told


def _next(told, errors):
    """Returns what is told next; after an error nobody is waited for without end."""
    try:
        return told.get(timeout=_END_SECONDS if errors else None)
    except queue.Empty:
        raise RuntimeError(
            f"After an error, others did not end within {_END_SECONDS:g} s. "
            f"Received: {errors}"
        ) from None


def _cause(errors):
    """The error that the others follow from: those met closed queues."""
    first = [error for error in errors.values() if "is closed" not in str(error)]
    return (first or [*errors.values()])[0]


def _shared(model):
    """The variables that a worker takes over from another, in any replica's order."""
    own = [v for v in model.optimizer.variables if isinstance(v, PerWorkerVariable)]
    scalars = [v for v in own if v.name in _SCALARS]
    return [*model.weights, *model.optimizer.inner_optimizer.variables, *scalars]


def _values(variables):
    return [variable.numpy() for variable in variables]


def _copy(metric):
    if not isinstance(metric, keras.metrics.Metric):
        return metric
    config = keras.saving.serialize_keras_object(metric)
    return keras.saving.deserialize_keras_object(config)


def _check_optimizer(optimizer):
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
    if optimizer.needs_second_moments:
        raise ValueError(
            "Parameter servers take no method that needs second moments. Use "
            "MultiWorkerMirroredStrategy, or another method. "
            f"Received: optimizer={type(optimizer).__name__}"
        )
    if optimizer.inner_optimizer.gradient_accumulation_steps:
        raise ValueError(
            "Parameter servers expect gradients at every step. Take larger batches "
            "instead of gradient_accumulation_steps="
            f"{optimizer.inner_optimizer.gradient_accumulation_steps}"
        )


def _check_cluster(cluster):
    tasks = {job: cluster.num_tasks(job) for job in cluster.jobs}
    if tasks.get("chief") != 1 or not tasks.get("worker") or not tasks.get("ps"):
        raise ValueError(
            "TF_CONFIG must describe a cluster of one chief, workers and parameter "
            "servers, and the task that this process is. `python -m tfgradcomp.launch "
            f"--workers 2 --ps 1 script.py` sets it. Received: tasks={tasks}"
        )


def _say(text):
    print(f"tfgradcomp: {text}", file=sys.stderr, flush=True)
