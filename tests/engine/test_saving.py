"""Saving in the middle of a run, and going on."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import Rates, bits, make_variables, named
from tests.methods import ROWS
from tests.selection import select


def sgd(**arguments):
    return keras.optimizers.SGD(Rates([0.1, 0.05, 0.2, 0.02]), **arguments)


INNERS = {
    "momentum": lambda: sgd(momentum=0.5),
    "moving average": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    # Saved in the middle of a window.
    "window": lambda: sgd(gradient_accumulation_steps=3),
}


def make(row, inner=sgd):
    arguments = {"seed": 2**61 + 3, "allow_inner_momentum": True, **row.in_training}
    return row.make(inner(), min_size=10, **arguments)


def every_run():
    """Each of the needs, with an inner optimizer whose state is saved as well."""
    for i, row in enumerate(select(by=lambda row: row.needs)):
        inner = "window" if row.holds_momentum else [*INNERS][i % 3]
        yield pytest.param(row, INNERS[inner], id=f"{row.name}-{inner}")


# With one worker there is nothing left for the server to lose.
STATE = [
    "compressed.worker.residual",
    "compressed.worker.momentum",
    "compressed.local.decay_momentum",
    "plain.worker.momentum",
]


def arrays(store):
    """The entries as a file would have them."""
    return {name: np.array(value) for name, value in store.items()}


def make_model(optimizer, **arguments):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(7, activation="relu"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(optimizer, "mse", **arguments)
    return model


def train(model, first, last):
    for step in range(first, last):
        rng = np.random.default_rng(step)
        x, y = rng.normal(size=(8, 6)), rng.normal(size=(8, 2))
        model.train_on_batch(x.astype(np.float32), y.astype(np.float32))


def snapshot(model):
    """Weights and all of the optimizer's variables, in order, as bits."""
    # Names hold those of the layers, which Keras counts up.
    state = [(v.shape, v.dtype, bits(v.numpy())) for v in model.optimizer.variables]
    return [bits(w) for w in model.get_weights()], state


@pytest.mark.sample(1)
@pytest.mark.parametrize(("row", "inner"), [*every_run()])
def test_saved_models_and_checkpoints_resume_with_the_same_bits(row, inner, tmp_path):
    # Eagerly, which is quicker; the tests of files below train in graphs.
    model = make_model(make(row, inner), run_eagerly=True)
    train(model, 0, 4)
    check_names(model)
    model.save(tmp_path / "model.keras")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    saved, steps = snapshot(model), int(model.optimizer.iterations)
    train(model, 4, 7)
    uninterrupted = snapshot(model)
    assert saved != uninterrupted

    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.iterations == steps > 0
    assert snapshot(loaded) == saved
    train(loaded, 4, 7)
    assert snapshot(loaded) == uninterrupted
    # What has gone on goes back, as a new model would.
    train(loaded, 20, 21)
    restored = tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer)
    restored.restore(path).assert_existing_objects_matched()
    assert snapshot(loaded) == saved
    train(loaded, 4, 7)
    assert snapshot(loaded) == uninterrupted


def check_names(model):
    """The optimizer's variables are named, once each, and no others."""
    optimizer = model.optimizer
    names = [v.name for v in optimizer.variables]
    own = names[len(optimizer.inner_optimizer.variables) :]
    assert len(own) == len(set(own))
    assert {"seed", "previous_learning_rate", "skipped_steps"} <= set(own)
    assert named(optimizer, "seed") == optimizer.seed
    paths = {v.path for v in optimizer.variables}
    assert not {v.path for v in model.trainable_variables} & paths


def test_weights_files_and_checkpoints_are_restored_in_graphs(tmp_path):
    row = ROWS["DistEFBlockSGDM"]
    model = make_model(make(row))
    train(model, 0, 4)
    for name in STATE:
        assert np.abs(named(model.optimizer, name)).max() > 0, name
    model.save_weights(tmp_path / "run.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    saved = snapshot(model)
    train(model, 4, 7)

    # One that has not trained, and one whose step is traced.
    other = make_model(make(row))
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "run.weights.h5")
    for _ in range(2):
        assert snapshot(other) == saved
        train(other, 4, 7)
        assert snapshot(other) == snapshot(model)
        restored = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
        restored.restore(path).assert_existing_objects_matched()
    # In place.
    checkpoint.restore(path)
    assert snapshot(model) == saved


# What a file has besides rows of state.
ALWAYS = ("place", "fallback", "compressed.server_owned", "compressed.positions")


def test_state_of_two_devices_is_averaged_on_one_device():
    seed = 2**61 + 3
    optimizer = tfgradcomp.DistEFSGD(sgd(), min_size=1, seed=seed)
    optimizer.build(make_variables([(3,)]))
    store = {}
    optimizer.save_own_variables(store)
    assert all(len(v) == 1 for k, v in store.items() if k not in ALWAYS)
    two = {k: np.concatenate([v, v]) for k, v in store.items() if k not in ALWAYS}
    two["compressed.worker.residual"] = np.array([[1, 2, 3], [5, 2, -1]], np.float32)
    again = tfgradcomp.DistEFSGD(sgd(), min_size=1, seed=1)
    again.build(make_variables([(3,)]))
    again.load_own_variables({**two, "place": np.array([0, 1])})
    assert named(again, "seed") == seed
    np.testing.assert_array_equal(named(again, "compressed.worker.residual"), [3, 2, 1])


def test_state_of_another_method_raises(tmp_path):
    model = make_model(make(ROWS["DistEFBlockSGDM"]))
    train(model, 0, 2)
    model.save_weights(tmp_path / "run.weights.h5")
    other = make_model(make(ROWS["DistEFSGD"]))
    other.optimizer.build(other.trainable_variables)
    # The weights alone may be what is wanted; training on would lose the rest.
    other.load_weights(tmp_path / "run.weights.h5")
    with pytest.raises(ValueError, match="not restored as a whole.*no place for comp"):
        train(other, 2, 3)


def test_model_that_never_trained_is_restored(tmp_path):
    model = make_model(make(ROWS["DistEFBlockSGDM"]))
    model.save_weights(tmp_path / "run.weights.h5")
    other = make_model(make(ROWS["DistEFBlockSGDM"]))
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "run.weights.h5")
    train(other, 0, 2)


def test_residuals_of_other_variables_of_the_same_size_raise():
    def make(exclude):
        optimizer = tfgradcomp.DistEFSGD(sgd(), min_size=0, exclude=exclude)
        variables = [keras.Variable(np.ones(5), name=name) for name in "ab"]
        optimizer.build(variables)
        return optimizer, variables

    store = {}
    make("a")[0].save_own_variables(store)
    optimizer, variables = make("b")
    optimizer.load_own_variables(arrays(store))
    with pytest.raises(ValueError, match=r"positions=\[1\] in the file, \[0\] here"):
        optimizer.apply([tf.ones(5), tf.ones(5)], variables)


def test_steps_that_a_saved_run_skipped_are_not_reported_again():
    def make(nonfinite):
        optimizer = tfgradcomp.TernGrad(sgd(), nonfinite=nonfinite)
        variables = make_variables([(3,)])
        optimizer.build(variables)
        return optimizer, variables

    (optimizer, variables), store = make("skip"), {}
    optimizer.apply([tf.constant([np.nan, 0, 0])], variables)
    assert optimizer.skipped_steps == 1
    optimizer.save_own_variables(store)
    again, variables = make("raise")
    again.load_own_variables(arrays(store))
    again.finalize_variable_values(variables)
