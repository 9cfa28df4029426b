"""Choice of a method by what it loses of some real gradients."""

from __future__ import annotations

import itertools
import math
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

# Signs without a scale are not among them: their error is not one of length.
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
    """Losses and size of what a candidate makes of the gradients.

    Attributes:
        wrapper: Name of the wrapper in `tfgradcomp`.
        arguments: Its arguments besides the inner optimizer.
        error: |sum of what was sent - sum of the gradients| over |sum of the
            gradients|, over all steps: what is owed counts as not sent.
        step_error: |what was sent - gradient| over |gradient|, the mean of the steps.
        bits: Bits an element that a worker sends, float32 of what is not compressed
            included; of messages that vary in length, the mean of the steps.
    """

    wrapper: str
    arguments: dict[str, Any]
    error: float
    step_error: float
    bits: float

    @property
    def name(self) -> str:
        """The call that makes it, without the inner optimizer."""
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.arguments.items())
        return f"{self.wrapper}({arguments})"


class Tuning(NamedTuple):
    """The result of `tune`; as a string, a table and the reason.

    Attributes:
        best: The candidate with the fewest bits whose error is small enough.
        table: All candidates that were measured, the fewest bits first.
        reason: Why it is the best, and what was not measured, in sentences.
    """

    best: Measured
    table: tuple[Measured, ...]
    reason: str

    def optimizer(
        self, inner_optimizer: Any, **arguments: Any
    ) -> optimizers.CompressedOptimizer:
        """Returns the best candidate around an optimizer, for `model.compile`.

        Args:
            inner_optimizer: A Keras optimizer, its name or its config.
            **arguments: Further arguments of the wrapper, such as `exclude`.
        """
        wrapper = getattr(optimizers, self.best.wrapper)
        return wrapper(inner_optimizer, **{**self.best.arguments, **arguments})

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.table)
        lines = [f"{'method':{width}}  bits/element  error  error of a step"]
        lines += [
            f"{row.name:{width}}  {row.bits:12.2f}  {row.error:5.3f}  "
            f"{row.step_error:15.3f}"
            for row in self.table
        ]
        return "\n".join([*lines, "", self.reason])


