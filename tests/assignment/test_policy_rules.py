"""The rules of a policy: what they name, and what is refused."""

import json

import keras
import pytest
import tensorflow as tf

import tfgradcomp
from tests.assignment.test_policy import four_ways, gradients_of, strom, ternary
from tests.engine.test_summary import lines_of, rows_of
from tests.helpers import make_variables
from tests.optimizers.trajectories import SHAPES, sgd
from tfgradcomp.transports import Loopback
from tfgradcomp.transports.all_gather import AllGather

signs = tfgradcomp.SignSGD.for_layers()


def travels_as(optimizer, model=None):
    """By what each variable travels."""
    variables = model.trainable_variables if model else make_variables(SHAPES)
    optimizer.build(variables)
    return {path: row[-1] for path, row in rows_of(lines_of(optimizer)).items()}


def test_the_first_rule_that_names_a_variable_decides():
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(10, 8, name="words")(inputs)
    x = keras.layers.GRU(16, name="gru")(x)
    model = keras.Model(inputs, keras.layers.Dense(5, name="head")(x), name="net")
    everything = tfgradcomp.Strom.for_layers(threshold=0.5, min_size=0)
    optimizer = tfgradcomp.TernGrad(
        sgd(),
        sparse="dense",
        exclude="words",
        min_size=100,
        policy=[
            (lambda v: v.shape == (8, 48), None),
            # One of the whole optimizer, where it has none of its own.
            (["last", keras.layers.Embedding], everything),
            ("kernel", tfgradcomp.QSGD.for_layers()),
            ("*", "float32"),
        ],
    )
    assert travels_as(optimizer, model) == {
        "words/embeddings": "float32: exclude='words'",
        "gru/gru_cell/kernel": "TernGrad",
        "gru/gru_cell/recurrent_kernel": "QSGD",
        "gru/gru_cell/bias": "float32: policy='*'",
        # A method of the policy has a `min_size` of its own.
        "head/kernel": "Strom",
        "head/bias": "Strom",
    }


def test_a_function_says_the_method_of_each_variable():
    methods = {33: strom, 1: "float32", 35: ternary}

    def by_size(variable):
        return methods.get(variable.shape.num_elements())

    optimizer = tfgradcomp.HalfPrecision(sgd(), policy=by_size, min_size=31)
    assert travels_as(optimizer) == {
        "weight_0": "TernGrad",
        "weight_1": "Strom",
        "weight_2": "float32: policy=<function by_size>",
        "weight_3": "float32: smaller than min_size=31",
    }


def test_equal_methods_are_one_vector():
    again = tfgradcomp.Strom.for_layers(threshold=0.5, index_coding="fixed")
    policy = [("weight_0", strom), ("weight_3", again), ("weight_1", "float32")]
    optimizer = tfgradcomp.Strom(sgd(), threshold=0.25, policy=policy)
    optimizer.build(make_variables(SHAPES))
    buckets = {b.vector: b.positions for b in optimizer.stepper.buckets}
    assert buckets == {"compressed": [2], "plain": [1], "policy_0": [0, 3]}


def test_a_rule_that_names_nothing_is_a_warning():
    optimizer = tfgradcomp.TernGrad(sgd(), policy=[("*/embedings", strom)])
    with pytest.warns(UserWarning, match=r"weight_0.*Received: rule='\*/embedings'"):
        optimizer.build(make_variables(SHAPES))


def test_what_travels_is_the_sum_over_the_methods():
    def worker(rank, collectives):
        optimizer = four_ways(
            policy=[("weight_3", ternary), ("weight_1", "float32")],
            transport=AllGather(collectives),
        )
        optimizer.build(make_variables(SHAPES))
        return optimizer.traffic

    for traffic in Loopback(2, timeout=60).run(worker):
        # A flag, scales, and a bit each of 35 and of 1: each in a word of its own, or
        # in two. A flag, 20 digits a word, and the round of the scale.
        own, of_policy = 1 + 2 + 2, (1 + 2) + 1
        plain = 33 + 2 * 3
        assert traffic.words_sent == own + of_policy + plain
        assert (traffic.elements_compressed, traffic.elements_plain) == (66, 33)


# What cannot be right.


