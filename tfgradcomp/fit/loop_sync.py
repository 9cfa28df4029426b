"""Synchronization of a loop of `fit`, `evaluate` or `predict` between all workers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import keras

from tfgradcomp.collectives.call_sites import SITES
from tfgradcomp.core.logging import logger
from tfgradcomp.engine.consistency_check import check_same_frozen
from tfgradcomp.engine.settings_check import check_same_settings
from tfgradcomp.fit.signals import LoopSignals, signals_of
from tfgradcomp.fit.statistics import (
    average_statistics,
    copy_first_worker,
    trained_variables,
)
from tfgradcomp.fit.wrappers import wrappers_of

STOP_FLAGS = {
    "fit": "stop_training",
    "evaluate": "stop_evaluating",
    "predict": "stop_predicting",
}
"""The attribute of a model that ends a loop, by the name of the loop's method."""

# The loops that this process is in, the innermost last.
_running: list[LoopSync] = []


class LoopSync:
    """Keeps a call of `fit`, `evaluate` or `predict` equal on all workers.

    Attributes:
        model: The model.
        kind: Name of the method.
        flag: Name of the model's attribute that ends the loop.
        signals: The signals between the workers; None for a single process.
        is_stop_requested: Whether this worker asks for the loop's end.
        batches: Number of batches of this pass that have been trained on.
    """

    def __init__(self, model: keras.Model, kind: str):
        self.model = model
        self.kind, self.flag = kind, STOP_FLAGS[kind]
        self.signals: LoopSignals | None = signals_of(model.distribute_strategy)
        self.is_stop_requested = False
        self.batches = 0
        self._stop_requesters: list[int] = []
        self._has_warned_of_end = False

    def begin(self) -> None:
        """Begins the loop, or continues it after an inner loop."""
        if self.signals:
            self.signals.begin(self.is_stop_requested)

    def request_stop(self, value: bool) -> None:
        """Asks for the end of the loop, or withdraws the request."""
        self.is_stop_requested = value
        if self.signals and innermost_loop() is self:
            self.signals.request_stop(value)

    def is_stopped(self) -> bool:
        """Returns whether any worker has asked for the end, as all workers know it."""
        if not self.signals:
            return self.is_stop_requested
        if not self._stop_requesters:
            self._stop_requesters = self.signals.stop_requesters()
            if 0 < len(self._stop_requesters) < self.signals.num_workers:
                self.warn(
                    f"`{self.kind}` ends on all workers, because {self.flag} was set "
                    f"on some. Received: {self.flag}=True on workers "
                    f"{self._stop_requesters}"
                )
        return bool(self._stop_requesters)

    @functools.cached_property
    def wrappers(self) -> list:
        """The wrappers that train the model."""
        return wrappers_of(self.model)

    def check_same_start(self) -> None:
        """Compares the optimizers' settings, and which weights are frozen.

        Raises:
            ValueError: On all workers, if the workers differ.
        """
        if self.signals:
            check_same_settings(self.signals.hosts, self.model.optimizer)
            check_same_frozen(self.signals.hosts, trained_variables(self.model))

    def synchronize_weights(self) -> None:
        """Makes the weights equal on all workers."""
        for optimizer in self.wrappers:
            optimizer.synchronize()

    def verify(self) -> None:
        """Compares the variables that all replicas share.

        Raises:
            RuntimeError: On all workers, if any variables differ.
        """
        for optimizer in self.wrappers:
            optimizer.verify()

    def verify_after(self, batches: int) -> None:
        """Compares them if the pass has reached a multiple of `verify_every` batches.

        Args:
            batches: Number of batches of this pass that have been trained on.
        """
        for optimizer in self.wrappers:
            every = optimizer.verify_every
            if every and batches // every > self.batches // every:
                optimizer.verify()
        self.batches = batches

    def decide(self) -> None:
        """Makes the optimizers choose what they have measured; compiles the step anew.

        Keras reads the compiled step before each batch.
        """
        decided = [optimizer.decide() for optimizer in self.wrappers]
        if any(decided):
            self.model.make_train_function(force=True)

    def average_statistics(self) -> None:
        """Makes the statistics of normalization equal on all replicas."""
        average_statistics(self.model, self.signals.hosts if self.signals else None)

    def copy_first_worker(self) -> None:
        """Makes weights and learning rates equal that callbacks have set by worker."""
        if not self.signals:
            return
        paths = copy_first_worker(self.model, self.signals.hosts)
        if paths:
            self.warn(
                "Callbacks have made weights or learning rates differ between the "
                "workers; all take those of worker 0. Expected: callbacks that decide "
                "by values that are the same on all workers, such as the logs of "
                "`fit`, not by a metric or a clock of their own. "
                f"Received: different variables={paths[:3]}, {len(paths)} in all"
            )

    def warn_of_early_end(self) -> None:
        """Logs, once per loop, the workers that ended an epoch early for all."""
        if self.signals and not self._has_warned_of_end:
            workers = self.signals.workers_without_rows()
            if workers:
                self._has_warned_of_end = True
                self.warn(
                    "An epoch ended on all workers, because some had no more rows: a "
                    "step needs a row on each. Expected: the same number of rows for "
                    f"all of them. Received: no rows on workers {workers}"
                )

    def warn(self, message: str) -> None:
        """Logs a warning on worker 0 of several."""
        if self.signals and self.signals.rank == 0:
            logger.warning(message)


def innermost_loop() -> LoopSync | None:
    """Returns the loop that this process is in, the inner one of two."""
    return _running[-1] if _running else None


def is_training() -> bool:
    """Returns whether the innermost loop is one of `fit`."""
    loop = innermost_loop()
    return loop is not None and loop.kind == "fit"


def running_loop(model: keras.Model, kind: str) -> LoopSync | None:
    """Returns the innermost loop of a kind that runs a model."""
    for loop in reversed(_running):
        if loop.model is model and loop.kind == kind:
            return loop
    return None


def signals_of_fit(model: keras.Model) -> LoopSignals | None:
    """Returns the signals between the workers that are in `fit` of a model.

    None for a single process, or outside of `fit`.
    """
    loop = running_loop(model, "fit")
    return loop.signals if loop else None


@contextlib.contextmanager
def entered(loop: LoopSync) -> Iterator[None]:
    """Makes a loop the innermost one for as long as the context lasts."""
    outer = innermost_loop()
    if outer:
        outer.warn_of_early_end()
    _running.append(loop)
    loop.begin()
    try:
        yield
        if loop.signals and loop.is_stopped():
            # As after a loop that this worker has ended by itself.
            vars(loop.model)[loop.flag] = True
    except BaseException:
        # An error has ended a graph before it counted its calls as left.
        SITES.leave()
        raise
    finally:
        _running.remove(loop)
        if _running:
            _running[-1].begin()
