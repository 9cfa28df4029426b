"""Cases of loops that begin and end together, and of models and loops of users.

A pool's workers run them in the tests of `test_loops.py`.
"""

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tests.compat.fit_models import (
    METHODS,
    SGD,
    X,
    Y,
    digest,
    fit,
    make,
    own_rank,
    scope,
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
            # It names the first batch of a loop; later versions name the last.
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
    answer = {}
    for moment in ("batch", "epoch"):
        model = make(METHODS["terngrad"], **WAYS[way])
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
    answer = {}
    for name, kinds in {
        "known": (True, True),
        "unknown": (False, False),
        "mixed": (True, False),
    }.items():
        model = make(METHODS["terngrad"], **WAYS[way])
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


def case_tail(folder):
    """The last batch has a row for one worker only: convolutions, normalization."""
    keras.utils.set_random_seed(3)
    strategy, _ = strategy_and_rank()
    images = np.random.default_rng(8).normal(size=(25, 8, 8, 1)).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(16, 3),
                layers.BatchNormalization(name="normalization"),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )
        model.compile(METHODS["terngrad"](), "mse")
    batches = Batches()
    backup = tfgradcomp.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    before = []
    own = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: before.append(_moving_mean(model))
    )
    fit(model, images, callbacks=[batches, own, backup])
    first = digest(model)
    model.predict(images, batch_size=12, verbose=0)
    return {
        "batches": batches.seen,
        "digest": first,
        "unchanged": digest(model) == first,
        "before": before[-1],
        "after": _moving_mean(model),
    }


def case_other_worker(culprit, what, every):
    """One worker changes what all share; returns the error and the batches until it."""
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
    try:
        fit(model, epochs=2, callbacks=[batches, spoils])
    except RuntimeError as error:
        return str(error), batches.seen
    return None, batches.seen


def case_short_batches(way):
    """Returns the error of batches with one row for all replicas together."""
    model = make(METHODS["terngrad"], **WAYS[way])
    try:
        fit(model, X[:7], batch_size=1, epochs=1)
        return None
    except ValueError as error:
        return str(error)


def _moving_mean(model):
    """The moving means of all local replicas."""
    strategy, _ = strategy_and_rank()
    value = model.get_layer("normalization").moving_mean.value
    return [v.numpy().tolist() for v in strategy.experimental_local_results(value)]


class Counter(layers.Layer):
    """Counts rows, and keeps a level that is not trained."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), dtype="int32", trainable=False)
        self.level = self.add_weight(shape=(2,), trainable=False)

    def call(self, x):
        return x


def case_statistics():
    """Floating statistics become their mean; what else differs stays as it is."""
    keras.utils.set_random_seed(3)
    strategy, rank = strategy_and_rank()
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), Counter(), layers.Dropout(0.1), layers.Dense(3)]
        )
        model.compile(METHODS["terngrad"](), "mse")
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


class Noise(layers.Layer):
    """Adds random numbers, without a seed of its own."""

    def call(self, x):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x))


def train_with_noise(draws_before=True, **kwargs):
    """Returns a hash of the weights, and numbers drawn before and after training."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((64,)), Noise(), layers.Dense(40), layers.Dense(3)]
    )
    model.compile(identity(SGD(0.01)), "mse", **kwargs)
    first = float(keras.random.uniform(())) if draws_before else None
    fit(model)
    return digest(model), first, float(keras.random.uniform(()))


def case_noise():
    """Random numbers without a seed in a model: in graphs and eagerly, again."""
    # Keras keeps its state somewhere else from now on.
    keras.backend.clear_session()
    with scope():
        drawn = [train_with_noise(**WAYS[way]) for way in ("loops", "eagerly", "loops")]
        # The first step makes the generator.
        return {"drawn": drawn, "late": train_with_noise(draws_before=False)}


