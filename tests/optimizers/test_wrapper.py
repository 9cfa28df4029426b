"""A wrapper answers for its inner optimizer, in all that it has no answer for."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import bits, make_variables, state_of
from tfgradcomp.compressors import Identity, WeightDecay
from tfgradcomp.servers import Mean

# Arguments of Keras' base class and of the optimizer itself, none by default.
ARGUMENTS = {
    "beta_1": 0.25,
    "amsgrad": True,
    "weight_decay": 0.125,
    "clipnorm": 0.5,
    "use_ema": True,
    "ema_momentum": 0.75,
    "ema_overwrite_frequency": 4,
    "loss_scale_factor": 8.0,
    "gradient_accumulation_steps": 3,
    "name": "mine",
}
OTHERS = {"clipvalue": 0.5, "global_clipnorm": 2.0, "epsilon": 0.5}


def identity(inner, **kwargs):
    return tfgradcomp.CompressedOptimizer(
        inner, Identity(), Mean(Identity()), min_size=0, **kwargs
    )


def local_steps(inner):
    return tfgradcomp.LocalSteps(inner, identity(keras.optimizers.SGD(1.0)), every=1)


def step(optimizer, variables):
    rng = np.random.default_rng(int(optimizer.iterations))
    gradients = [tf.constant(rng.normal(size=v.shape), tf.float32) for v in variables]
    return optimizer.apply_gradients(zip(gradients, variables, strict=True))


@pytest.mark.parametrize(
    "make",
    [identity, tfgradcomp.TernGrad, tfgradcomp.Signum, tfgradcomp.DistEFBlockSGD],
)
def test_arguments_of_the_inner_optimizer_are_answered_and_set(make):
    inner = keras.optimizers.Adam(0.5, **ARGUMENTS)
    optimizer = make(inner, allow_inner_momentum=True)
    for name, value in ARGUMENTS.items():
        assert getattr(optimizer, name) == value, name
    for name, value in {**OTHERS, "amsgrad": False, "weight_decay": 0.0625}.items():
        assert getattr(optimizer, name) == getattr(inner, name), name
        setattr(optimizer, name, value)
        assert getattr(inner, name) == getattr(optimizer, name) == value, name
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    # None of it belongs to the wrapper's own configuration.
    config = optimizer.get_config()
    assert config.get("weight_decay") is None
    assert config["inner_optimizer"]["config"]["weight_decay"] == 0.0625


def test_an_argument_of_both_is_the_wrappers_where_it_was_given():
    inner = keras.optimizers.SGD(0.1, momentum=0.25, weight_decay=0.5)
    optimizer = tfgradcomp.DistEFBlockSGDM(
        inner, momentum=0.75, weight_decay=0.125, allow_inner_momentum=True
    )
    assert (optimizer.momentum, optimizer.weight_decay) == (0.75, 0.125)
    for name in ("momentum", "weight_decay"):
        message = rf"fixed when.*or inner_optimizer\.{name}.*Received: {name}=0.5"
        with pytest.raises(AttributeError, match=message):
            setattr(optimizer, name, 0.5)
    assert (inner.momentum, inner.weight_decay) == (0.25, 0.5)


def test_private_attributes_and_unknown_ones():
    optimizer = identity(keras.optimizers.Adam(use_ema=True))
    optimizer.build(make_variables([[64, 32]]))
    inner = optimizer.inner_optimizer
    assert optimizer._model_variables_moving_average is (
        inner._model_variables_moving_average
    )
    with pytest.raises(AttributeError, match="no attribute 'typo'"):
        _ = optimizer.typo
    optimizer.note = "own"
    assert not hasattr(inner, "note")


class Sharp(keras.optimizers.SGD):
    """Has attributes of the names of the wrapper's arguments."""

    def __init__(self):
        super().__init__(0.5)
        self.block_size, self.exclude, self.method, self.built_by = 7, "x", "y", "z"


def test_an_inner_optimizer_with_names_of_the_wrapper_keeps_its_own():
    inner = Sharp()
    optimizer = tfgradcomp.HalfPrecision(inner)
    variables = make_variables([[3, 2]])
    before = variables[0].numpy()
    step(optimizer, variables)
    assert (inner.block_size, inner.exclude, inner.method) == (7, "x", "y")
    assert (optimizer.block_size, optimizer.exclude, optimizer.built_by) == (
        None,
        None,
        "z",
    )
    assert not np.array_equal(variables[0].numpy(), before)


def test_the_name_is_that_of_the_inner_optimizer_unless_given():
    names = []
    for make in (keras.optimizers.get, tfgradcomp.TernGrad):
        keras.backend.clear_session()
        names.append([make("adam").name for _ in range(2)])
    assert names[0] == names[1]
    assert tfgradcomp.TernGrad("adam", name="mine").name == "mine"


