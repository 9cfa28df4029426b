"""The state of a method as files hold it: in one form, whichever worker wrote it.

A file has each leaf of the state as a whole vector, float32 `[rows, size]`, whatever
transport, number of workers or buckets wrote it: a row for each local worker where
workers differ, otherwise one row. A worker that serves a part of the vector writes that
part, zeros elsewhere, and the ranges of it (`server_owned`): the files of all workers
hold the whole.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, MutableMapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfgradcomp.collectives import Collectives, SingleWorker
from tfgradcomp.core.logging import logger
from tfgradcomp.engine.consistency_check import (
    check_restored,
    lost_files,
    missing_state,
)
from tfgradcomp.engine.plan import Plan
from tfgradcomp.engine.saved_leaf import SavedLeaf
from tfgradcomp.engine.step_variables import StepVariables

# Entries besides leaves: the worker that wrote the file, whether float32 was taken
# instead of the method, and the variables of each vector where a policy divides them.
_PLACE, _FALLBACK, _POLICY = "place", "fallback", "policy"
_OWNED = "server_owned"
# Leaves of factors, which files of version 0.3.0 and before have not.
_FACTORS = ".worker.update.left", ".worker.update.right"


class Restored(NamedTuple):
    """A state that was read from a file.

    Attributes:
        rows: The vectors by the names of leaves, float32 `[rows, size]`.
        owned: Which elements of the server's state are known, bool `[size]`, by the
            names of vectors.
        missing: The parts that the file lacks, in words.
        origin: The rank of the worker that wrote it, and the number of workers.
    """

    rows: dict[str, np.ndarray]
    owned: dict[str, np.ndarray]
    missing: list[str]
    origin: tuple[int, int] = (0, 1)

    @property
    def is_partial(self) -> bool:
        """True if only a part of the server's state is known."""
        return not all(known.all() for known in self.owned.values())

    @property
    def is_whole(self) -> bool:
        """True if the whole state is known."""
        return not self.missing and not self.is_partial


def can_restore(owner: str, is_built: bool, store: Mapping) -> bool:
    """Returns whether a file has a state, and its owner the variables for it.

    Warns if only the variables are missing.
    """
    has_state = _PLACE in store.keys() and len(store.keys()) > 1
    if has_state and not is_built:
        warnings.warn(
            f"The residuals and momenta of {owner} are not restored, because it is not "
            "built. Expected: `optimizer.build(model.trainable_variables)` before it "
            f"is loaded. Received: {sorted(store.keys())}",
            stacklevel=2,
        )
    return has_state and is_built


def saved_fallback(store: Mapping) -> bool:
    """Returns whether the state in a file is that of the float32 fallback."""
    return bool(store[_FALLBACK][()]) if _FALLBACK in store.keys() else False


