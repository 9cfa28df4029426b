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
    common = {"reply", "block_size"}
    return [w for w in wrappers if common <= {*getattr(tfgradcomp, w).argument_names}]


def raises(text, error=ValueError):
    """Expects an error whose message has the parts of a text between " ... "."""
    parts = map(re.escape, text.split(" ... "))
    return pytest.raises(error, match="(?s)" + ".*".join(parts))


COMMON = [
    (
        {"transport": "pigeon"},
        "transport must be one of ... auto ... sharded ... pigeon",
    ),
    ({"transport": None}, "transport must be one of ... transport=None"),
    ({"nonfinite": "ignore"}, "nonfinite must be one of ... raise ... skip"),
    ({"min_size": -1}, "min_size must be an integer, at least 0 ... min_size=-1"),
    ({"min_size": 2.5}, "min_size must be an integer ... min_size=2.5"),
    ({"min_size": True}, "min_size must be an integer ... min_size=True"),
    ({"seed": -1}, "seed must be an integer, at least 0 ... seed=-1"),
    ({"seed": 2**63}, f"seed must be at most ... seed={2**63}"),
    ({"learning_rate": 0.5}, "not take ['learning_rate'] ... belong to `inner_optimi"),
    ({"clipnorm": 1.0}, "does not take ['clipnorm'] ... belong to"),
    ({"bogus": 1}, "does not take ['bogus'] ... Received ... 'bogus': 1"),
]


@pytest.mark.sample(13)
@every_wrapper
def test_common_arguments_are_checked(row):
    for arguments, text in COMMON:
        with raises(text):
            row.make(sgd(), **arguments)


OWN = [
    ("SignSGD", {"tie": "up"}, "tie must be one of ... zero ... random ... 'up'"),
    ("Signum", {"tie": 0}, "tie must be one of ... zero ... random"),
    ("SignSGD", {"aggregate": "sum"}, "must be one of ... vote ... mean ... ='sum'"),
    ("Signum", {"aggregate": "max"}, "aggregate must be one of ... vote ... mean"),
    ("SignSGD", {"quorum": -1}, "quorum must be an integer ... quorum=-1"),
    ("Signum", {"aggregate": "mean", "quorum": 2}, "A quorum ... quorum=2"),
    ("Signum", {"abstain_below": -0.5}, "abstain_below must be ... =-0.5"),
    ("Signum", {"momentum": 1.0}, "momentum must be in [0, 1) ... momentum=1.0"),
    ("Signum", {"momentum": -0.1}, "momentum must be in [0, 1) ... =-0.1"),
    ("Signum", {"warmup_steps": -1}, "must be 0, a positive integer or 'auto' ... =-1"),
    ("Signum", {"warmup_steps": "soon"}, "warmup_steps must be ... 'soon'"),
    ("Signum", {"momentum": 1.0, "warmup_steps": "auto"}, "must be in [0, 1)"),
    ("HalfPrecision", {"dtype": "float8"}, "one of ... bfloat16 ... dtype='float8'"),
    ("HalfPrecision", {"dtype": "float32"}, "dtype must be one of"),
    (
        "DistEFSGD",
        {"compressor": "zip"},
        "must be ... bingrad ... orq ... top_k ... zip",
    ),
    ("DistEFSGD", {"compressor": 3}, "compressor must be ... compressor=3"),
    ("DistEFSGD", {"block_size": 0}, "block_size must be ... block_size=0"),
    ("DistEFSGD", {"weight_decay": -0.1}, "weight_decay must be ... =-0.1"),
    ("DistEFBlockSGD", {"block_size": 0}, "block_size must be ... block_size=0"),
    ("DistEFBlockSGD", {"weight_decay": -1}, "weight_decay must be ... =-1"),
    ("DistEFBlockSGDM", {"block_size": 1.5}, "block_size must be ... =1.5"),
    ("DistEFBlockSGDM", {"weight_decay": -1}, "weight_decay must be ... =-1"),
    ("DistEFBlockSGDM", {"momentum": 1.0}, "momentum must be in [0, 1) ... =1.0"),
    ("DGC", {"ratio": 0.0}, "ratio must be in (0, 1] ... ratio=0.0"),
    ("DGC", {"momentum": 1.0}, "momentum must be in [0, 1) ... momentum=1.0"),
    ("DGC", {"clip_norm": 0}, "clip_norm must be positive ... clip_norm=0"),
    ("DGC", {"density_steps": -1}, "density_steps must be an integer ... =-1"),
    ("OneBitSGD", {"reply": "shared"}, "reply must be one of ... reply='shared'"),
    ("RandomK", {"ratio": 1.5}, "ratio must be in (0, 1] ... ratio=1.5"),
    ("RandomK", {"error_feedback": 2}, "error_feedback must be ... =2"),
    ("TernGrad", {"clip_factor": -2.5}, "clip_factor must be positive ... =-2.5"),
    ("TernGrad", {"clip_factor": float("nan")}, "must be positive ... nan"),
    ("TernGrad", {"block_size": "x"}, "block_size must be ... block_size='x'"),
    *[
        ("ORQ", {"levels": levels}, f"a power of two plus 1 ... levels={levels}")
        for levels in (2, 7, 513, 9.0, True)
    ],
    ("ORQ", {"refine": -1}, "refine must be a number of sweeps ... refine=-1"),
    ("ORQ", {"refine": 0.5}, "refine must be ... refine=0.5"),
    ("ORQ", {"clip_factor": 0}, "clip_factor must be positive ... =0"),
    ("ORQ", {"table_dtype": "int8"}, "must be one of ... bfloat16 ... ='int8'"),
    ("ORQ", {"reply": "shared"}, "reply must be one of ... reply='shared'"),
    ("BinGrad", {"variant": "c"}, "variant must be one of ... b ... pb ... ='c'"),
    ("BinGrad", {"table_dtype": 2}, "table_dtype must be one of ... =2"),
    ("QSGD", {"levels": 4}, "an odd integer, at least 3 ... levels=4"),
    ("QSGD", {"levels": 1}, "an odd integer, at least 3 ... levels=1"),
    ("QSGD", {"levels": 259}, "at most 257 ... levels=259"),
    ("QSGD", {"norm": "l1"}, "norm must be one of ... max ... l2 ... norm='l1'"),
    (
        "QSGD",
        {"reply": "shared", "error_feedback": True},
        "are added up ... Take reply='requantize' ... reply='shared'",
    ),
    ("LinearQuantization", {"levels": 1}, "at least 2 ... levels=1"),
    ("LinearQuantization", {"levels": 300}, "at most 257 ... levels=300"),
    *[
        (name, {argument: value}, f"{argument} must be {text} ... {argument}={value!r}")
        for name in quantizers()
        for argument, value, text in (
            ("block_size", 0, "an integer"),
            ("block_size", "model", "an integer"),
            ("reply", "float16", "one of"),
            ("error_feedback", "yes", "one of"),
        )
    ],
]