class Momentless(keras.optimizers.SGD):
    """Not SGD by its name."""


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: {"policy": "*/kernel"}, r"takes a list of pairs.*policy='\*/kernel'"),
        (lambda: {"policy": [("*", strom, 1)]}, "takes a list of pairs.*Received: "),
        (lambda: {"policy": [(None, strom)]}, "takes a list of pairs.*Received: "),
        (lambda: {"policy": [(3, strom)]}, "policy takes None, 'last'.*policy=3"),
        (lambda: {"policy": [("*", "float16")]}, "for_layers.*method='float16'"),
        (lambda: {"policy": [("*", tfgradcomp.Strom)]}, "for_layers.*method=<class"),
        (lambda: {"policy": lambda v: "half"}, "for_layers.*Received: method='half'"),
        (
            lambda: {"policy": [("*", strom)], "fallback": "float32"},
            "Expected: fallback=None, and 'float32' in the policy.*Received: fallback",
        ),
        (
            lambda: {"policy": [("*", tfgradcomp.Strom.for_layers(threshold=-1.0))]},
            "threshold",
        ),
        (
            lambda: {"policy": [("weight_1", signs)]},
            "no learning rate suits both.*methods=.*TernGrad.*SignSGD.*Momentless",
        ),
        (
            lambda: {"policy": [("weight_1", tfgradcomp.Signum.for_layers())]},
            "Signum holds the momentum itself.*momentum=0.9",
        ),
        (
            lambda: {"policy": lambda v: tfgradcomp.VarianceBased.for_layers()},
            "must be known before the variables are.*Expected: a list",
        ),
        (
            lambda: {
                "policy": [
                    (f"weight_{i}", tfgradcomp.VarianceBased.for_layers(microbatches=i))
                    for i in (2, 3)
                ]
            },
            r"one `microbatches` in all.*microbatches=\[2, 3\]",
        ),
        (
            lambda: {"policy": [("*", tfgradcomp.Strom.for_layers(transport="auto"))]},
            r"those of the wrapper whose `policy`.*Received: \['transport'\]",
        ),
        (
            lambda: tfgradcomp.CompressedOptimizer.for_layers(seed=1, min_size=3),
            r"those of the wrapper whose `policy`.*Received: \['seed'\]",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(make, sentence):
    with pytest.raises(ValueError, match=f"(?s){sentence}"):
        inner = Momentless(0.1, momentum=0.9)
        tfgradcomp.TernGrad(inner, **make()).build(make_variables(SHAPES))


@pytest.mark.parametrize("arguments", [{}, {"treshold": 1.0, "threshold": 1.0}])
def test_for_layers_takes_what_the_wrapper_takes(arguments):
    wrong = "unexpected keyword argument 'treshold'" if arguments else "'threshold'"
    with pytest.raises(TypeError, match=wrong):
        tfgradcomp.Strom.for_layers(**arguments)


def test_signs_go_with_others_where_each_element_is_rescaled():
    policy = [("weight_1", signs)]
    optimizer = tfgradcomp.TernGrad(keras.optimizers.Adam(), policy=policy, min_size=1)
    assert travels_as(optimizer)["weight_1"] == "SignSGD"


def test_second_moments_are_asked_for_where_one_method_needs_them():
    variance = tfgradcomp.VarianceBased.for_layers(alpha=1.0, microbatches=4)
    optimizer = tfgradcomp.TernGrad(sgd(), policy=[("weight_1", variance)], min_size=1)
    assert optimizer.needs_second_moments
    assert optimizer.microbatches == 4
    variables, gradients = make_variables(SHAPES), gradients_of(0, 0)
    with pytest.raises(ValueError, match="VarianceBased needs second moments"):
        optimizer.apply(gradients, variables)
    # Beyond doubt, and in doubt.
    before = variables[1].numpy()
    moments = [g**2 / 2 for g in gradients]
    moments[1] = tf.where(tf.range(33) < 10, moments[1], 2 * gradients[1] ** 2)
    optimizer.apply(gradients, variables, second_moments=moments)
    moved = variables[1].numpy() != before
    assert moved[:10].any()
    assert not moved[10:].any()


def test_a_policy_comes_back_from_its_configuration():
    policy = [
        (keras.layers.Embedding, strom),
        ("*/kernel", tfgradcomp.Signum.for_layers(momentum=0.5, warmup_steps="auto")),
        (
            "last",
            tfgradcomp.CompressedOptimizer.for_layers(
                compressor=tfgradcomp.compressors.TopK(0.1),
                server=tfgradcomp.servers.Mean(),
                min_size=7,
            ),
        ),
        ("*", "float32"),
    ]
    config = tfgradcomp.TernGrad(sgd(), policy=policy).get_config()
    again = tfgradcomp.TernGrad.from_config(json.loads(json.dumps(config)))
    assert again.get_config() == config
    assert str(again.policy[1:]) == str([[*pair] for pair in policy[1:]])
    assert again.policy[0][0] == "layer:Embedding"