def tune(
    model: keras.Model,
    dataset: Iterable,
    target_error: float = 0.5,
    steps: int = 10,
    candidates: Sequence[tuple[str, Mapping[str, Any]]] | None = None,
    seed: int = 0,
) -> Tuning:
    r"""Chooses a method by what it loses of some steps' gradients of a model.

    Takes the gradients \( g_t \) of the first batches at the weights that the model
    has, and feeds them to each candidate as one worker would. With \( s_t \) what it
    sends, the error is \( |\sum_t s_t - \sum_t g_t| \,/\, |\sum_t g_t| \): how far
    from float32's way the weights would be after these steps of plain SGD, as a part
    of that way. It counts what rounding adds and what is owed alike. The candidate
    with the fewest bits whose error is at most `target_error` is the best.

    The model stays as it is: weights, moving statistics, metrics, random states. It
    measures neither accuracy nor time, and nothing of many workers, whose mean has less
    noise of rounding.

    Args:
        model: A compiled model with its weights; some epochs into a training, the
            gradients say more than at its start.
        dataset: Batches as `model.fit` takes them from a `tf.data.Dataset`.
        target_error: Largest error, positive.
        steps: Number of batches, at least 2. The gradients of all are kept in memory.
        candidates: Pairs of a wrapper's name and its arguments; None: those of
            `tfgradcomp.planning.tuning.CANDIDATES`.
        seed: Of the candidates' random numbers.

    Returns:
        The best candidate, the table of all, and the reason in sentences, which the log
        shows as well.

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
            "target_error must be positive and finite: 0.5 lets half the way be "
            f"wrong. Received: target_error={target_error!r}"
        )
    chosen = _checked(CANDIDATES if candidates is None else candidates)
    needs_moments = any(_wrapped(*one).needs_second_moments for one in chosen)
    taken = _gradients(model, dataset, steps, needs_moments)
    table = []
    for name, arguments in chosen:
        if taken.moments is None and _wrapped(name, arguments).needs_second_moments:
            continue
        table.append(_measure(name, arguments, taken, seed))
    table.sort(key=lambda row: (row.bits, row.error))
    best = next((row for row in table if row.error <= target_error), None)
    if best is None:
        errors = {row.name: round(row.error, 4) for row in table}
        raise ValueError(
            "No candidate's error is at most target_error. Allow a larger error, or "
            f"train in float32. Received: target_error={target_error}, errors={errors}"
        )
    tuning = Tuning(best, tuple(table), _reason(best, table, target_error, taken))
    logger.info("%s", tuning.reason)
    return tuning


class _Taken(NamedTuple):
    """Gradients of some steps, float32; `moments` None where they cannot be had."""

    gradients: list[list[tf.Tensor]]
    moments: list[list[tf.Tensor]] | None
    why_no_moments: str = ""


def _checked(candidates):
    chosen = []
    for name, arguments in candidates:
        if name not in optimizers.__all__:
            raise ValueError(
                "A candidate is the name of a wrapper in tfgradcomp, such as "
                "'TernGrad', and a dictionary of its arguments. "
                f"Received: candidates with {name!r}"
            )
        chosen.append((name, dict(arguments)))
    if not chosen:
        raise ValueError(
            "candidates must be None or pairs, at least one. "
            f"Received: candidates={candidates!r}"
        )
    return chosen


def _wrapped(name, arguments, **more):
    # A rate of 1: weights of zero become minus the sum of what was sent.
    inner = keras.optimizers.SGD(1.0)
    return getattr(optimizers, name)(inner, **arguments, **more)


def _gradients(model, dataset, steps, needs_moments):
    """Takes the gradients of the first batches and puts the model back."""
    if not getattr(model, "compiled", False):
        raise ValueError(
            "tune needs the loss of a compiled model: call model.compile(optimizer, "
            f"loss) first. Received: model={model!r}"
        )
    workers = model.distribute_strategy.num_replicas_in_sync
    if workers > 1:
        raise ValueError(
            "tune measures in one process, as one worker: several might choose "
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
            "dataset must have two batches at least: one says nothing of what is sent "
            f"later. Received: {len(batches)} batches"
        )
    if not model.built:
        # Creates the weights, before their state is noted.
        model(keras.utils.unpack_x_y_sample_weight(batches[0])[0])
    before = RunState(model)
    values = before.read()
    statistics = [(v, v.numpy()) for v in model.non_trainable_variables]
    try:
        why = ""
        if needs_moments:
            try:
                return _steps(model, batches, True)
            except ValueError as error:
                why = str(error)
        return _steps(model, batches, False)._replace(why_no_moments=why)
    finally:
        for variable, value in statistics:
            variable.assign(value)
        before.assign(values)
        before.assign_metrics(values)


def _steps(model, batches, with_moments):
    variables = model.trainable_variables

    # As in `model.fit`, autograph is left to the layers; it would hide errors.
    @tf.function(reduce_retracing=True, autograph=False)
    def one(batch):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        if with_moments:
            step = step_of(model, x, y, weight)
            return step.gradients, step.moments
        with tf.GradientTape() as tape:
            y_pred = train_step.predict_in_training(model, x)
            loss = train_step.compute_loss(model, x, y, y_pred, weight)
        return tape.gradient(loss, variables), []

    gradients, moments = [], []
    for number, batch in enumerate(batches):
        found, squares = one(batch)
        # Of all batches the same are missing.
        own = [_dense(g) for g in found if g is not None]
        if not own or not all(np.isfinite(g).all() for g in own):
            raise ValueError(
                "The model has no gradient, or one that is NaN or infinite. Received: "
                f"batch {number} of the dataset"
            )
        gradients.append(own)
        moments.append([_dense(m) for m in squares if m is not None])
    return _Taken(gradients, moments if with_moments else None)


def _dense(gradient):
    return tf.cast(tf.convert_to_tensor(gradient), tf.float32)


def _measure(name, arguments, taken, seed):
    """Feeds the gradients to a candidate around plain SGD, and watches the weights."""
    optimizer = _wrapped(name, arguments, transport="all_gather", seed=seed)
    shapes = [g.shape for g in taken.gradients[0]]
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in shapes]
    optimizer.build(variables)
    due, before, errors = 0.0, 0.0, []
    for index, gradients in enumerate(taken.gradients):
        given = {}
        if optimizer.needs_second_moments:
            given["second_moments"] = taken.moments[index]
        optimizer.apply(gradients, variables, **given)
        sent = -_flat([v.numpy() for v in variables])
        gradient = _flat([g.numpy() for g in gradients])
        errors.append(_relative(sent - before - gradient, gradient))
        due, before = due + gradient, sent
    traffic = optimizer.traffic
    compressed, plain = traffic.elements_compressed, traffic.elements_plain
    bits = traffic.bits_per_element_up if compressed else 0.0
    return Measured(
        name,
        arguments,
        error=_relative(before - due, due),
        step_error=float(np.mean(errors)),
        bits=(bits * compressed + 32 * plain) / (compressed + plain),
    )


def _flat(arrays):
    return np.concatenate([a.ravel() for a in arrays]).astype(np.float64)


def _relative(difference, whole):
    length = np.linalg.norm(difference)
    return float(length / np.linalg.norm(whole)) if length else 0.0


def _reason(best, table, target, taken):
    """Says in sentences why a row is the best, and what the table does not say."""
    said = [
        f"{best.name} sends {best.bits:.2f} bits an element with an error of "
        f"{best.error:.3f}: the fewest bits of the {len(table)} candidates with an "
        f"error of at most {target:g}."
    ]
    fewer = [row for row in table if row.bits < best.bits]
    if fewer:
        near = min(fewer, key=lambda row: row.error)
        said.append(
            f"Of those with fewer bits the least error is {near.error:.3f}, of "
            f"{near.name} at {near.bits:.2f} bits."
        )
    others = [
        row
        for row in table
        if row.error <= target and row.wrapper != best.wrapper and row is not best
    ]
    if others:
        next_one = others[0]
        said.append(
            f"The next other method is {next_one.name}, with {next_one.bits:.2f} bits "
            f"and an error of {next_one.error:.3f}."
        )
    if taken.why_no_moments:
        said.append(
            "Methods that need second moments were left out: "
            f"{taken.why_no_moments.split('. ')[0]}."
        )
    said.append(
        f"Measured with {len(taken.gradients)} batches of one worker at fixed weights; "
        "neither accuracy nor time was measured."
    )
    return " ".join(said)
