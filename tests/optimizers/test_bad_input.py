"""Errors say what came, what was expected and how to mend it."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import make_variables
from tests.methods import ROWS
from tests.selection import rows
from tfgradcomp.compressors import Clip, ErrorFeedback, Identity, Momentum, Sign, TopK
from tfgradcomp.servers import MajorityVote, Mean

every_wrapper = rows(by=lambda row: row.wrapper)


def sgd(**arguments):
    return keras.optimizers.SGD(0.1, **arguments)


def quantizers():
    wrappers = dict.fromkeys(row.wrapper for row in ROWS.values())
    return [w for w in wrappers if "reply" in getattr(tfgradcomp, w).argument_names]


def refused(*texts, error=ValueError):
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, texts)))


COMMON = [
    (
        {"transport": "carrier_pigeon"},
        ["transport must be one of", "auto", "all_gather", "all_reduce", "pigeon"],
    ),
    ({"transport": None}, ["transport must be one of", "transport=None"]),
    ({"nonfinite": "ignore"}, ["nonfinite must be one of", "raise", "skip"]),
    ({"min_size": -1}, ["min_size must be an integer, at least 0", "min_size=-1"]),
    ({"min_size": 2.5}, ["min_size must be an integer", "min_size=2.5"]),
    ({"min_size": True}, ["min_size must be an integer", "min_size=True"]),
    ({"seed": -1}, ["seed must be an integer, at least 0", "seed=-1"]),
    ({"seed": 2**63}, ["seed must be below", f"seed={2**63}"]),
    ({"seed": "7"}, ["seed must be an integer", "seed='7'"]),
    (
        {"learning_rate": 0.5},
        ["does not take ['learning_rate']", "belong to `inner_optimizer`"],
    ),
    ({"clipnorm": 1.0}, ["does not take ['clipnorm']", "belong to"]),
    ({"bogus": 1}, ["does not take ['bogus']", "Received", "'bogus': 1"]),
]


@every_wrapper
def test_arguments_of_all_wrappers(row):
    for arguments, texts in COMMON:
        with refused(*texts):
            row.make(sgd(), **arguments)


@pytest.mark.parametrize(
    ("wrapper", "arguments", "texts"),
    [
        ("SignSGD", {"tie": "up"}, ["tie must be one of", "zero", "random", "'up'"]),
        ("Signum", {"tie": 0}, ["tie must be one of", "zero", "random"]),
        (
            "SignSGD",
            {"aggregate": "sum"},
            ["aggregate must be one of", "vote", "mean", "aggregate='sum'"],
        ),
        ("Signum", {"aggregate": "max"}, ["aggregate must be one of", "vote", "mean"]),
        ("SignSGD", {"quorum": -1}, ["quorum must be an integer", "quorum=-1"]),
        ("Signum", {"aggregate": "mean", "quorum": 2}, ["A quorum", "quorum=2"]),
        ("Signum", {"abstain_below": -0.5}, ["abstain_below must be", "=-0.5"]),
        (
            "HalfPrecision",
            {"dtype": "float8"},
            ["dtype must be one of", "bfloat16", "float16", "dtype='float8'"],
        ),
        ("HalfPrecision", {"dtype": "float32"}, ["dtype must be one of"]),
        (
            "DistEFSGD",
            {"compressor": "zip"},
            [
                "compressor must be",
                "bingrad",
                "identity",
                "linear",
                "orq",
                "qsgd",
                "scaled_sign",
                "ternary",
                "top_k",
                "zip",
            ],
        ),
        ("DistEFSGD", {"compressor": 3}, ["compressor must be", "compressor=3"]),
        ("TernGrad", {"clip_factor": 0}, ["clip_factor must be positive", "=0"]),
        ("TernGrad", {"clip_factor": -2.5}, ["clip_factor must be positive", "=-2.5"]),
        (
            "TernGrad",
            {"clip_factor": float("nan")},
            ["clip_factor must be positive", "nan"],
        ),
        ("TernGrad", {"block_size": 0}, ["block_size must be", "block_size=0"]),
        ("TernGrad", {"block_size": "x"}, ["block_size must be", "block_size='x'"]),
        ("DistEFBlockSGD", {"block_size": 0}, ["block_size must be", "block_size=0"]),
        ("DistEFBlockSGDM", {"block_size": 1.5}, ["block_size must be", "=1.5"]),
        ("Signum", {"momentum": 1.0}, ["momentum must be in [0, 1)", "momentum=1.0"]),
        ("Signum", {"momentum": -0.1}, ["momentum must be in [0, 1)", "=-0.1"]),
        ("DistEFBlockSGDM", {"momentum": 1.0}, ["momentum must be in [0, 1)", "=1.0"]),
        (
            "Signum",
            {"momentum": 1.0, "warmup_steps": "auto"},
            ["momentum must be in [0, 1)"],
        ),
        (
            "Signum",
            {"warmup_steps": -1},
            ["warmup_steps must be 0, a positive integer or 'auto'", "=-1"],
        ),
        ("Signum", {"warmup_steps": "soon"}, ["warmup_steps must be", "'soon'"]),
        ("Signum", {"warmup_steps": 1.5}, ["warmup_steps must be", "=1.5"]),
        *[
            ("ORQ", {"levels": levels}, ["a power of two plus 1", f"levels={levels}"])
            for levels in (2, 4, 7, 513, 9.0, True, None)
        ],
        ("ORQ", {"refine": -1}, ["refine must be a number of sweeps", "refine=-1"]),
        ("ORQ", {"refine": 0.5}, ["refine must be", "refine=0.5"]),
        ("ORQ", {"clip_factor": 0}, ["clip_factor must be positive", "=0"]),
        (
            "ORQ",
            {"table_dtype": "int8"},
            ["table_dtype must be one of", "bfloat16", "table_dtype='int8'"],
        ),
        (
            "BinGrad",
            {"variant": "c"},
            ["variant must be one of", "b", "pb", "variant='c'"],
        ),
        ("BinGrad", {"table_dtype": 2}, ["table_dtype must be one of", "=2"]),
        ("QSGD", {"levels": 4}, ["an odd integer, at least 3", "levels=4"]),
        ("QSGD", {"levels": 1}, ["an odd integer, at least 3", "levels=1"]),
        ("QSGD", {"levels": 259}, ["at most 257", "levels=259"]),
        ("QSGD", {"norm": "l1"}, ["norm must be one of", "max", "l2", "norm='l1'"]),
        (
            "QSGD",
            {"reply": "shared", "error_feedback": True},
            ["are added up", "Take reply='requantize'", "reply='shared'"],
        ),
        ("ORQ", {"reply": "shared"}, ["reply must be one of", "reply='shared'"]),
        ("LinearQuantization", {"levels": 1}, ["at least 2", "levels=1"]),
        ("LinearQuantization", {"levels": 300}, ["at most 257", "levels=300"]),
        *[
            (name, {argument: value}, [text, f"{argument}={value!r}"])
            for name in quantizers()
            for argument, value, text in (
                ("block_size", 0, "block_size must be an integer"),
                ("block_size", "model", "block_size must be an integer"),
                ("reply", "float16", "reply must be one of"),
                ("error_feedback", "yes", "error_feedback must be one of"),
            )
        ],
        ("DistEFSGD", {"block_size": 0}, ["block_size must be", "block_size=0"]),
        ("DistEFSGD", {"weight_decay": -0.1}, ["weight_decay must be", "=-0.1"]),
        ("DistEFBlockSGD", {"weight_decay": -1}, ["weight_decay must be", "=-1"]),
        ("DistEFBlockSGDM", {"weight_decay": -1}, ["weight_decay must be", "=-1"]),
    ],
    ids=str,
)
def test_arguments_of_one_wrapper(wrapper, arguments, texts):
    with refused(*texts):
        getattr(tfgradcomp, wrapper)(sgd(), **arguments)


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda: TopK(0.0), ["ratio must be in (0, 1]", "ratio=0.0"]),
        (lambda: TopK(2), ["ratio must be in (0, 1]", "ratio=2"]),
        (lambda: Clip(Identity(), 0.0), ["clip_factor must be positive"]),
        (lambda: Momentum(Sign(), 1.0), ["momentum must be in [0, 1)"]),
        (lambda: Identity("int8"), ["dtype must be one of", "float16", "'int8'"]),
        (
            lambda: tfgradcomp.CompressedOptimizer(sgd(), "sign", MajorityVote()),
            ["compressor must be a Compressor", "compressor='sign'"],
        ),
        (
            lambda: tfgradcomp.CompressedOptimizer(sgd(), Sign(), "vote"),
            ["server must be a Server", "server='vote'"],
        ),
    ],
)
def test_arguments_of_components(make, texts):
    with refused(*texts):
        make()


@every_wrapper
def test_a_wrapper_in_a_wrapper_is_refused(row):
    with refused("cannot wrap another one", "inner_optimizer=SignSGD"):
        row.make(tfgradcomp.SignSGD(sgd()))


@every_wrapper
def test_a_loss_scale_belongs_outside(row):
    with refused("LossScaleOptimizer belongs outside", "inner_optimizer=LossScale"):
        row.make(keras.optimizers.LossScaleOptimizer(sgd()))


@every_wrapper
def test_an_unknown_inner_optimizer_is_refused(row):
    with pytest.raises(ValueError, match="sgdd"):
        row.make("sgdd")


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        (lambda: sgd(momentum=0.9), "SGD(momentum=0.9)"),
        (lambda: keras.optimizers.Adam(), "Adam(beta_1=0.9)"),
        (lambda: keras.optimizers.RMSprop(momentum=0.5), "RMSprop(momentum=0.5)"),
        (lambda: keras.optimizers.Lion(), "Lion(beta_1=0.9)"),
    ],
    ids=["sgd", "adam", "rmsprop", "lion"],
)
@rows(lambda row: row.holds_momentum, by=lambda row: row.wrapper)
def test_momentum_twice_is_refused_unless_wanted(row, inner, text):
    with refused("holds the momentum itself", "allow_inner_momentum=True", text):
        row.make(inner())
    row.make(inner(), allow_inner_momentum=True)
    row.make(sgd())


@rows(lambda row: not row.holds_momentum, by=lambda row: row.wrapper)
def test_methods_without_momentum_take_an_inner_one(row):
    for inner in (sgd(momentum=0.9), keras.optimizers.Adam()):
        row.make(inner)


@rows(
    lambda row: "all_reduce" not in row.transports and "sharded" in row.transports,
    by=lambda row: row.wrapper,
)
def test_what_cannot_be_added_up_is_not_all_reduced(row):
    optimizer = row.make(sgd(), transport="all_reduce", min_size=1)
    choices = "Use 'auto' or one of ['all_gather', 'sharded']"
    why = "what can be added up: numbers, or codes of levels that all workers share"
    with refused("transport='all_reduce'", why, choices, "compressor="):
        optimizer.build(make_variables([(3,)]))


@rows(lambda row: "sharded" not in row.transports, by=lambda row: row.wrapper)
def test_what_needs_the_whole_vector_is_not_sharded(row):
    optimizer = row.make(sgd(), transport="sharded", min_size=1)
    with refused("transport='sharded'", "Use 'auto' or one of ['all_gather']"):
        optimizer.build(make_variables([(3,)]))


@pytest.mark.parametrize("exclude", [3, ["last", 3.5], [None, b"bias"]])
def test_rules_of_no_known_kind_are_refused(exclude):
    with refused("exclude takes None, 'last', 'norms", "Received: exclude="):
        tfgradcomp.SignSGD(sgd(), exclude=exclude)


@pytest.mark.parametrize("dtype", ["complex64", "int32"])
def test_gradients_must_be_floats(dtype):
    variables = make_variables([(3,), (4,)])
    optimizer = tfgradcomp.SignSGD(sgd())
    gradients = [tf.zeros([3]), tf.zeros([4], dtype)]
    with refused(f"dtype={dtype}", variables[1].path, error=TypeError):
        optimizer.apply(gradients, variables)


@every_wrapper
def test_there_is_no_stateless_step(row):
    optimizer = row.make(sgd())
    variables = make_variables([(3,)])
    optimizer.build(variables)
    with refused("`stateless_apply` is not", "apply(gradients, variables)"):
        optimizer.stateless_apply([], [np.zeros(3)], variables)


def test_steps_are_taken_in_a_replica():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        optimizer = tfgradcomp.SignSGD(sgd())
        with refused("replica context", "strategy.run"):
            optimizer.apply([np.zeros(3)], make_variables([(3,)]))


def test_error_feedback_twice_is_refused():
    # The server compresses with the same rule and has no place for a second residual.
    with refused("stateless compressor", "Received: compressor=ErrorFeedback("):
        tfgradcomp.DistEFSGD(sgd(), ErrorFeedback(TopK()))


def test_components_are_equal_by_their_arguments():
    assert Clip(Sign(), 2.0) == Clip(Sign(), 2.0) != Clip(Sign(), 2.5)
    assert Mean(Identity()) == Mean()


def test_variable_that_the_optimizer_was_not_built_with_raises():
    # A layer that is no longer frozen, and the optimizer of before.
    first, second = make_variables([(40,), (30,)])
    optimizer = tfgradcomp.TernGrad(sgd())
    optimizer.build([first])
    with refused("Unknown variable", "built with", "recreate a new optimizer"):
        optimizer.apply([tf.zeros([40]), tf.zeros([30])], [first, second])