def test_a_step_returns_the_counter_and_its_variables_come_first():
    optimizer, variables = identity("adam"), make_variables([[2, 2]])
    counter = step(optimizer, variables)
    assert int(counter) == int(optimizer.iterations) == 1
    inner = optimizer.inner_optimizer.variables
    assert [v is w for v, w in zip(optimizer.variables, inner, strict=False)] == (
        [True] * len(inner)
    )


def test_weights_are_set_as_a_whole():
    def make():
        return tfgradcomp.DistEFBlockSGDM("sgd", weight_decay=0.5, min_size=0)

    variables = make_variables([[4, 3], [5]])
    optimizer = make()
    for _ in range(3):
        step(optimizer, variables)
    weights = [variable.numpy() for variable in optimizer.variables]
    other = make()
    with pytest.raises(
        ValueError, match=r"You are calling `set_weights` before.*(?i:sgd)"
    ):
        other.set_weights(weights)
    other.build(variables)
    other.set_weights(weights)
    assert [value for _, value in state_of(other)] == [bits(w) for w in weights]
    assert len({bits(w) for w in weights}) > 5
    for wrong in (weights[:-1], weights[::-1]):
        with pytest.raises(ValueError, match="in the order of `optimizer.variables`"):
            other.set_weights(wrong)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("by", ["var_names", "var_list"])
def test_what_is_excluded_from_weight_decay_does_not_decay(own, by):
    decay = {"weight_decay": 0.25}
    if own:
        optimizer = tfgradcomp.CompressedOptimizer(
            keras.optimizers.SGD(0.5),
            Identity(),
            Mean(Identity()),
            weight_decay=WeightDecay(0.25),
            min_size=0,
        )
    else:
        optimizer = identity(keras.optimizers.SGD(0.5, **decay))
    first, second, third = variables = make_variables([[2, 3], [4], [3]])
    before = [variable.numpy() for variable in variables]
    chosen = {"var_names": ["weight_1"], "var_list": [second]}[by]
    optimizer.exclude_from_weight_decay(**{by: chosen})
    optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
    factors = (0.875, 1.0, 0.875)
    for variable, value, factor in zip(variables, before, factors, strict=True):
        np.testing.assert_allclose(variable.numpy(), factor * value, rtol=1e-6)


COPIES = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
def test_copies_have_the_same_arguments(again):
    inner = keras.optimizers.Adam(0.5, **ARGUMENTS)
    arguments = {"allow_inner_momentum": True, "exclude": "last", "name": "own"}
    optimizer = tfgradcomp.DistEFSGD(inner, "top_k", 0.5, **arguments)
    other = again(optimizer)
    assert other.get_config() == optimizer.get_config()
    assert other.inner_optimizer is not inner
    assert other.clipnorm == 0.5


@pytest.mark.sample(1)
@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
def test_a_copied_model_goes_on_with_its_state(again):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    arguments = {"min_size": 0, "allow_inner_momentum": True}
    model.compile(tfgradcomp.DistEFBlockSGD("nadam", **arguments), "mse")
    x = np.random.default_rng(0).normal(size=(8, 3))
    model.fit(x, x[:, :1] * np.ones(4), verbose=0)
    other = again(model)
    for one in (model, other):
        one.fit(x, -x[:, :1] * np.ones(4), verbose=0)
    for found, weights in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(found, weights, 1e-4, 1e-7)


def test_state_that_an_unbuilt_copy_cannot_take_is_said():
    optimizer = tfgradcomp.DistEFBlockSGD("sgd", min_size=0)
    step(optimizer, make_variables([[2, 2]]))
    with pytest.warns(UserWarning, match=r"residuals and momenta of \w+ are not"):
        assert not copy.deepcopy(optimizer).built


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_averages_are_swapped_by_keras_callback(is_scaled):
    inner = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    optimizer = identity(inner)
    if is_scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(32, 3))
    swapped = []
    look = keras.callbacks.LambdaCallback(
        on_test_begin=lambda _: swapped.append(model.get_weights()[0])
    )
    callbacks = [keras.callbacks.SwapEMAWeights(), look]
    model.fit(x, x[:, 0], validation_data=(x, x[:, 0]), verbose=0, callbacks=callbacks)
    average = inner._model_variables_moving_average[0].numpy()
    np.testing.assert_array_equal(swapped[0], average)


def test_gradients_must_fit_the_variables():
    optimizer, variables = identity("sgd"), make_variables([[3], [2]])
    gradients = [tf.ones(v.shape) for v in variables]
    optimizer.apply([])
    with pytest.raises(ValueError, match=r"before the optimizer is built.*=None"):
        optimizer.apply(gradients)
    optimizer.apply(gradients, variables)
    optimizer.apply(gradients)
    optimizer.apply([])
    assert int(optimizer.iterations) == 2
    for wrong in (gradients[:1], gradients * 2):
        with pytest.raises(ValueError, match=rf"{len(wrong)} gradients, 2 variables"):
            optimizer.apply(wrong, variables)
    with pytest.raises(ValueError, match="(?s)Unknown variable.*recreate a new opt"):
        optimizer.apply(gradients, make_variables([[3], [2]]))