class OptimizerState:
    """The state of a built optimizer, to be saved and restored.

    Args:
        owner: Name of the optimizer, for errors.
        scalars: The small variables.
        plan: The buckets, with their collectives.
        settings: Numbers that a file must have in common with this optimizer.

    Attributes:
        skipped_before: Steps that were skipped before the state was saved.
    """

    def __init__(
        self,
        owner: str,
        scalars: StepVariables,
        plan: Plan,
        settings: Mapping[str, list[int]],
    ):
        self._owner, self._scalars, self._plan = owner, scalars, plan
        self.skipped_before = 0
        # A state that was read and waits for the other processes.
        self._pending: Restored | None = None
        self._origins: list[tuple[int, int]] = []
        self._leaves = [
            SavedLeaf(bucket, index, variable)
            for bucket in plan.buckets
            for index, variable in enumerate(tf.nest.flatten(bucket.state))
        ]
        # By names of leaves: where each part begins, and the number of items.
        self._begins: dict[str, dict[int, int]] = {}
        self._sizes: dict[str, int] = {}
        for name in dict.fromkeys(leaf.name for leaf in self._leaves):
            counts = {
                begin: count
                for leaf in self._leaves
                if leaf.name == name
                for begin, _, count in leaf.items()
            }
            begins = sorted(counts)
            ends = [*itertools.accumulate(counts[begin] for begin in begins)]
            self._begins[name] = dict(zip(begins, [0, *ends], strict=False))
            self._sizes[name] = ends[-1]
        # Vectors of one size may be of other variables.
        positions: dict[str, set[int]] = {}
        for leaf in self._leaves:
            name = f"{leaf.bucket.vector}.positions"
            positions.setdefault(name, set()).update(leaf.bucket.positions)
        self._settings = {**settings, **{k: sorted(v) for k, v in positions.items()}}

    def variables(self) -> list:
        """Returns the variables of the method's state."""
        leaves = [leaf.variable for leaf in self._leaves]
        return [*self._scalars.variables(), *leaves]

    def shared_variables(self) -> list:
        """Returns the variables that are the same on all workers."""
        count = self._plan.collectives.num_workers
        return [
            leaf.variable for leaf in self._leaves if leaf.is_same_everywhere(count)
        ]

    def save(self, store: MutableMapping) -> None:
        """Saves the state of this worker, by local reads.

        Raises:
            ValueError: If a restored state still waits for that of other workers.
        """
        if self._pending is not None and not self._pending.is_whole:
            raise ValueError(
                f"The restored state of {self._owner} is not complete before the first "
                "step joins the workers' parts: take a step before saving. "
                f"Received: missing on this worker={self._pending.missing}"
            )
        own = self._plan.collectives
        store[_PLACE] = (own.process_index, own.num_processes)
        store[_FALLBACK] = int(self._plan.is_fallback)
        if self._plan.policy:
            store[_POLICY] = np.frombuffer(self._plan.policy.encode(), np.uint8)
        for name, numbers in self._settings.items():
            store[name] = np.array(numbers, np.int64)
        for variable in self._scalars.variables():
            store[variable.name] = variable.local_values()
        whole: dict[str, np.ndarray] = {}
        owned: dict[str, np.ndarray] = {}
        for leaf in self._leaves:
            values, vector = leaf.variable.local_values(), leaf.bucket.vector
            workers = len(values) // self._plan.devices_per_worker
            count = workers if leaf.role in ("worker", "moments") else 1
            shape = [count, self._sizes[leaf.name]]
            target = whole.setdefault(leaf.name, np.zeros(shape, np.float32))
            places = self._places(leaf, len(values))
            for row, (worker, place, source) in zip(values, places, strict=True):
                target[worker % count, place] = row[source]
                if leaf.role == "server":
                    known = owned.setdefault(vector, np.zeros(shape[1], bool))
                    known[place] = True
        for name, values in whole.items():
            store[name] = values
        for vector, known in owned.items():
            store[f"{vector}.{_OWNED}"] = _ranges(known)

    def restore(self, store: Mapping, joins_at_once: bool) -> None:
        """Restores a state that `save` saved, here or on another worker.

        Args:
            store: The entries that `save` wrote.
            joins_at_once: True: all workers restore, and the parts that they have read
                are joined now. False: `check_restore` and `finish_restore` follow.

        Raises:
            ValueError: As `check_restore` and `finish_restore`.
        """
        restored = self._read(store)
        self._note_origin(*restored.origin)
        self._pending = restored
        if restored.is_whole:
            self._assign(restored)
        if joins_at_once:
            self.check_restore()
            self.finish_restore()

    def check_restore(self) -> None:
        """Compares what all workers have restored; all must call it.

        Raises:
            ValueError: On all workers, if what one has restored is not complete and the
                others' files cannot complete it.
        """
        pending = self._pending
        if pending is None and self._plan.hosts is None:
            # All workers of one process have restored, or none. Workers of parameter
            # servers restore nothing.
            return
        status = pending or Restored({}, {}, [], (-1, 0))
        self._origins, is_partial = check_restored(
            self._processes,
            self._owner,
            status.missing,
            status.is_partial,
            status.origin,
        )
        if not is_partial:
            self._pending = None

    def finish_restore(self) -> None:
        """Joins the parts of a restored state, after `check_restore`, on all workers.

        Raises:
            ValueError: On all workers, if the state is not complete then.
        """
        if self._pending is None:
            return
        with tf.init_scope():
            restored = self._joined(self._pending)
            if restored.missing:
                raise ValueError(
                    f"The state of {self._owner} is not restored as a whole. "
                    f"{lost_files(self._origins)} {missing_state(restored.missing)}"
                )
            self._assign(restored)
        self._pending = None

    def _read(self, store: Mapping) -> Restored:
        saved = {name for name in store.keys() if not name.endswith(_OWNED)}
        saved -= {_PLACE, _FALLBACK, _POLICY, *self._settings}
        expected = {v.name for v in self._scalars.variables()}
        expected |= {leaf.name for leaf in self._leaves}
        # Where they are missing, the residual lacks no product.
        added = {name for name in expected - saved if name.endswith(_FACTORS)}
        missing = sorted(expected - saved - added)
        missing += [f"no place for {name}" for name in sorted(saved - expected)]
        policy = ""
        if _POLICY in store.keys():
            policy = bytes(np.asarray(store[_POLICY][()])).decode()
        if policy != self._plan.policy:
            missing.append(
                f"another policy: {policy or 'none'} in the file, "
                f"{self._plan.policy or 'none'} here"
            )
        for name, numbers in self._settings.items():
            # Files of version 0.3.0 and before have none.
            if name not in store.keys():
                continue
            found = np.array(store[name]).tolist()
            if found != numbers:
                missing.append(f"{name}={found} in the file, {numbers} here")
        rows = {name: store[name][()] for name in expected & saved}
        for name in added:
            rows[name] = np.zeros([1, self._sizes[name]], np.float32)
        owned = {}
        for leaf in self._leaves:
            if leaf.name not in rows:
                continue
            size = self._sizes[leaf.name]
            found = rows[leaf.name].shape[1:]
            if found != (size,):
                missing.append(f"{leaf.name} of {size} elements, not {found}")
                del rows[leaf.name]
            elif leaf.role == "server":
                key = f"{leaf.bucket.vector}.{_OWNED}"
                ranges = store[key][()] if key in store.keys() else [[0, size]]
                owned[leaf.bucket.vector] = _mask(ranges, size)
        rank, num_workers = (int(number) for number in store[_PLACE][()])
        return Restored(rows, owned, missing, (rank, num_workers))

    def _joined(self, restored: Restored) -> Restored:
        """Joins the parts that all processes have read; all must call it.

        Of an element that several processes have read, the last one's value counts.
        """
        collectives = self._processes
        rows, owned, missing = dict(restored.rows), {}, list(restored.missing)
        rank = collectives.process_index + 1
        for vector, known in restored.owned.items():
            provider = tf.constant(np.where(known, rank, 0), tf.int32)
            # A call site has one size: optimizers of other sizes take other sites.
            size = len(known)
            provider = collectives.max(provider, f"restore/{vector}/{size}").numpy()
            owned[vector] = provider > 0
            if not owned[vector].all():
                spans = _ranges(~owned[vector]).tolist()
                missing.append(f"elements {spans} of {vector}.server")
            names = [
                leaf.name
                for leaf in self._leaves
                if leaf.bucket.vector == vector and leaf.role == "server"
            ]
            for name in dict.fromkeys(names):
                # Bit patterns: the sum of -0.0 and 0.0 would lose the sign.
                own = np.where(provider == rank, rows[name][0], 0).astype(np.float32)
                words = tf.constant(own.view(np.int32))
                words = collectives.sum(words, f"restore/{name}/{size}").numpy()
                rows[name] = words.view(np.float32)[np.newaxis]
        return restored._replace(rows=rows, owned=owned, missing=missing)

    def _assign(self, restored: Restored) -> None:
        """Assigns a whole state to the variables of this process."""
        for variable in self._scalars.variables():
            replicas = len(variable.local_values())
            values = rows_for_replicas(restored.rows[variable.name], replicas)
            variable.assign_local_values(values.astype(variable.dtype))
        self.skipped_before = int(self._scalars.skipped_steps.numpy())
        for leaf in self._leaves:
            values = np.zeros_like(leaf.variable.local_values())
            workers = len(values) // self._plan.devices_per_worker
            rows = rows_for_replicas(restored.rows[leaf.name], workers)
            places = self._places(leaf, len(values))
            for value, (worker, place, source) in zip(values, places, strict=True):
                value[source] = rows[worker, place]
            leaf.variable.assign_local_values(values)

    def _places(self, leaf, replicas):
        """Returns the local worker of each replica, and where a leaf is in files."""
        own = self._plan.collectives
        first_rank = own.process_index * own.num_workers // own.num_processes
        places, begins = [], self._begins[leaf.name]
        for replica in range(replicas):
            worker, device = divmod(replica, self._plan.devices_per_worker)
            places.append((worker, *leaf.place(first_rank + worker, device, begins)))
        return places

    def _note_origin(self, rank, num_workers):
        own = self._plan.collectives
        here, count = own.process_index, own.num_processes
        first_stranger = 1 if rank == 0 else 0
        if (num_workers, here) != (count, rank) and here == min(
            first_stranger, count - 1
        ):
            logger.info(
                "%s: residuals and momenta are those of worker %d of %d, now on all of "
                "%d. tfgradcomp.callbacks.BackupAndRestore keeps each worker's own; "
                "`python -m tfgradcomp.reshard` changes the number of workers.",
                self._owner,
                rank,
                num_workers,
                count,
            )

    @property
    def _processes(self) -> Collectives:
        """The collectives by which processes join what they have restored."""
        if self._plan.hosts is not None:
            return self._plan.hosts
        own = self._plan.collectives
        return own if own.num_processes > 1 else SingleWorker()


def rows_for_replicas(values: np.ndarray, replicas: int) -> np.ndarray:
    """Returns a row for each local replica, of rows saved by another number of them.

    Floats are averaged, which conserves the mean residual. Integers are the same on all
    workers, and a float may not hold a seed.
    """
    if len(values) == replicas:
        return values
    is_float = np.issubdtype(values.dtype, np.floating)
    values = values.mean(0, keepdims=True) if is_float else values[:1]
    return values.repeat(replicas, 0)


def _ranges(known: np.ndarray) -> np.ndarray:
    """Returns the ranges of true elements, int64 `[n, 2]`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], known, [0]])))
    return edges.reshape([-1, 2]).astype(np.int64)


def _mask(ranges: Iterable, size: int) -> np.ndarray:
    mask = np.zeros([size], bool)
    for begin, end in ranges:
        mask[begin:end] = True
    return mask