@pytest.mark.parametrize(("wrapper", "arguments", "text"), OWN, ids=str)
def test_own_arguments_are_checked(wrapper, arguments, text):
    with raises(text):
        getattr(tfgradcomp, wrapper)(sgd(), **arguments)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: TopK(0.0), "ratio must be in (0, 1] ... ratio=0.0"),
        (lambda: TopK(2), "ratio must be in (0, 1] ... ratio=2"),
        (lambda: Clip(Identity(), 0.0), "clip_factor must be positive"),
        (lambda: Momentum(Sign(), 1.0), "momentum must be in [0, 1)"),
        (lambda: Identity("int8"), "dtype must be one of ... float16 ... 'int8'"),
        (
            lambda: tfgradcomp.CompressedOptimizer(sgd(), "sign", MajorityVote()),
            "compressor must be a Compressor ... compressor='sign'",
        ),
        (
            lambda: tfgradcomp.CompressedOptimizer(sgd(), Sign(), "vote"),
            "server must be a Server ... server='vote'",
        ),
    ],
)
def test_arguments_of_components_are_checked(make, text):
    with raises(text):
        make()


@every_wrapper
def test_unsuitable_inner_optimizers_raise(row):
    with raises("cannot wrap another one ... inner_optimizer=SignSGD"):
        row.make(tfgradcomp.SignSGD(sgd()))
    with raises("LossScaleOptimizer belongs outside ... inner_optimizer=LossScale"):
        row.make(keras.optimizers.LossScaleOptimizer(sgd()))
    with raises("sgdd"):
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
def test_second_momentum_raises_unless_allowed(row, inner, text):
    with raises(f"holds the momentum itself ... allow_inner_momentum=True ... {text}"):
        row.make(inner())
    row.make(inner(), allow_inner_momentum=True)
    row.make(sgd())


@rows(
    lambda row: "all_reduce" not in row.transports and "sharded" in row.transports,
    by=lambda row: row.wrapper,
)
def test_all_reduce_of_codes_that_do_not_add_up_raises(row):
    optimizer = row.make(sgd(), transport="all_reduce", min_size=1)
    choices = "Use 'auto' or one of ['all_gather', 'sharded']"
    why = "payloads that can be added: numbers, or codes of shared levels"
    with raises(f"transport='all_reduce' ... {why} ... {choices} ... compressor="):
        optimizer.build(make_variables([(3,)]))


@rows(lambda row: "sharded" not in row.transports, by=lambda row: row.wrapper)
def test_sharded_method_of_the_whole_vector_raises(row):
    optimizer = row.make(sgd(), transport="sharded", min_size=1)
    choices = f"Use 'auto' or one of {[*row.transports]}"
    with raises(f"transport='sharded' ... {choices}"):
        optimizer.build(make_variables([(3,)]))


@pytest.mark.parametrize("exclude", [3, ["last", 3.5], [None, b"bias"]])
def test_unknown_kinds_of_rules_raise(exclude):
    with raises("exclude takes None, 'last', 'norms ... Received: exclude="):
        tfgradcomp.SignSGD(sgd(), exclude=exclude)


@pytest.mark.parametrize("dtype", ["complex64", "int32"])
def test_gradients_that_are_no_floats_raise(dtype):
    variables = make_variables([(3,), (4,)])
    optimizer = tfgradcomp.SignSGD(sgd())
    gradients = [tf.zeros([3]), tf.zeros([4], dtype)]
    with raises(f"dtype={dtype} ... {variables[1].path}", TypeError):
        optimizer.apply(gradients, variables)


@every_wrapper
def test_stateless_step_raises(row):
    optimizer = row.make(sgd())
    variables = make_variables([(3,)])
    optimizer.build(variables)
    with raises("`stateless_apply` is not ... apply(gradients, variables)"):
        optimizer.stateless_apply([], [np.zeros(3)], variables)


def test_step_outside_of_a_replica_raises():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        optimizer = tfgradcomp.SignSGD(sgd())
        with raises("replica context ... strategy.run"):
            optimizer.apply([np.zeros(3)], make_variables([(3,)]))


def test_second_error_feedback_raises():
    # The server compresses with the same rule and has no place for a second residual.
    with raises("stateless compressor ... Received: compressor=ErrorFeedback("):
        tfgradcomp.DistEFSGD(sgd(), ErrorFeedback(TopK()))


def test_components_are_equal_by_their_arguments():
    assert Clip(Sign(), 2.0) == Clip(Sign(), 2.0) != Clip(Sign(), 2.5)
    assert Mean(Identity()) == Mean()
