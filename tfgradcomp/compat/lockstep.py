"""Loops of `fit`, `evaluate` and `predict` that begin and end together on all workers.

Each worker runs Keras' loops by itself, and a worker that leaves one alone lets the
others wait in a collective for ever. Three things end a loop:

- a flag, `stop_training`, `stop_evaluating` or `stop_predicting`, which a callback may
  set on one worker only. It travels with the logs of the next step, or is gathered when
  an epoch ends, and the loops read what has come from all workers;
- the number of batches that Keras knows. It is gathered before each pass;
- the end of the data. TensorFlow goes on until all workers have reached theirs and
  hands out empty batches meanwhile. Evaluation and prediction need that, since they
  show every row. In training it spoils the statistics of batch normalization, the
  votes of signs, and convolutions on a CPU fail. So a step is taken only if every
  replica has a row, and otherwise the epoch ends.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from tensorflow.python.distribute import input_lib
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfgradcomp.compat.call_sites import SITES
from tfgradcomp.compat.replace import replace
from tfgradcomp.compat.rows import has_rows
from tfgradcomp.compat.signals import Signals
from tfgradcomp.compat.statistics import average_statistics, take_first_worker
from tfgradcomp.compat.strategy import is_multi_worker
from tfgradcomp.compat.trainer import wrappers_of
from tfgradcomp.core.logging import logger

_FLAG_OF_LOOP = {
    "fit": "stop_training",
    "evaluate": "stop_evaluating",
    "predict": "stop_predicting",
}
_LOOPS: list[Loop] = []


class Loop:
    """A call of `fit`, `evaluate` or `predict` under a strategy.

    Attributes:
        trainer: The model.
        kind: Name of the method.
        flag: Name of the attribute of the model that ends the loop.
        signals: What travels between the workers; None where there is one process.
        is_requested: Whether this worker asks for the loop's end.
        batches: How many batches of this pass have been taken.
    """

    def __init__(self, trainer: keras.Model, kind: str, signals: Signals | None):
        self.trainer = trainer
        self.kind, self.flag = kind, _FLAG_OF_LOOP[kind]
        self.signals = signals
        self.is_requested = False
        self.batches = 0
        self._askers: list[int] = []
        self._is_end_told = False

    def begin(self) -> None:
        """Begins the loop, or goes on after one within it."""
        if self.signals:
            self.signals.begin(self.is_requested)

    def request(self, value: bool) -> None:
        """Asks for the end of the loop, or takes that back."""
        self.is_requested = value
        if self.signals and _LOOPS[-1] is self:
            self.signals.request(value)

    def is_stopped(self) -> bool:
        """Returns whether any worker has asked for the end, as all workers know."""
        if not self.signals:
            return self.is_requested
        if not self._askers:
            self._askers = self.signals.askers()
            if 0 < len(self._askers) < self.signals.num_workers:
                self.tell(
                    f"`{self.kind}` ends on all workers, because {self.flag} was set "
                    f"on some. Received: {self.flag}=True on workers {self._askers}"
                )
        return bool(self._askers)

    @functools.cached_property
    def wrappers(self) -> list:
        """The wrappers that train the model."""
        return wrappers_of(self.trainer)

    def synchronize(self) -> None:
        """Makes the weights equal on all workers."""
        for optimizer in self.wrappers:
            optimizer.synchronize()

    def verify(self) -> None:
        """Compares what all replicas have in common.

        Raises:
            RuntimeError: On all workers, if any differ.
        """
        for optimizer in self.wrappers:
            optimizer.verify()

    def verify_after(self, batches: int) -> None:
        """Compares it if a multiple of `verify_every` is reached by so many batches."""
        for optimizer in self.wrappers:
            every = optimizer.verify_every
            if every and batches // every > self.batches // every:
                optimizer.verify()
        self.batches = batches

    def average_statistics(self) -> None:
        """Makes the statistics of normalization equal on all replicas."""
        average_statistics(self.trainer, self.signals and self.signals.hosts)

    def take_first_worker(self) -> None:
        """Makes weights and learning rates equal that callbacks have set by worker."""
        if not self.signals:
            return
        paths = take_first_worker(self.trainer, self.signals.hosts)
        if paths:
            self.tell(
                "Callbacks have made weights or learning rates differ between the "
                "workers; all take those of worker 0. Expected: callbacks that decide "
                "by what is the same on all workers, such as the logs of `fit`, not "
                "by a metric or a clock of their own. "
                f"Received: different variables={paths[:3]}, {len(paths)} in all"
            )

    def tell_ended(self) -> None:
        """Logs once which workers ended an epoch early for all."""
        if self.signals and not self._is_end_told:
            ended = self.signals.ended()
            if ended:
                self._is_end_told = True
                self.tell(
                    "An epoch ended on all workers, because some had no more rows: a "
                    "step needs a row on each. Expected: as many rows for all of them. "
                    f"Received: no rows on workers {ended}"
                )

    def check_steps(self) -> None:
        """Raises ValueError if the first batch has rows for some replicas only."""
        steps, replicas = _progress_of(self.trainer.distribute_strategy).numpy()
        if replicas and not steps:
            total = self.trainer.distribute_strategy.num_replicas_in_sync
            raise ValueError(
                "`fit` can take no step: each replica needs a row of the first batch. "
                "Expected: a global batch of at least as many rows as there are "
                "replicas, which `batch_size` counts together, and data for each "
                f"worker. Received: rows for {replicas} of {total} replicas"
            ) from None

    def tell(self, message: str) -> None:
        """Logs a line, on one worker only."""
        if self.signals and self.signals.rank == 0:
            logger.warning(message)


class _Flag:
    """A stop flag of Keras' trainer that its own loop reads as all workers know it.

    Anyone else reads what this worker has set. Setting it may be at any time and from
    any thread, so the loop must never see a value that the others do not.
    """

    def __init__(self, kind: str):
        self._name = _FLAG_OF_LOOP[kind]
        loop = getattr(keras_trainer.TensorFlowTrainer, kind)
        self._code = inspect.unwrap(loop).__code__

    def __get__(self, trainer, owner=None):
        if trainer is None:
            return self
        loop = _loop_of(trainer, self._name)
        if loop and loop.signals and sys._getframe(1).f_code is self._code:
            return loop.is_stopped()
        if self._name not in vars(trainer):
            raise AttributeError(self._name)
        return vars(trainer)[self._name]

    def __set__(self, trainer, value):
        vars(trainer)[self._name] = value
        loop = _loop_of(trainer, self._name)
        if loop:
            loop.request(bool(value))


def _loop_of(trainer, flag):
    for loop in reversed(_LOOPS):
        if loop.trainer is trainer and loop.flag == flag:
            return loop
    return None


def signals_of_fit(model: keras.Model) -> Signals | None:
    """Returns what travels between the workers that are in `fit` of a model.

    None where there is one process, or no `fit`.
    """
    loop = _loop_of(model, _FLAG_OF_LOOP["fit"])
    return loop.signals if loop else None


class Lockstep:
    """Replaces what makes loops of Keras begin and end by one worker's view.

    Args:
        hosts_of: Function of a strategy that returns the collectives between its
            processes.
    """

    def __init__(self, hosts_of: Callable):
        self.signals_of = functools.cache(lambda s: Signals(hosts_of(s)))

    def install(self) -> None:
        """Replaces Keras' and TensorFlow's functions, once."""
        trainer, iterators = keras_trainer.TensorFlowTrainer, input_lib
        for kind, flag in _FLAG_OF_LOOP.items():
            if not isinstance(vars(trainer).get(flag), _Flag):
                setattr(trainer, flag, _Flag(kind))
            replace(trainer, kind, functools.partial(self._run_loop, kind))
        replace(keras.callbacks.CallbackList, "on_epoch_end", _end_epoch)
        replace(keras.callbacks.CallbackList, "on_train_batch_end", _end_batch)
        replace(keras.callbacks.CallbackList, "on_train_end", _end_training)
        replace(keras_trainer.TFEpochIterator, "__iter__", _begin_pass)
        replace(keras_trainer.TFEpochIterator, "_interrupted_warning", _interrupted)
        replace(iterators.DistributedIteratorBase, "get_next", _next_batch)
        replace(iterators, "_calculate_replicas_with_values", _replicas_with_rows)
        replace(CollectiveAllReduceExtended, "_reduce_to", _reduce_to)

    def _run_loop(self, kind, original, trainer, *args, **kwargs):
        strategy = trainer.distribute_strategy
        if strategy.num_replicas_in_sync == 1:
            return original(trainer, *args, **kwargs)
        signals = self.signals_of(strategy) if is_multi_worker(strategy) else None
        if kind == "fit":
            _progress_of(strategy).assign([0, 0])
        with _entered(Loop(trainer, kind, signals)) as loop:
            if kind != "fit":
                loop.synchronize()
                loop.average_statistics()
            return original(trainer, *args, **kwargs)


@contextlib.contextmanager
def _entered(loop: Loop) -> Iterator[Loop]:
    if _LOOPS:
        _LOOPS[-1].tell_ended()
    _LOOPS.append(loop)
    loop.begin()
    try:
        yield loop
        if loop.signals and loop.is_stopped():
            # As after a loop that this worker has ended by itself.
            vars(loop.trainer)[loop.flag] = True
    except BaseException:
        # A graph that an error has ended does not count for itself.
        SITES.leave()
        raise
    finally:
        _LOOPS.remove(loop)
        if _LOOPS:
            _LOOPS[-1].begin()


def _end_epoch(original, callbacks, epoch, logs=None):
    """Replaces `CallbackList.on_epoch_end`: no worker may begin another epoch alone."""
    loop = _loop_of(callbacks.model, "stop_training")
    if loop:
        # Callbacks may save the model.
        loop.synchronize()
        loop.verify()
        loop.average_statistics()
    result = original(callbacks, epoch, logs)
    if loop and loop.signals:
        loop.take_first_worker()
        loop.signals.travel_with(tf.zeros([0]), "lockstep/epoch")
        loop.tell_ended()
    return result


def _end_batch(original, callbacks, batch, logs=None):
    """Replaces `CallbackList.on_train_batch_end`: compares workers now and then."""
    result = original(callbacks, batch, logs)
    loop = _loop_of(callbacks.model, "stop_training")
    if loop:
        loop.verify_after(batch + 1)
    return result


def _end_training(original, callbacks, logs=None):
    """Replaces `CallbackList.on_train_end`, where weights may be restored."""
    result = original(callbacks, logs)
    loop = _loop_of(callbacks.model, "stop_training")
    if loop:
        loop.take_first_worker()
    return result


def _begin_pass(original, epoch_iterator):
    """Replaces `TFEpochIterator.__iter__`: all take the same number of batches."""
    loop = _LOOPS[-1] if _LOOPS else None
    if loop:
        loop.batches = 0
    if loop and loop.signals:
        _agree_on_length(loop, epoch_iterator)
    return original(epoch_iterator)


def _agree_on_length(loop, epoch_iterator):
    data = epoch_iterator._distributed_dataset
    is_endless = getattr(data, "_cardinality", None) == tf.data.INFINITE_CARDINALITY
    steps, batches = epoch_iterator.steps_per_epoch, epoch_iterator._num_batches
    rows = loop.signals.gather([steps or -1, batches or -1, int(is_endless)])
    if (rows == rows[0]).all():
        return
    is_training = loop.kind == "fit"
    if is_endless and not rows[:, 2].all():
        # Else this worker would not ask the others whether they have rows.
        data._cardinality = tf.data.UNKNOWN_CARDINALITY
        data._enable_get_next_as_optional = True
    lengths = np.where(rows[:, 0] > 0, rows[:, 0], rows[:, 1])
    known = rows[rows[:, 1] > 0, 1]
    # Evaluation goes on until all have shown their rows.
    if is_training:
        batches = int(min(known)) if len(known) else None
    else:
        batches = int(max(known)) if len(known) == len(rows) else None
    limits = rows[rows[:, 0] > 0, 0]
    if len(limits):
        steps = int(min(limits))
        if epoch_iterator.steps_per_epoch:
            epoch_iterator.steps_per_epoch = steps
        batches = batches and min(batches, steps) if is_training else steps
        batches = batches or steps
    epoch_iterator._num_batches = batches
    if is_training and (lengths != lengths[0]).any():
        names = [str(n) if n > 0 else "unknown" for n in lengths.tolist()]
        loop.tell(
            "The workers' data have different lengths: an epoch ends on all of them "
            "when the first has no more. Expected: as many batches for all. Received: "
            f"batches by worker={dict(enumerate(names))}"
        )


def _interrupted(original, epoch_iterator):
    """Replaces `_interrupted_warning`, which advises to repeat what ended early."""
    if _is_training():
        loop = _LOOPS[-1]
        loop.check_steps()
        if loop.signals and loop.signals.ended():
            return
    original(epoch_iterator)


def _is_training() -> bool:
    return bool(_LOOPS) and _LOOPS[-1].kind == "fit"


def _next_batch(original, iterator, name=None):
    """Replaces `get_next`: raises for all replicas if one of them has no row."""
    if not (_is_training() and iterator._enable_get_next_as_optional):
        return original(iterator, name)
    batch = iterator.get_next_as_optional()
    nothing = tf.cond(batch.has_value(), lambda: tf.constant(0, tf.int64), _raise_end)
    with tf.control_dependencies([nothing]):
        return batch.get_value()


def _raise_end():
    """Raises `OutOfRangeError`, also inside a graph."""
    # The iterator's own `get_next` may be traced some thirty times only.
    (nothing,) = tf.raw_ops.IteratorGetNext(
        iterator=_exhausted()._iterator_resource,
        output_types=[tf.int64],
        output_shapes=[[]],
    )
    return nothing


@functools.cache
def _exhausted():
    with tf.init_scope(), tf.device("CPU:0"):
        return iter(tf.data.Dataset.range(0))


def _replicas_with_rows(original, strategy, input_workers, optionals):
    """Replaces `_calculate_replicas_with_values`: 0 unless all replicas have rows."""
    if not (_is_training() or is_multi_worker(strategy)):
        return original(strategy, input_workers, optionals)
    with tf.device("CPU:0"):
        own = tf.add_n([has_rows(one) for local in optionals for one in local])
    if not _is_training():
        return SITES.around(
            "sum of replicas with rows",
            lambda _: original(strategy, input_workers, optionals),
            own,
        )
    replicas = strategy.num_replicas_in_sync
    signals = _LOOPS[-1].signals
    if signals:
        counts = tf.one_hot(signals.rank, signals.num_workers, dtype=tf.int64) * own
        counts = signals.hosts.sum(counts, "lockstep/rows")
        signals.end(counts, replicas // signals.num_workers)
        own = tf.reduce_sum(counts)
    progress = _progress_of(strategy)
    progress.assign([progress[0] + tf.cast(own == replicas, tf.int64), own])
    return tf.where(own == replicas, own, tf.zeros_like(own))


def _reduce_to(original, *args, **kwargs):
    """Replaces `_reduce_to`, by which Keras reads metrics of all workers."""
    if not tf.executing_eagerly():
        return original(*args, **kwargs)
    with SITES.within("reduction of a metric"):
        return original(*args, **kwargs)


@functools.cache
def _progress_of(strategy):
    """The steps of the last `fit`, and the replicas with rows in its last batch."""
    with tf.init_scope(), tf.device("CPU:0"):
        return ResourceVariable(tf.zeros([2], tf.int64), trainable=False)
