"""Loops on several workers, which `test_loops` and `test_past_iterators` run."""

import functools
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import input_lib

import tfgradcomp
from tests.fit.fit_models import (
    METHODS,
    X,
    Y,
    compiled,
    digest,
    error_of_fit,
    fit,
    local_values,
    make,
    own_rank,
)
from tests.helpers import KERAS

layers = keras.layers
WAYS = {
    "steps": {},
    "loops": {"steps_per_execution": 2},
    "eagerly": {"run_eagerly": True},
}


class Batches(keras.callbacks.Callback):
    """Records the training batches; sets a flag of the model on worker 1 alone."""

    def __init__(self, moment=None, flag="stop_training", index=1):
        super().__init__()
        self.moment, self.flag, self.index = moment, flag, index
        self.seen, self.tests, self.own_view = [], 0, []

    def _at(self, moment, index):
        if (moment, index) == (self.moment, self.index) and own_rank() == 1:
            setattr(self.model, self.flag, True)
            self.own_view.append(getattr(self.model, self.flag))

    def on_train_batch_end(self, batch, logs=None):
        if KERAS < (3, 11):
            # Keras 3.10 names the first batch of a loop, later versions the last.
            batch += self.model.steps_per_execution - 1
        self.seen.append(batch)
        self._at("batch", batch)

    def on_epoch_end(self, epoch, logs=None):
        self._at("epoch", epoch)

    def on_test_batch_end(self, batch, logs=None):
        self.tests += 1
        self._at("test", batch)

    def on_predict_batch_end(self, batch, logs=None):
        self.tests += 1
        self._at("predict", batch)


def case_stop(way):
    """One worker alone sets `stop_training`, in a batch and at the end of an epoch."""
    answer, model = {}, make(METHODS["terngrad"], **WAYS[way])
    for moment in ("batch", "epoch"):
        batches = Batches(moment)
        history = fit(model, epochs=4, callbacks=[batches], validation_data=(X, Y))
        answer[moment] = {
            "digest": digest(model),
            "batches": batches.seen,
            "epochs": len(history["val_loss"]),
            "flag": model.stop_training,
            "own_view": batches.own_view,
        }
    return answer


def case_stop_evaluation():
    """One worker alone ends an evaluation and a prediction; then it trains on."""
    model = make(METHODS["terngrad"])
    fit(model, epochs=1)
    test, predict = Batches("test", "stop_evaluating"), Batches("predict")
    predict.flag = "stop_predicting"
    model.evaluate(X, Y, batch_size=12, verbose=0, callbacks=[test])
    rows = model.predict(X, batch_size=12, verbose=0, callbacks=[predict])
    fit(model, epochs=1)
    return {"tests": [test.tests, predict.tests], "rows": len(rows), "is": model.name}