several_optimizers = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason="Keras had no MultiOptimizer before version 3.15",
)


def several(first, second):
    """A MultiOptimizer, its first one for all variables but biases."""
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(first, {".*bias": second})
    )


@several_optimizers
def test_each_optimizer_of_several_clips_its_own_gradients():
    runs = []
    for wrap in (lambda optimizer: optimizer, identity):
        optimizer = wrap(
            several(
                keras.optimizers.SGD(1.0, global_clipnorm=0.5),
                keras.optimizers.Adagrad(0.5, clipvalue=0.25),
            )
        )
        weights = [
            keras.Variable(np.ones([4]), name=name) for name in ("a", "bias", "b")
        ]
        optimizer.build(weights)
        for _ in range(3):
            step(optimizer, weights)
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            optimizer.apply([tf.ones([4]), tf.ones([4]), None], weights)
        runs.append([weight.numpy() for weight in weights])
    np.testing.assert_allclose(*runs, rtol=1e-6)


@several_optimizers
def test_a_wrapper_goes_around_several_optimizers():
    wrapped = tfgradcomp.TernGrad("sgd")
    sgd = keras.optimizers.SGD()
    message = (
        r"goes around all optimizers.*TernGrad\(MultiOptimizer\(...\)\).*"
        r"Received: optimizers=\['TernGrad', 'SGD'\]"
    )
    with pytest.raises(ValueError, match=message):
        several(sgd, wrapped)
    chosen = keras.optimizers.MultiOptimizer(
        lambda variable: wrapped if variable.ndim > 1 else sgd
    )
    with pytest.raises(ValueError, match=message):
        chosen.build(make_variables([[2, 2], [2]]))


@several_optimizers
@pytest.mark.parametrize(
    ("wrap", "first", "text"),
    [
        (
            tfgradcomp.DistEFBlockSGD,
            keras.optimizers.SGD,
            r"one learning rate.*\['SGD', 'SGD'\], state=\['server.residual', 'worker",
        ),
        (
            tfgradcomp.TernGrad,
            lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
            r"steps of their own.*gradient_accumulation_steps=\[None, 2\]",
        ),
        (
            tfgradcomp.Signum,
            keras.optimizers.Adam,
            r"holds the momentum itself.*Adam\(beta_1=0.9\)",
        ),
    ],
)
def test_what_several_optimizers_cannot_have_is_refused(wrap, first, text):
    with pytest.raises(ValueError, match=text):
        wrap(several(first(), keras.optimizers.SGD())).build(make_variables([[64, 32]]))


def test_a_function_that_takes_the_first_step_is_traced_once():
    optimizer = tfgradcomp.TernGrad(keras.optimizers.Adam(), min_size=1)
    variables, traces = make_variables([(3, 4), (5,)]), []

    @tf.function(autograph=False)
    def step(gradients):
        traces.append(None)
        optimizer.apply(gradients, variables)

    step([tf.ones_like(variable) for variable in variables])
    assert len(traces) == 1


@pytest.mark.parametrize("make", [identity, local_steps])
def test_gradients_of_a_variable_that_is_given_twice_are_added(make):
    v, other = make_variables([(3,), (2,)])
    begin = v.numpy()
    optimizer = make(keras.optimizers.SGD(0.25))
    gradients = [tf.ones(3), tf.ones(2), 2 * tf.ones(3)]
    optimizer.apply(gradients, [v, other, v])
    np.testing.assert_allclose(begin - v.numpy(), 0.75, rtol=1e-6)


def test_a_residual_is_paid_at_negative_rates_too():
    v = keras.Variable(np.zeros(4, "float32"))
    optimizer = tfgradcomp.DistEFSGD(keras.optimizers.SGD(0.1), min_size=0)
    optimizer.apply([tf.constant([3.0, -1.0, 2.0, 0.5])], [v])
    optimizer.learning_rate = -0.1
    for _ in range(100):
        optimizer.apply([tf.zeros(4)], [v])
    np.testing.assert_allclose(v, [-0.3, 0.1, -0.2, -0.05], atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tfgradcomp.ZeroOneAdam("adam", 1),
        lambda: tfgradcomp.LocalSteps("sgd", identity("sgd"), every=4, delay=1),
    ],
)
def test_each_variable_has_a_path_of_its_own(make):
    # `model.save("model.h5")` stores them by their paths.
    optimizer = make()
    optimizer.build(make_variables([(3,), (2,)]))
    paths = [variable.path for variable in optimizer.variables]
    assert len(paths) == len(set(paths))
