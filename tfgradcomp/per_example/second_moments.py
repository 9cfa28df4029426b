"""Second moments of the gradients of single examples, in one pass of `model.fit`.

A batch's loss is a sum over its examples, L = Σ_z l_z, and so is a weight's gradient,
g = Σ_z g_z. Its second moment is m = Σ_z g_z², element by element. The terms g_z
contain Keras' division by the size of the batch and by the number of replicas. No
second backward pass is needed: the gradients with respect to the outputs of the layers
(δ) are computed along with those of the weights, and a rule for each type of layer
computes g_z from inputs and δ.

A part of the loss that depends on the weights directly, such as a regularizer, belongs
to no example: each of the n examples gets an equal share of its gradient r, so that
Σ_z g_z = g still holds, m = Σ_z (g_z + r / n)².
Batch statistics count as constants: the influence of an example on others through the
mean and the variance of a batch normalization is part of the others' δ.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import keras
import tensorflow as tf

from tfgradcomp.compat import train_step as compat
from tfgradcomp.compat.replace import replaced_attribute
from tfgradcomp.per_example import moment_rules
from tfgradcomp.per_example.layer_calls import CallRecorder

# Floats that the gradients of several samples may hold at once: 64 MiB of float32.
_CHUNK = 2**24


class Step(NamedTuple):
    """Results of a forward and a backward pass."""

    y_pred: object
    loss: tf.Tensor
    gradients: list
    moments: list


def enable_second_moments() -> None:
    """Makes `model.fit` pass second moments to optimizers that need them.

    If `optimizer.needs_second_moments` is true, Keras' train step calls
    `optimizer.apply(gradients, variables, second_moments=moments)`. If the optimizer
    has an attribute `microbatches` that is not None, the gradients of so many groups of
    examples are squared instead of the examples'. A model that overrides `train_step`
    keeps its own. Calling this again has no effect.
    """
    compat.replace_train_step(_train_step)
    compat.replace_finite_update(_apply_finite)


def _train_step(original, model, data):
    inner = _inner(model.optimizer)
    if not getattr(inner, "needs_second_moments", False):
        return original(model, data)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    compat.build(model, data)
    variables = model.trainable_variables
    step = step_of(model, x, y, sample_weight, getattr(inner, "microbatches", None))
    compat.track_loss(model, step.loss, _batch(x))
    if model.optimizer is inner:
        inner.apply(step.gradients, variables, second_moments=step.moments)
    else:
        # A loss scale applies both in a conditional, where `_apply_finite` splits them.
        model.optimizer.apply([*step.gradients, *step.moments], variables)
    return model.compute_metrics(x, y, step.y_pred, sample_weight=sample_weight)


def _apply_finite(original, optimizer, gradients, variables):
    """Unscales and applies finite gradients, and their second moments if given."""
    count = len(variables)
    if len(gradients) == count:
        return original(optimizer, gradients, variables)
    gradients, moments = gradients[:count], gradients[count:]
    inverse = 1 / tf.convert_to_tensor(optimizer.dynamic_scale)
    moments = [None if m is None else m * inverse * inverse for m in moments]
    inner = optimizer.inner_optimizer
    # Keras looks `apply` up before it switches to another replica, so no replica gets
    # the moments of another.
    apply = functools.partial(inner.apply, second_moments=moments)
    with replaced_attribute(inner, "apply", apply):
        return original(optimizer, gradients, variables)


def step_of(model, x, y, sample_weight=None, microbatches: int | None = None) -> Step:
    """Runs one forward and one backward pass of Keras' train step.

    Args:
        model: A compiled model.
        x: Inputs, tensors [examples, ...].
        y: Targets.
        sample_weight: Weights of the examples.
        microbatches: Number of groups of consecutive examples whose gradients are
            squared instead of the examples'.

    Returns:
        Predictions and loss, and for each trainable variable, in the order of the
        model, its gradient (the same bits as without moments) and the moment, in the
        gradient's unit squared; None for a variable without a gradient.

    Raises:
        ValueError: If `microbatches` is less than 2, or if a gradient cannot be split
            by examples.
    """
    if microbatches is not None and microbatches < 2:
        raise ValueError(
            "microbatches must be at least 2: one group has no variance. "
            f"Received: microbatches={microbatches}"
        )
    variables, batch = model.trainable_variables, _first(x).shape[0]
    recorder = CallRecorder(variables, batch)
    with tf.GradientTape() as tape:
        with recorder:
            y_pred = compat.predict_in_training(model, x)
        # This tape sees no layer, so its gradients are of the regularizers alone.
        with tf.GradientTape() as direct:
            loss = compat.compute_loss(model, x, y, y_pred, sample_weight)
            scaled = model.optimizer.scale_loss(loss)
    watched = [moment_rules.watched(call) for call in recorder.leaves]
    gradients, deltas = tape.gradient(scaled, [variables, watched])
    shares = direct.gradient(scaled, variables)
    groups = _Groups(_batch(x) if batch is None else batch, microbatches)
    terms = []
    for call, delta in zip(recorder.leaves, deltas, strict=True):
        if any(d is not None for d in delta):
            _check_rows(call, delta, groups.batch)
            terms += moment_rules.terms_of(call, delta, batch)
    squares = groups.squares(terms)
    moments: list = []
    for variable, gradient, share in zip(variables, gradients, shares, strict=True):
        moment = squares.get(id(variable))
        if gradient is None:
            moment = None
        elif share is not None:
            # Σ (g_z + r/n)² over n, where Σ g_z = g - r.
            r, g = tf.convert_to_tensor(share), tf.convert_to_tensor(gradient)
            if moment is None:
                moment = tf.zeros(variable.shape, variable.dtype)
            moment += r * (2 * g - r) / tf.cast(groups.samples, r.dtype)
        elif moment is None:
            raise ValueError(
                f"No layer's call accounts for the gradient of {variable.path!r}, so "
                "it cannot be split by examples. Use the weight in the call of a "
                "layer, or override `train_step` and pass second moments yourself. "
                f"Received: model={model.name}"
            )
        moments.append(moment)
    return Step(y_pred, loss, gradients, moments)


class _Groups:
    """Division of a batch into samples of `size` consecutive examples each.

    Args:
        batch: Number of examples.
        microbatches: Number of samples; None: each example is a sample.
    """

    def __init__(self, batch, microbatches):
        self.batch = batch
        self.grouped = microbatches is not None
        self.samples = microbatches if self.grouped else batch
        self.size = -(-batch // microbatches) if self.grouped else 1

    def squares(self, terms) -> dict:
        """Returns the sums of squares by the variables' ids."""
        squares = {}
        for connected in _connected(terms):
            squares.update(self._squares(connected))
        return squares

    def _squares(self, terms):
        term = terms[0]
        if len(terms) == 1 and not self.grouped and term.squares:
            inputs, deltas = self._rows(term, None, None)
            return {id(term.variables[0]): term.squares(inputs, deltas)}
        floats = sum(term.floats for term in terms)
        if isinstance(floats, int) and not floats:
            return self._sums(terms, None, None)
        min_samples = max(term.min_samples for term in terms)
        if all(isinstance(i, int) for i in (floats, self.samples, self.size)):
            chunk = max(min(_CHUNK // (floats * self.size), self.samples), min_samples)
            if chunk == self.samples:
                return self._sums(terms, None, None)
        else:
            floats = tf.cast(floats, tf.int64) * tf.cast(self.size, tf.int64)
            chunk = tf.minimum(_CHUNK // floats, tf.cast(self.samples, tf.int64))
            chunk = tf.cast(tf.maximum(chunk, min_samples), tf.int32)
        return self._in_chunks(terms, chunk)

    def _in_chunks(self, terms, chunk):
        variables = {id(v): v for term in terms for v in term.variables}

        def add(first, sums):
            new = self._sums(terms, first, chunk)
            sums = [s + new[key] for key, s in zip(variables, sums, strict=True)]
            return first + chunk, sums

        zeros = [
            tf.zeros(v.shape, keras.backend.result_type(v.dtype, "float32"))
            for v in variables.values()
        ]
        _, sums = tf.while_loop(
            lambda first, _: first < self.samples,
            add,
            (0, zeros),
            parallel_iterations=1,
        )
        return dict(zip(variables, sums, strict=True))

    def _sums(self, terms, first, count):
        """Returns sums of squares over `count` samples from `first`; None: over all."""
        sums: dict = {}
        for term in terms:
            gradients = term.gradients(*self._rows(term, first, count))
            for variable, gradient in zip(term.variables, gradients, strict=True):
                key = id(variable)
                sums[key] = sums[key] + gradient if key in sums else gradient
        return {key: tf.reduce_sum(tf.square(g), 0) for key, g in sums.items()}

    def _rows(self, term, first, count):
        """Returns inputs and deltas in samples; past the last example δ is zero."""
        if first is None and not self.grouped:
            return [[x[:, tf.newaxis] for x in xs] for xs in (term.inputs, term.deltas)]
        if first is None:
            first, count = 0, self.samples
        rows = first * self.size + tf.range(count * self.size)
        is_example = rows < self.batch
        rows = tf.minimum(rows, self.batch - 1)

        def in_samples(x):
            return tf.reshape(x, tf.concat([[count, self.size], tf.shape(x)[1:]], 0))

        def masked(x):
            mask = tf.reshape(is_example, [-1, *[1] * (x.shape.rank - 1)])
            return tf.where(mask, x, tf.zeros_like(x))

        return [
            [in_samples(tf.gather(x, rows)) for x in term.inputs],
            [in_samples(masked(tf.gather(x, rows))) for x in term.deltas],
        ]


def _check_rows(call, deltas, batch):
    for delta in deltas:
        if delta is not None:
            tf.debugging.assert_equal(
                tf.shape(delta)[0],
                batch,
                f"The first axis of the outputs of layer {call.layer.name!r} must be "
                "that of the batch, so that gradients can be split by examples. "
                "Reshape the inputs and call the layer inside one layer of your own.",
            )


def _connected(terms):
    """Groups the terms that share a variable, directly or through other terms."""
    groups: list = []
    for term in terms:
        keys = {id(v) for v in term.variables}
        near = [group for group in groups if keys & group[0]]
        groups = [group for group in groups if not keys & group[0]]
        members = [member for group in near for member in group[1]]
        groups.append((keys.union(*(group[0] for group in near)), [*members, term]))
    return [members for _, members in groups]


def _inner(optimizer):
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _first(x):
    return next(i for i in keras.tree.flatten(x) if i is not None)


def _batch(x):
    return tf.shape(_first(x))[0]
