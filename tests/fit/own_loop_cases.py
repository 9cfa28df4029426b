"""Models and loops as users write them, which workers run for `test_own_loops.py`."""

import keras
import tensorflow as tf

import tfgradcomp
from tests.fit.fit_models import (
    METHODS,
    SGD,
    X,
    Y,
    digest,
    error_of_fit,
    fit,
    make,
    scope,
    sequential,
    strategy,
    two_layers,
)
from tests.fit.loop_cases import WAYS

layers = keras.layers


class Noise(layers.Layer):
    """Adds random numbers, without a seed of its own."""

    def call(self, x):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x))


def train_with_noise(draws_before=True, **kwargs):
    """Returns a hash of the weights, and numbers drawn before and after training."""
    model = sequential(lambda: [Noise(), layers.Dense(40), layers.Dense(3)])
    model.compile(identity(SGD(0.01)), "mse", **kwargs)
    first = float(keras.random.uniform(())) if draws_before else None
    fit(model)
    return digest(model), first, float(keras.random.uniform(()))


def case_noise():
    """Random numbers without a seed in a model: in graphs and eagerly, again."""
    # Keras keeps its state in another object from now on.
    keras.backend.clear_session()
    with scope():
        drawn = [train_with_noise(**WAYS[way]) for way in ("loops", "eagerly", "loops")]
        # The first step creates the generator.
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
        # The optimizers add up the gradients of replicas, so a custom step divides by
        # their number, as Keras' own step does.
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
    """A wrapper with the identity compressor around an optimizer."""
    return tfgradcomp.DistEFSGD(sgd, compressor="identity", min_size=3)


def case_without_call(way):
    """Trains two wrapped optimizers in a model without `call`."""
    with scope():
        return train_adversaries(lambda: identity(SGD(0.1)), **WAYS[way])


def train_by_hand(make_optimizer, run_steps):
    """Runs a custom loop, whose first step builds the optimizer inside a function."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    batches = strategy().experimental_distribute_dataset(data.with_options(options))
    with scope():
        model = sequential(two_layers)
        optimizer = make_optimizer()
        error = keras.metrics.MeanAbsoluteError()

    def step(x, y):
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            squares = tf.reduce_mean(tf.square(predictions - y), -1)
            loss = tf.nn.compute_average_loss(squares, global_batch_size=12)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        error.update_state(y, predictions)
        return loss

    def all_steps(iterator):
        loss = 0.0
        for batch in iterator:
            losses = strategy().run(step, args=batch)
            loss += strategy().reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
        return loss

    loss = run_steps(all_steps)(batches)
    return {
        "loss": float(loss),
        "mae": float(error.result()),
        "weights": [w.tolist() for w in model.get_weights()],
    }


def case_by_hand():
    """Runs custom loops: eagerly, and traced as a whole with a loss scale."""
    scaled = keras.optimizers.LossScaleOptimizer
    return {
        "eagerly": train_by_hand(lambda: identity(SGD(0.1)), lambda function: function),
        "traced": train_by_hand(lambda: scaled(identity(SGD(0.1))), tf.function),
    }


def case_xla():
    """Returns the error of `fit` for a model with jit_compile=True."""
    return error_of_fit(make(METHODS["terngrad"], jit_compile=True))


class AnyRank(keras.Model):
    """Takes batches whose number of axes is not known."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(tf.ensure_shape(x, [None, 64]))


def case_unknown_rank():
    """Trains on batches whose number of axes is known only when they are read."""

    def batches():
        for begin in range(0, 60, 12):
            rows = slice(begin, begin + 12)
            # TensorFlow writes into arrays that it is given by a generator.
            yield X[rows].copy(), Y[rows].copy()

    keras.utils.set_random_seed(3)
    with scope():
        model = AnyRank()
        model.compile(METHODS["terngrad"](), "mse", metrics=["mae"])
    data = tf.data.Dataset.from_generator(
        batches, (tf.float32, tf.float32), (None, [None, 3])
    )
    return model.fit(data, epochs=2, verbose=0).history["loss"]
