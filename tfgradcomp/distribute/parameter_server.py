"""Training with parameter servers: weights stay on the workers, words travel."""

from __future__ import annotations

import collections
import contextlib
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
from tfgradcomp.distribute.remote_worker import (
    STALENESS,
    RemoteWorker,
    method_state,
    shared_variables,
    values_of,
)
from tfgradcomp.monitoring.traffic import Traffic
from tfgradcomp.ops import library
from tfgradcomp.optimizers import CompressedOptimizer
from tfgradcomp.optimizers.arguments import check_choice, check_integer
from tfgradcomp.seam import remote
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
_WATCH_SECONDS = 10.0
_END_SECONDS = 60.0
_ATTEMPTS = 5
_GONE = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


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
        self._workers, self._serving, self._meeting = [], {}, None
        self._absent = set()
        self.optimizer = self._optimizer_class.from_config(self._optimizer_config)
        self.model = None
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
                for each worker, which then runs its operations. A Python generator
                would stay in the chief's process, and its batches cross the network.
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
            ValueError: If a worker's dataset ends.
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
        self._save_state_of_all()
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
        for worker in self._workers:
            worker.take(shared)
        self._rounds = self._workers[0].rounds()
        logs = {}
        for epoch in range(epoch_to_resume_at(self.model) or initial_epoch, epochs):
            self._surely(self._welcome)
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
    def num_workers(self) -> int:
        """How many workers take part."""
        return len(self._workers) or len(self._devices("worker"))

    @property
    def traffic(self) -> Traffic:
        """What one worker moves in one step; to be asked after `fit`."""
        return self._workers[0].optimizer.traffic

    def weights_of_workers(self) -> list[list[np.ndarray]]:
        """Returns the trainable weights of each worker, as they are now."""
        return [values_of(w.model.trainable_variables) for w in self._workers]

    def _new_worker(self, device, meeting, rank):
        kind = self._optimizer_class
        if self._is_sync:
            transport = ParameterServer(ServerCollectives(meeting, rank))
        else:
            kind = asynchronous(kind)
            transport = PushPull(LogCollectives(meeting, rank))
        with tf.device(device):
            optimizer = kind.from_config(self._optimizer_config)
            optimizer.transport = transport
            return RemoteWorker(device, self._compiled(optimizer))

    def _compiled(self, optimizer):
        model = self._make_model()
        if model in [self.model, *(worker.model for worker in self._workers)]:
            raise ValueError(
                "make_model must return a new model whenever it is called: chief and "
                "workers have one each. Received: the same model again"
            )
        metrics = keras.tree.map_structure(_copy, self._metrics)
        model.compile(optimizer, self._loss, metrics=metrics)
        if model.optimizer is not optimizer:
            raise ValueError(
                "With parameter servers losses are not scaled. Use the policy "
                "'mixed_bfloat16' or 'float32' instead of "
                f"'{keras.mixed_precision.dtype_policy().name}'."
            )
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
            self._recover(errors)
            logs = self._surely(self._workers[0].logs)
        return self._rounds - before, logs

    def _surely(self, action):
        """Returns what an action returns, repeated without workers that are lost."""
        while True:
            try:
                return action()
            except _GONE as error:
                self._recover(dict.fromkeys(self._present(), error))

    def _recover(self, errors):
        """Goes on without who is lost, and who is lost meanwhile, or raises."""
        lost = set()
        for _ in range(_ATTEMPTS):
            remote.forget_errors()
            lost |= self._lost(errors)
            if not lost:
                break
            try:
                return self._go_on(lost)
            except _GONE as error:
                errors = dict.fromkeys(self._present(), error)
        raise _cause(errors)

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
            device, outcome = self._next(told, waiting, errors)
            waiting.discard(device)
            if isinstance(outcome, Exception):
                errors[device] = outcome
            elif device not in self._serving:
                values.append(outcome)
            if errors:
                self._check_servers()
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
            device, outcome = self._next(told, waiting, {})
            if isinstance(outcome, tuple):
                steps, values[device] = outcome
                callbacks.on_train_batch_begin(done + pushes)
                pushes += steps
                logs = self._workers[0].named(np.mean([*values.values()], axis=0))
                logs[STALENESS] *= len(values) / (done + pushes)
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
        self._check_servers()
        self._meeting.stop()
        errors |= self._errors_of(serving, served, errors)
        self._meeting.end()
        drains = [(w.device, w.drain) for w in self._workers if w.device not in errors]
        errors |= self._errors_of(drains, _start(drains), errors)
        return 0 if errors else pushes, logs, errors

    def _errors_of(self, calls, told, errors):
        """Waits for the end of calls; returns their errors, by devices."""
        waiting = [device for device, _ in calls]
        found = {}
        while waiting:
            device, outcome = self._next(told, waiting, errors | found)
            waiting.remove(device)
            if isinstance(outcome, Exception):
                found[device] = outcome
        return found

    def _next(self, told, waiting, errors):
        """Returns what is told next, or the error of a machine that does not answer.

        After an error nobody is waited for without end.
        """
        while True:
            with contextlib.suppress(queue.Empty):
                return told.get(timeout=_END_SECONDS if errors else _WATCH_SECONDS)
            # A machine without power closes no connection.
            self._check_servers()
            for device in waiting:
                if not self._answers(device):
                    text = f"no answer from {device} at {self._addresses[device]}"
                    return device, tf.errors.UnavailableError(None, None, text)
            if errors:
                raise RuntimeError(
                    f"After an error, others did not end within {_END_SECONDS:g} s. "
                    f"Received: {errors}"
                )

    def _check_servers(self, lost=frozenset()):
        """Raises an error if servers are among the lost, or do not answer."""
        servers = self._devices("ps")
        gone = [d for d in servers if d in lost or not self._answers(d)]
        if gone:
            raise ConnectionError(
                "Parameter servers are gone, with the state that they held. Start all "
                "tasks again and resume from the last checkpoint, for example by "
                f"keras.callbacks.BackupAndRestore. Received: {gone}"
            )

    def _lost(self, errors):
        """Returns the devices of tasks that are gone, of those that have an error."""
        gone = {device for device in errors if not self._answers(device)}
        # One that was started again at once answers, but does not know this cluster.
        new = {
            device
            for device, error in errors.items()
            if isinstance(error, _GONE) and f"target {device}" in str(error)
        }
        return gone | new

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

    def _present(self):
        return [device for device in self._addresses if device not in self._absent]

    def _go_on(self, lost):
        """Goes on without the tasks of these devices, or waits for them."""
        self._check_servers(lost)
        survivors = [w for w in self._workers if w.device not in lost]
        if not survivors:
            raise RuntimeError(
                "All workers are gone. Start all tasks again and resume from the last "
                f"checkpoint. Received: {sorted(lost)}"
            )
        rounds = {worker.rounds() for worker in survivors}
        if len(rounds) > 1:
            raise RuntimeError(f"The workers took different numbers of steps: {rounds}")
        (self._rounds,) = rounds
        names = ", ".join(sorted(lost))
        if self._on_worker_loss == "continue":
            _say(f"lost {names}; going on with {len(survivors)} worker(s)")
            self._assemble([worker.device for worker in survivors], survivors)
            self._absent |= lost
            return
        _say(f"lost {names}; waiting until started again")
        while not all(map(self._answers, self._addresses)):
            time.sleep(_POLL_SECONDS)
        remote.reconnect()
        self._assemble([worker.device for worker in self._workers], survivors)

    def _welcome(self):
        """Takes in workers that were lost and are back."""
        if self._absent and all(map(self._answers, self._addresses)):
            _say(f"back: {', '.join(sorted(self._absent))}")
            self._absent = set()
            remote.reconnect()
            self._assemble(self._devices("worker"), self._workers)

    def _assemble(self, devices, old):
        """Makes the workers of these devices meet, of which `old` are there already.

        Where that fails all is as before, and can be tried again.
        """
        states, shared = {}, None
        if old:
            states = self._meeting.whole_states(*old[0].committed())
            shared = values_of(shared_variables(old[0].model))
        servers = [f"{device}/device:CPU:0" for device in self._devices("ps")]
        kind = Meeting if self._is_sync else Log
        name = f"tfgradcomp/{uuid.uuid4().hex}"
        meeting = kind(name, servers, len(devices), states)
        by_device = {worker.device: worker for worker in old}
        workers = []
        for rank, device in enumerate(devices):
            worker = by_device.get(device) or self._new_worker(device, meeting, rank)
            worker.open(self._dataset_fn, len(devices), rank)
            worker.join(meeting, rank)
            if shared and device not in by_device:
                worker.take(shared)
            workers.append(worker)
        serving = {}
        for index, device in enumerate(self._devices("ps")):
            served = meeting.serve(index)
            serving[device] = {"rounds": served} if self._is_sync else served
        if self._meeting:
            self._meeting.free()
        self._meeting, self._workers, self._serving = meeting, workers, serving

    # State.

    def _save_state_of_all(self):
        """Makes what saves the chief's optimizer save the workers' and servers' state.

        A file is then like one of a process with as many replicas as there are workers.
        """
        count = collections.Counter()
        for name, variable in method_state(self.optimizer).items():
            site, _, of_server = name.partition(".server.")
            if of_server:
                place = site, count[site]
                functions = self._read_servers, self._restore_servers
                count[site] += 1
            elif ".worker." in name:
                place = (name,)
                functions = self._read_workers, self._restore_workers
            else:
                continue
            read, write = (functools.partial(f, *place) for f in functions)
            variable.stand_for(functools.partial(self._surely, read), write)

    def _read_workers(self, name):
        return np.stack([worker.state()[name].numpy() for worker in self._workers])

    def _restore_workers(self, name, values):
        for worker, value in zip(self._workers, values, strict=True):
            with tf.device(worker.device):
                worker.state()[name].assign(value)

    def _read_servers(self, site, index):
        whole = self._meeting.whole_state(site, *self._workers[0].committed())
        return whole[index][np.newaxis]

    def _restore_servers(self, site, index, values):
        self._meeting.restore(site, index, values[0])

    def _fetch(self):
        """Brings the weights, counters and momenta to the chief."""
        first = self._workers[0].model
        for own, value in zip(
            shared_variables(self.model),
            values_of(shared_variables(first)),
            strict=True,
        ):
            own.assign(value)
        # What no gradient changes, as the statistics of a batch, differs by worker.
        others = [values_of(w.model.non_trainable_weights) for w in self._workers]
        for own, values in zip(
            self.model.non_trainable_weights, zip(*others, strict=True), strict=True
        ):
            if np.issubdtype(values[0].dtype, np.floating):
                own.assign(np.mean(values, axis=0))


def serve(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
    """Serves as the worker or the parameter server that `resolver` says, for ever."""
    try:
        library.library()
    except library.UnavailableError as error:
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


def _cause(errors):
    """The error that the others follow from: those met closed queues."""
    first = [error for error in errors.values() if "is closed" not in str(error)]
    cause = (first or [*errors.values()])[0]
    if isinstance(cause, tf.errors.OutOfRangeError) and "End of seq" in str(cause):
        return ValueError(
            "A worker's dataset has ended. Append .repeat(); steps_per_epoch says "
            "when an epoch ends."
        )
    return cause


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