class Adversaries(keras.Model):
    """Two networks that train in turn, without a `call`; noise is part of the data."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential(
            [keras.Input((8,)), layers.Dense(40, "tanh"), layers.Dense(56)]
        )
        # Without an input: built by the first step.
        self.judge = keras.Sequential([layers.Dense(40, "tanh"), layers.Dense(1)])
        self.loss_of_judge = keras.metrics.Mean(name="judge")

    def compile(self, maker_optimizer, judge_optimizer, **kwargs):
        super().compile(**kwargs)
        self.maker_optimizer = maker_optimizer
        self.judge_optimizer = judge_optimizer

    @property
    def metrics(self):
        return [self.loss_of_judge]

    def _step(self, optimizer, network, loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of()
        gradients = tape.gradient(loss, network.trainable_weights)
        # The optimizers of one process take the mean of all rows, those of N workers
        # the sum over them: a step of one's own divides, as Keras' does.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        gradients = [g / replicas for g in gradients]
        optimizer.apply_gradients(
            zip(gradients, network.trainable_weights, strict=True)
        )
        return loss

    def train_step(self, data):
        rows, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        noise, real = rows[:, :8], rows[:, 8:]

        def judged():
            made, true = self.judge(self.maker(noise)), self.judge(real)
            return tf.reduce_mean(tf.nn.softplus(made) + tf.nn.softplus(-true))

        def fooled():
            return tf.reduce_mean(tf.nn.softplus(-self.judge(self.maker(noise))))

        loss = self._step(self.judge_optimizer, self.judge, judged)
        self._step(self.maker_optimizer, self.maker, fooled)
        self.loss_of_judge.update_state(loss)
        return {"judge": self.loss_of_judge.result()}


def train_adversaries(make_optimizer, **kwargs):
    """Two fits of a new model; returns its weights."""
    keras.utils.set_random_seed(3)
    model = Adversaries()
    model.compile(make_optimizer(), make_optimizer(), **kwargs)
    for _ in range(2):
        model.fit(X, batch_size=12, epochs=1, verbose=0, shuffle=False)
    return [w.tolist() for w in model.get_weights()]


def identity(sgd):
    """The optimizer behind a compressor that loses nothing."""
    return tfgradcomp.DistEFSGD(sgd, compressor="identity", min_size=3)


def case_without_call(way):
    """Two wrapped optimizers in a model without `call`, and a method that loses."""
    strategy, _ = strategy_and_rank()
    with strategy.scope():
        return {
            "identity": train_adversaries(lambda: identity(SGD(0.1)), **WAYS[way]),
            "terngrad": train_adversaries(METHODS["terngrad"], **WAYS[way]),
        }


def train_by_hand(make_optimizer, run_steps):
    """A loop of one's own, whose first step builds the optimizer inside a function."""
    keras.utils.set_random_seed(3)
    strategy, _ = strategy_and_rank()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    batches = strategy.experimental_distribute_dataset(data.with_options(options))
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), layers.Dense(40, "relu"), layers.Dense(3)]
        )
        optimizer = make_optimizer()
        error = keras.metrics.MeanAbsoluteError()

    def step(x, y):
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            squares = tf.reduce_mean(tf.square(predictions - y), -1)
            loss = tf.nn.compute_average_loss(squares, global_batch_size=12)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        error.update_state(y, predictions)
        return loss

    def all_steps(iterator):
        loss = 0.0
        for batch in iterator:
            losses = strategy.run(step, args=batch)
            loss += strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
        return loss

    loss = run_steps(all_steps)(batches)
    return {
        "loss": float(loss),
        "mae": float(error.result()),
        "weights": [w.tolist() for w in model.get_weights()],
    }


def case_by_hand():
    """Loops of one's own: traced as a whole and eagerly, with and without loss."""
    scaled = keras.optimizers.LossScaleOptimizer
    return {
        "identity": train_by_hand(lambda: identity(SGD(0.1)), tf.function),
        "eagerly": train_by_hand(lambda: identity(SGD(0.1)), lambda function: function),
        "scaled": train_by_hand(lambda: scaled(METHODS["terngrad"]()), tf.function),
    }


def case_xla():
    """Returns the error of `fit` for a model with jit_compile=True."""
    model = make(METHODS["terngrad"], jit_compile=True)
    try:
        fit(model, epochs=1)
        return None
    except ValueError as error:
        return str(error)


class OwnScore(keras.callbacks.Callback):
    """Adds a score to the logs that is another one on each worker."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = self.scores[own_rank()][epoch]


def case_own_score():
    """Callbacks that decide by a score of one worker: weights and learning rates.

    They read the learning rate as a Python number, as without a strategy.
    """
    answer = {}
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
        model = make(METHODS["terngrad"])
        seen = []
        record = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs, model=model, seen=seen: seen.append(
                [digest(model), float(model.optimizer.learning_rate)]
            )
        )
        fit(model, epochs=3, callbacks=[record, OwnScore(scores), callback])
        seen.append([digest(model), float(model.optimizer.learning_rate)])
        answer[name] = seen
    return answer


class AnyRank(keras.Model):
    """Takes batches whose number of axes is not known."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(tf.ensure_shape(x, [None, 64]))


def case_unknown_rank():
    """Only a batch shows how many axes there are; the model is not built before."""

    def batches():
        for begin in range(0, 60, 12):
            rows = slice(begin, begin + 12)
            # TensorFlow writes into arrays that it is given by a generator.
            yield X[rows].copy(), Y[rows].copy()

    keras.utils.set_random_seed(3)
    strategy, _ = strategy_and_rank()
    with strategy.scope():
        model = AnyRank()
        model.compile(METHODS["terngrad"](), "mse", metrics=["mae"])
    data = tf.data.Dataset.from_generator(
        batches, (tf.float32, tf.float32), (None, [None, 3])
    )
    return model.fit(data, epochs=2, verbose=0).history["loss"]
