"""Choice of a method by its error on gradients of a model."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgradcomp import optimizers
from tfgradcomp.compat import train_step
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.core.logging import logger
from tfgradcomp.fit.run_state import RunState
from tfgradcomp.per_example.second_moments import step_of
from tfgradcomp.planning.candidates import Candidate
from tfgradcomp.planning.decision import Decision
from tfgradcomp.planning.measurement import decide_by_batches

# Signs without a scale are left out: their length says nothing, so neither does the
# error.
CANDIDATES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Strom", {"threshold": "auto", "index_coding": "delta"}),
    ("Hybrid", {"threshold": "auto", "index_coding": "delta"}),
    ("VarianceBased", {"index_coding": "delta"}),
    ("DistEFBlockSGD", {}),
    *(("ScaledSign", {"block_size": size}) for size in (2048, 256)),
    *(("BinGrad", {"block_size": size}) for size in (2048, 256)),
    *(("TernGrad", {"block_size": size}) for size in (None, 2048, 256, 64)),
    *(
        (name, {"levels": levels, "block_size": size})
        for name in ("ORQ", "QSGD")
        for levels, size in itertools.product((5, 9, 17), (2048, 256))
    ),
    ("NaturalCompression", {}),
    ("HalfPrecision", {}),
)


class Measured(NamedTuple):
    """Error and size of a candidate's messages.

    Attributes:
        wrapper: Name of the wrapper in `tfgradcomp`.
        arguments: Arguments of the wrapper, without the inner optimizer.
        error: |sum of the messages - sum of the gradients| over |sum of the gradients|,
            over all steps. The residual counts as not sent.
        step_error: |message - gradient| over |gradient|, the mean over the steps.
        bits: Bits that a worker sends per element, uncompressed variables included;
            for messages of variable length, the mean over the steps.
    """

    wrapper: str
    arguments: Mapping[str, Any]
    error: float
    step_error: float
    bits: float

    @property
    def candidate(self) -> Candidate:
        """The wrapper and its arguments."""
        return Candidate(self.wrapper, self.arguments)

    @property
    def name(self) -> str:
        """The call that makes the wrapper, without the inner optimizer."""
        return self.candidate.name


class Tuning(NamedTuple):
    """Result of `tune`; `str` gives the table and the reason.

    Attributes:
        best: The candidate with the fewest bits whose error is small enough.
        table: All candidates that were measured, the fewest bits first.
        reason: Sentences on why it is the best, and on what was not measured.
        decision: The choice of `Auto` for a cluster; None if no link was given.
    """

    best: Measured
    table: tuple[Measured, ...]
    reason: str
    decision: Decision | None = None

    def optimizer(
        self, inner_optimizer: Any, **arguments: Any
    ) -> optimizers.CompressedOptimizer:
        """Returns the best candidate's wrapper around an optimizer.

        Args:
            inner_optimizer: A Keras optimizer, its name or its config.
            **arguments: Further arguments of the wrapper, such as `exclude`.

        Raises:
            ValueError: If the best candidate has error feedback, which does not go
                with momentum inside; the message names the right form.
        """
        return self.best.candidate.wrap(inner_optimizer, **arguments)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.table)
        lines = [f"{'method':{width}}  bits/element  error  error of a step"]
        lines += [
            f"{row.name:{width}}  {row.bits:12.2f}  {row.error:5.3f}  "
            f"{row.step_error:15.3f}"
            for row in self.table
        ]
        lines += ["", self.reason]
        return "\n".join([*lines, "", str(self.decision)] if self.decision else lines)


def tune(
    model: keras.Model,
    dataset: Iterable,
    target_error: float = 0.5,
    steps: int = 10,
    candidates: Sequence[tuple[str, Mapping[str, Any]]] | None = None,
    seed: int = 0,
    workers: int = 2,
    link: str | None = None,
    risk: str = "low",
) -> Tuning:
    r"""Chooses the method with the fewest bits whose error is small enough.

    Computes the gradients \( g_t \) of the first batches at the model's weights, and
    feeds them to each candidate as on one worker. With the messages \( s_t \), the
    error is \( |\sum_t s_t - \sum_t g_t| \,/\, |\sum_t g_t| \): the distance of the
    weights from those of float32 after these steps of plain SGD, relative to the
    distance that float32 moves them. Rounding and the residual both count. The best
    candidate has the fewest bits among those with an error of at most `target_error`.

    The model does not change: weights, moving statistics, metrics and random states are
    restored. Accuracy and time are not measured, nor are several workers, whose mean
    has less rounding noise.

    Args:
        model: A compiled model. Gradients some epochs into a training are more telling
            than those at its start.
        dataset: Batches as `model.fit` takes them from a `tf.data.Dataset`.
        target_error: Largest error, positive.
        steps: Number of batches, at least 2. The gradients of all are kept in memory.
        candidates: Pairs of a wrapper's name and its arguments; None: those of
            `tfgradcomp.planning.tuning.CANDIDATES`.
        seed: Seed of the candidates' random numbers.
        workers: Number of workers of the cluster that `link` describes.
        link: Rate of each worker's link, such as `"1gbit"`: the result has the
            decision that `Auto` would make, with a batch for each worker. Give it to
            `Auto` as `decision`. None: no decision.
        risk: As `Auto` takes it.

    Returns:
        The best candidate, the table of all, and the reason, which is also logged.

    Raises:
        ValueError: If an argument is out of range, there are several workers, a
            gradient is not finite, or no candidate's error is small enough.

    Example:
        ```python
        tuning = tfgradcomp.tune(model, batches)
        print(tuning)
        model.compile(tuning.optimizer(keras.optimizers.SGD(0.1)), loss)
        ```
    """
    check_integer("steps", steps, 2)
    if not 0 < target_error < math.inf:
        raise ValueError(
            "target_error must be positive and finite, such as 0.5. "
            f"Received: target_error={target_error!r}"
        )
    chosen = _checked(CANDIDATES if candidates is None else candidates)
    needs_moments = [_wrapped(one).needs_second_moments for one in chosen]
    check_integer("workers", workers, 2)
    data, moments_error = _collect(model, dataset, steps, any(needs_moments))
    table = [
        _measure(candidate, data, seed)
        for candidate, needed in zip(chosen, needs_moments, strict=True)
        if moments_error is None or not needed
    ]
    table.sort(key=lambda row: (row.bits, row.error))
    best = next((row for row in table if row.error <= target_error), None)
    if best is None:
        errors = {row.name: round(row.error, 4) for row in table}
        raise ValueError(
            "No candidate's error is at most target_error. Allow a larger error, or "
            f"train in float32. Received: target_error={target_error}, errors={errors}"
        )
    reason = _reason(best, table, target_error, len(data), moments_error)
    logger.info("%s", reason)
    decision = None
    if link:
        decision = decide_by_batches(
            getattr(model.optimizer, "inner_optimizer", model.optimizer),
            data[0].variables,
            [step.gradients for step in data],
            statistics.median(step.seconds for step in data[1:]),
            workers=workers,
            link=link,
            risk=risk,
        )
    return Tuning(best, tuple(table), reason, decision)


class _StepData(NamedTuple):
    """Results of one step.

    Attributes:
        gradients: The gradients, float32.
        moments: Their second moments, float32; empty if they are not computed.
        variables: The variables that have a gradient.
        seconds: Duration of the step.
    """

    gradients: list[tf.Tensor]
    moments: list[tf.Tensor]
    variables: list
    seconds: float


def _checked(candidates):
    chosen = [Candidate(name, dict(arguments)) for name, arguments in candidates]
    if not chosen:
        raise ValueError(
            "candidates must be None or pairs, at least one. "
            f"Received: candidates={candidates!r}"
        )
    return chosen


def _wrapped(candidate, **more):
    # With a rate of 1, weights of zero become minus the sum of the messages.
    return candidate.wrap(keras.optimizers.SGD(1.0), **more)


def _collect(model, dataset, steps, with_moments):
    """Returns the data of the first steps, and the error that prevented moments.

    The model is restored. The error is None if the moments were computed, or not asked
    for.
    """
    if not getattr(model, "compiled", False):
        raise ValueError(
            "tune needs the loss of a compiled model. Call model.compile(optimizer, "
            f"loss) first. Received: model={model!r}"
        )
    workers = model.distribute_strategy.num_replicas_in_sync
    if workers > 1:
        raise ValueError(
            "tune measures in one process, because several workers might choose "
            "differently. Call it on a model without a strategy, then give all workers "
            f"the same choice. Received: a model of {workers} replicas"
        )
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            "dataset must be a tf.data.Dataset of batches, as model.fit takes it. "
            f"Received: dataset of type {type(dataset).__name__}"
        )
    batches = [*dataset.take(steps)]
    if len(batches) < 2:
        raise ValueError(
            "dataset must have at least two batches, because residuals are sent in "
            f"later steps. Received: {len(batches)} batches"
        )
    if not model.built:
        # Creates the weights before their state is saved.
        model(keras.utils.unpack_x_y_sample_weight(batches[0])[0])
    state = RunState(model)
    before = state.read()
    statistics = [(v, v.numpy()) for v in model.non_trainable_variables]
    moments_error = None
    try:
        if with_moments:
            try:
                return _run_steps(model, batches, True), None
            except ValueError as error:
                moments_error = str(error)
        return _run_steps(model, batches, False), moments_error
    finally:
        for variable, value in statistics:
            variable.assign(value)
        state.assign(before)
        state.assign_metrics(before)


def _run_steps(model, batches, with_moments):
    variables = model.trainable_variables

    # Autograph is left to the layers, as in `model.fit`; it would hide errors.
    @tf.function(reduce_retracing=True, autograph=False)
    def run(batch):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        if with_moments:
            step = step_of(model, x, y, weight)
            return step.gradients, step.moments
        with tf.GradientTape() as tape:
            y_pred = train_step.predict_in_training(model, x)
            loss = train_step.compute_loss(model, x, y, y_pred, weight)
        return tape.gradient(loss, variables), []

    data = []
    for number, batch in enumerate(batches):
        # The same gradients are None in every step.
        began = time.perf_counter()
        gradients, moments = run(batch)
        known = [v for v, g in zip(variables, gradients, strict=True) if g is not None]
        gradients, moments = _dense(gradients), _dense(moments)
        seconds = time.perf_counter() - began
        step = _StepData(gradients, moments, known, seconds)
        if not step.gradients or not all(np.isfinite(g).all() for g in step.gradients):
            raise ValueError(
                "The model has no gradient, or one that is NaN or infinite. Received: "
                f"batch {number} of the dataset"
            )
        data.append(step)
    return data


def _dense(tensors):
    found = [tf.convert_to_tensor(tensor) for tensor in tensors if tensor is not None]
    return [tf.cast(tensor, tf.float32) for tensor in found]


def _measure(candidate, data, seed):
    """Takes the steps with a candidate around plain SGD, and compares the weights."""
    optimizer = _wrapped(candidate, transport="all_gather", seed=seed)
    shapes = [gradient.shape for gradient in data[0].gradients]
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in shapes]
    optimizer.build(variables)
    exact, before, errors = 0.0, 0.0, []
    for step in data:
        moments = {}
        if optimizer.needs_second_moments:
            moments["second_moments"] = step.moments
        optimizer.apply(step.gradients, variables, **moments)
        sent, gradient = -_flat(variables), _flat(step.gradients)
        errors.append(_relative(sent - before - gradient, gradient))
        exact, before = exact + gradient, sent
    traffic = optimizer.traffic
    compressed, plain = traffic.elements_compressed, traffic.elements_plain
    bits = traffic.bits_per_element_up if compressed else 0.0
    return Measured(
        candidate.wrapper,
        candidate.arguments,
        error=_relative(before - exact, exact),
        step_error=float(np.mean(errors)),
        bits=(bits * compressed + 32 * plain) / (compressed + plain),
    )


def _flat(tensors):
    return np.concatenate([t.numpy().ravel() for t in tensors]).astype(np.float64)


def _relative(difference, whole):
    length = np.linalg.norm(difference)
    return float(length / np.linalg.norm(whole)) if length else 0.0


def _reason(best, table, target, num_batches, moments_error):
    """Returns sentences on the choice, and on what was not measured."""
    sentences = [
        f"{best.name} sends {best.bits:.2f} bits an element with an error of "
        f"{best.error:.3f}: the fewest bits of the {len(table)} candidates with an "
        f"error of at most {target:g}."
    ]
    fewer = [row for row in table if row.bits < best.bits]
    if fewer:
        near = min(fewer, key=lambda row: row.error)
        sentences.append(
            f"Among those with fewer bits the least error is {near.error:.3f}, of "
            f"{near.name} at {near.bits:.2f} bits."
        )
    others = [r for r in table if r.error <= target and r.wrapper != best.wrapper]
    if others:
        sentences.append(
            f"The next other method is {others[0].name}, with {others[0].bits:.2f} "
            f"bits and an error of {others[0].error:.3f}."
        )
    if moments_error is not None:
        sentences.append(
            "Methods that need second moments were left out: "
            f"{moments_error.split('. ')[0]}."
        )
    sentences.append(
        f"Measured with {num_batches} batches of one worker at fixed weights; "
        "neither accuracy nor time was measured."
    )
    return " ".join(sentences)