def _data(count, is_known):
    data = tf.data.Dataset.from_tensor_slices((X[:count], Y[:count]))
    if not is_known:
        data = data.filter(lambda x, y: True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    return data.batch(12).with_options(options)


def case_lengths(way):
    """Workers whose data have different lengths, known to Keras and unknown."""
    answer, model = {}, make(METHODS["terngrad"], **WAYS[way])
    for name, kinds in {
        "known": (True, True),
        "unknown": (False, False),
        "mixed": (True, False),
    }.items():
        batches, rank = Batches(), own_rank()
        data = _data((24, 60)[rank], kinds[rank])
        history = model.fit(
            data, epochs=2, verbose=0, callbacks=[batches], validation_data=data
        ).history
        answer[name] = {
            "digest": digest(model),
            "batches": batches.seen,
            "history": history,
        }
    return answer


def case_iterators():
    """Which threads remove the iterators of `fit`; how many its epochs find alive."""
    removers, alive = [], []
    iterators = weakref.WeakSet()
    original = input_lib.DistributedDataset.__iter__

    @functools.wraps(original)
    def iterate(dataset):
        iterator = original(dataset)
        iterators.add(iterator)
        weakref.finalize(
            iterator, lambda: removers.append(threading.current_thread().name)
        )
        return iterator

    class Alive(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            alive.append(len(iterators))

    model = make(METHODS["terngrad"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_lib.DistributedDataset, "__iter__", iterate)
        model.fit(
            *(X, Y),
            batch_size=8,
            epochs=6,
            verbose=0,
            callbacks=[Alive()],
            validation_data=(X, Y),
        )
    # The last epoch's validation has ended when `fit` lets go of its iterator.
    model.evaluate(X, Y, verbose=0)
    for thread in threading.enumerate():
        if thread.name == "past iterator":
            thread.join()
    return {"removers": {*removers}, "alive": alive, "left": len(iterators)}


class Places(layers.Layer):
    """Adds a row of a table by place, and noise: neither needs a batch."""

    def build(self, shape):
        self.table = layers.Embedding(shape[2], shape[3])
        self.noise = layers.Dropout(0.1)
        self.table.build()

    def call(self, x, training=None):
        table = self.table(keras.ops.arange(x.shape[2]))
        return x + self.noise(table, training=training)


def case_tail(folder):
    """The last batch has a row for one worker only: convolutions, normalization."""
    images = np.random.default_rng(8).normal(size=(25, 8, 8, 1)).astype("float32")
    model = compiled(
        lambda: [
            layers.Conv2D(16, 3),
            Places(name="places"),
            layers.BatchNormalization(name="normalization"),
            layers.Flatten(),
            layers.Dense(3),
        ],
        METHODS["terngrad"],
        inputs=(8, 8, 1),
    )
    moving_mean = model.get_layer("normalization").moving_mean
    seeds = model.get_layer("places").noise.seed_generator.state
    batches = Batches()
    backup = tfgradcomp.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    before = []
    own = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: before.append(local_values(moving_mean))
    )
    fit(model, images, callbacks=[batches, own, backup])
    first = digest(model)
    model.predict(images, batch_size=12, verbose=0)
    return {
        "batches": batches.seen,
        "digest": first,
        "unchanged": digest(model) == first,
        "drawn": [int(state[1]) for state in local_values(seeds)],
        "before": before[-1],
        "after": local_values(moving_mean),
    }


def case_other_worker(culprit, what, every):
    """One worker changes a shared variable; returns the error and earlier batches."""
    model = make(lambda: METHODS["dist_ef_block_sgdm"](verify_every=every))

    def spoil(batch, logs):
        if (batch, own_rank()) == (1, culprit):
            variables = {
                "rate": model.optimizer.inner_optimizer.learning_rate,
                "weight": model.trainable_variables[2],
            }
            value = variables[what].value
            (own,) = tf.distribute.get_strategy().experimental_local_results(value)
            own.assign(own * (1 + 2**-23))

    batches = Batches()
    spoils = keras.callbacks.LambdaCallback(on_train_batch_end=spoil)
    error = error_of_fit(model, kind=RuntimeError, callbacks=[batches, spoils])
    return error, batches.seen


def case_short_batches(way):
    """Returns the error of batches with one row for all replicas together."""
    model = make(METHODS["terngrad"], **WAYS[way])
    return error_of_fit(model, X[:7], 1, batch_size=1)


def case_foreign_loops():
    """Returns the errors of Keras' own loops, looked up before they were replaced."""
    model, errors = make(METHODS["terngrad"]), []
    for method in (keras.Model.fit, keras.Model.evaluate):
        with pytest.raises(RuntimeError) as error:
            method.__wrapped__(model, X, Y, verbose=0)
        errors.append(str(error.value))
    return errors


class Counter(layers.Layer):
    """Counts rows, and keeps a level that is not trained."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), dtype="int32", trainable=False)
        self.level = self.add_weight(shape=(2,), trainable=False)

    def call(self, x):
        return x


def case_statistics():
    """Evaluates with statistics, an integer and a seed that differ between workers."""
    rank = own_rank()
    model = compiled(
        lambda: [Counter(), layers.Dropout(0.1), layers.Dense(3)], METHODS["terngrad"]
    )
    counter, dropout, _ = model.layers
    counter.count.assign(rank + 1)
    counter.level.assign([rank + 1.0, 7.0])
    state = dropout.seed_generator.state
    state.assign([rank, rank])
    model.evaluate(X, Y, batch_size=12, verbose=0)
    return {
        "count": int(counter.count.numpy()),
        "level": counter.level.numpy().tolist(),
        "seeds": state.numpy().tolist(),
    }


class OwnScore(keras.callbacks.Callback):
    """Adds a score to the logs that differs between the workers."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = self.scores[own_rank()][epoch]


def case_own_score():
    """Callbacks that decide by a score of one worker: weights and learning rates.

    They read the learning rate as a Python number, as without a strategy.
    """
    answer, model = {}, make(METHODS["terngrad"])
    for name, scores, callback in (
        # The best epoch is the first one of worker 0, the second of worker 1.
        (
            "weights",
            [[1.0, 2.0, 3.0], [2.0, 1.0, 3.0]],
            keras.callbacks.EarlyStopping(
                "score", patience=9, mode="min", restore_best_weights=True
            ),
        ),
        # Worker 1 alone sees no progress.
        (
            "rates",
            [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]],
            keras.callbacks.ReduceLROnPlateau("score", 0.5, patience=1, mode="min"),
        ),
    ):
        seen = []
        record = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs, seen=seen: seen.append(
                [digest(model), float(model.optimizer.learning_rate)]
            )
        )
        fit(model, epochs=3, callbacks=[record, OwnScore(scores), callback])
        seen.append([digest(model), float(model.optimizer.learning_rate)])
        answer[name] = seen
    return answer
