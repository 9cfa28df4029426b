"""Methods and transports keep their contracts; toys that break one are caught."""

import os
import re
from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf

from tests.methods import ROWS
from tests.selection import select
from tfgradcomp import methods, ops, testing
from tfgradcomp.compressors import Compressed, Identity, Ternary
from tfgradcomp.core import Field, SplitVector
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean
from tfgradcomp.testing import ContractError, check_method, check_transport
from tfgradcomp.transports import AllGather, AllReduce, ExchangeResult, Sharded
from tfgradcomp.transports.all_gather import AllGatherRoute
from tfgradcomp.transports.auto import BY_NAME

FIRST = select(by=lambda row: row.classes)


# Other arguments of the same classes are slow.
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=[] if row in FIRST else [pytest.mark.slow])
        for name, row in ROWS.items()
    ],
)
def test_every_method_keeps_its_contracts(row):
    check_method(row.method, largest=row.largest)


@pytest.mark.sample(1)
@pytest.mark.parametrize("transport", BY_NAME.values())
def test_every_transport_keeps_its_contracts(transport):
    check_transport(transport)


# The other rows keep stronger promises: `tests/compressors/test_promises.py`.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "promises"),
    [
        ("QSGD", "unbiased"),
        ("TernGrad", "unbiased"),
        ("ScaledSign", "contracting"),
        ("CompressedOptimizer, top-k", "contracting"),
    ],
)
def test_promises_are_checked_against_the_target(name, promises):
    row = ROWS[name]

    def target(x, layout):
        return row.target(x, layout.row_splits)

    check_method(row.method, promises, target)


# Each toy breaks one contract, and is sound otherwise.


class Toy(Identity):
    """Sends the vector as it is."""

    def sent(self, x):
        return tf.convert_to_tensor(x)

    def compress(self, x, state, layout, context):
        return Compressed({"values": self.sent(x)}, state)


class Longer(Toy):
    def sent(self, x):
        return tf.concat([x, [0.0]], 0)


class DirtyWords(Toy):
    def fields(self, layout):
        return {"codes": Field(layout.size, base=2, per="element")}

    def compress(self, x, state, layout, context):
        # The bits after the last element are 0 in a word.
        return Compressed({"codes": tf.fill([-(-layout.size // 32)], -1)}, state)

    def decompress(self, payload, layout):
        return tf.cast(ops.unpack_codes(payload["codes"], 2, layout.size), tf.float32)


class VaryingFirst(Toy):
    def fields(self, layout):
        words = Field(layout.size, dtype="int32", variable_length=True)
        return {"words": words, **super().fields(layout)}

    def compress(self, x, state, layout, context):
        return Compressed(
            {"words": tf.zeros([1], tf.int32), "values": self.sent(x)}, ()
        )


class ShortVector(Toy):
    def decompress(self, payload, layout):
        return payload["values"][1:]


class Doubles(Toy):
    def decompress(self, payload, layout):
        return tf.cast(payload["values"], tf.float64)


class Round(Toy):
    def max_reduced_fields(self, layout):
        return {"scale": Field(layout.num_blocks, per="block")}

    def prepare(self, x, state, layout, context):
        return {"scale": 1.0 + tf.zeros([layout.num_blocks])}

    def compress(self, x, state, layout, context):
        # Without a round, no scale.
        scale = context.prepared["scale"][0] if context.prepared else 0.0
        return Compressed({"values": scale * tf.convert_to_tensor(x)}, state)


class OwnCoins(Toy):
    coins = np.random.default_rng(0)

    def sent(self, x):
        return tf.convert_to_tensor(x) * self.coins.integers(1, 3)


class FirstPart(Toy):
    def sent(self, x):
        x = [*x][0] if isinstance(x, SplitVector) else x
        return tf.reduce_sum(x) + tf.zeros_like(x) if x.shape == [1] else x

    def compress(self, x, state, layout, context):
        values = tf.convert_to_tensor(x)
        if isinstance(x, SplitVector):
            values += 1.0
        return Compressed({"values": values}, state)


class Fused(Toy):
    def fused(self):
        return Halved()


class Halved(Toy):
    def sent(self, x):
        return 0.5 * tf.convert_to_tensor(x)


class OtherOperations(Toy):
    def sent(self, x):
        is_python = os.environ.get("TFGRADCOMP_OPS") == "python"
        return tf.convert_to_tensor(x) * (1 + is_python)


class WrongParts(Toy):
    def decompress(self, payload, layout):
        values = payload["values"]
        if not layout.sizes or layout.size == 1:
            return values
        return SplitVector([values[:1], values[1:]])


class Normalized(Toy):
    def sent(self, x):
        x = tf.convert_to_tensor(x)
        return x / tf.reduce_max(tf.abs(x))


class Growing(Toy):
    def sent(self, x):
        return 1000.0 * tf.convert_to_tensor(x)


class Careless(Toy):
    def compress(self, x, state, layout, context):
        return (
            super()
            .compress(x, state, layout, context)
            ._replace(is_finite=tf.constant(True))
        )


class Eager(Toy):
    def sent(self, x):
        return tf.constant(np.asarray(x).copy())


@dataclass(frozen=True)
class Forgetful(Toy):
    ratio: float = 1.0

    def get_config(self):
        return {}


class Biased(Toy):
    def sent(self, x):
        return 1.05 * tf.convert_to_tensor(x)


class Expanding(Toy):
    def sent(self, x):
        return -0.1 * tf.convert_to_tensor(x)


class DirtyReply(Mean):
    def reply_fields(self, layout, num_workers):
        return {"codes": Field(layout.size, base=2, per="element")}

    def combine(self, payloads, state, layout, context):
        return {"codes": tf.fill([-(-layout.size // 32)], -1)}, state

    def decompress(self, reply, layout, num_workers):
        return tf.zeros([layout.size])


class Undefined(Mean):
    def decompress(self, reply, layout, num_workers):
        return reply["values"] / 0.0


class OtherUpdate(Mean):
    def update(self, payloads, state, layout, context):
        update, state = super().update(payloads, state, layout, context)
        return 2.0 * update, state


class FusedServer(Mean):
    def fused(self):
        return Doubled()


class Doubled(Mean):
    def combine(self, payloads, state, layout, context):
        reply, state = super().combine(payloads, state, layout, context)
        return {"values": 2.0 * reply["values"]}, state


class Centred(Mean):
    """Needs the whole vector, and says that it can be cut."""

    def combine(self, payloads, state, layout, context):
        reply, state = super().combine(payloads, state, layout, context)
        values = tf.convert_to_tensor(reply["values"])
        return {"values": values - tf.reduce_mean(values)}, state

    def sum_field(self, layout, num_workers):
        return None


class Shifting(Mean):
    """Keeps a state whose elements do not stand for those of the vector."""

    def init(self, layout):
        return {"last": tf.zeros([layout.size])}

    def combine(self, payloads, state, layout, context):
        reply, _ = super().combine(payloads, (), layout, context)
        last = tf.roll(tf.convert_to_tensor(reply["values"]), 1, 0)
        return reply, {"last": last}

    def sum_field(self, layout, num_workers):
        return None


PAYLOADS = "payloads are as declared and survive the wire"
FORMS = "every form gives the same bits"
EXTREMES = "extreme values stay finite"
REPLIES = "replies are as declared and survive the wire"
UPDATES = "updates are decoded replies"
EXCHANGES = "exchanges give the bits of a direct exchange"
BROKEN = [
    (Longer(), PAYLOADS, "values=float32 [2]"),
    (DirtyWords(), PAYLOADS, "the words of 'codes'"),
    (VaryingFirst(), PAYLOADS, "the fields after and before the wire"),
    (ShortVector(), PAYLOADS, "vector=float32 [0]"),
    (Doubles(), PAYLOADS, "vector=float64 [1]"),
    (Round(), "the first round is as declared", "without a round"),
    (OwnCoins(), FORMS, "Received: element 0="),
    (FirstPart(), FORMS, "with split gradients and with flat ones"),
    (Fused(), FORMS, "steps of Halved("),
    (
        OtherOperations(),
        "native operations give the bits of pure tensorflow",
        "native and other steps of OtherOperations(",
    ),
    (WrongParts(), "decoded vectors do not depend on tensor sizes", "sizes=(1, 2)"),
    (Normalized(), EXTREMES, "vector and state of zeros must be finite"),
    (Growing(), EXTREMES, "20 times as large as ones, 1.0. Received: largest=1000.0"),
    (Careless(), "infinities and nan are flagged", "must be False"),
    (Eager(), "steps can be traced", "Error: "),
    (Forgetful("float32", 2.0), "configurations restore the method", "ratio=1.0"),
    (Method(Identity(), DirtyReply()), REPLIES, "the words of 'codes'"),
    (Method(Identity(), Undefined()), REPLIES, "the update must be finite"),
    (Method(Identity(), OtherUpdate()), UPDATES, "`update` and the decoded reply"),
    (Method(Identity(), FusedServer()), UPDATES, "in one pass and link by link"),
    (Method(Identity(), Centred()), EXCHANGES, "the updates by sharded"),
    (Method(Identity(), Shifting()), EXCHANGES, "the server's state that sharded"),
]
"""Parts, or whole methods; the contract; and the numbers that the error shows."""


def broken(contract, *texts):
    texts = [f"Broken contract: {contract}. ", *texts, "\nChecked: method=Method("]
    return pytest.raises(ContractError, match="(?s)" + ".*".join(map(re.escape, texts)))


def method_of(part):
    return part if isinstance(part, Method) else Method(part, Mean(part))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("part", "contract", "text"),
    BROKEN,
    ids=[type(getattr(part, "server", part)).__name__ for part, *_ in BROKEN],
)
def test_a_broken_contract_is_named_and_shown_in_numbers(part, contract, text):
    with broken(contract, text):
        check_method(method_of(part))


@pytest.mark.parametrize(
    ("part", "promises", "contract", "text"),
    [
        (Biased(), "unbiased", "decoded payloads are unbiased", "Received: mean="),
        (
            Ternary(),
            "contracting",
            "payloads keep a part of the gradient",
            "of its squared length",
        ),
        (
            Expanding(),
            "contracting",
            "payloads keep a part of the gradient",
            "Received: lost=1.21 of",
        ),
    ],
)
def test_a_broken_promise_is_named_and_shown_in_numbers(part, promises, contract, text):
    with broken(contract, text):
        check_method(method_of(part), promises)


def test_a_toy_without_a_fault_is_sound():
    check_method(method_of(Toy()), "unbiased")
    check_method(method_of(Halved()), "contracting")


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="method must be a Method"):
        check_method(Toy())
    with pytest.raises(ValueError, match="promises must be one of.*'exact'"):
        check_method(method_of(Toy()), "exact")


class LostFlags(AllGatherRoute):
    def pull(self, pending, state):
        return (
            super()
            .pull(pending, state)
            ._replace(nonfinite_flags=tf.zeros([self.num_workers], tf.int32))
        )


class OtherBits(AllGatherRoute):
    def pull(self, pending, state):
        update, *rest = super().pull(pending, state)
        return ExchangeResult(tf.convert_to_tensor(update) * 1.0000001, *rest)


class UndeclaredCalls(AllGatherRoute):
    def pull(self, pending, state):
        self.collectives.gather(tf.zeros([1]), self.call_site)
        return super().pull(pending, state)


class LostState(AllGatherRoute):
    def to_whole(self, parts):
        return 0 * super().to_whole(parts)


class WrongPart(AllGatherRoute):
    def from_whole(self, whole, rank):
        return super().from_whole(whole, rank) + 1


def transport_of(kind):
    class Broken(AllGather):
        route_class = kind

    return Broken


@pytest.mark.parametrize(
    ("route", "text"),
    [
        (LostFlags, "received and sent flags"),
        (OtherBits, "the updates by Broken and by a direct exchange"),
        (UndeclaredCalls, "the collectives of a step must be"),
        (LostState, "the server's state that Broken saves"),
        (WrongPart, "the server's state that Broken restores"),
    ],
)
def test_a_transport_that_breaks_a_contract_is_caught(route, text):
    with broken(EXCHANGES, text):
        check_transport(transport_of(route), [methods.dist_ef_sgd()])


def test_a_transport_must_refuse_what_it_does_not_support():
    class Careless(AllGather):
        def supports(self, method, layout):
            return False

        def bind(self, method, layout, call_site):
            return AllGatherRoute(self.collectives, method, layout, call_site)

    with broken("unsupported methods are refused", "must raise ValueError"):
        check_transport(Careless)


def test_a_transport_must_carry_something():
    with pytest.raises(ContractError, match="AllReduce must support one of"):
        check_transport(AllReduce, [methods.strom(0.5)])
    check_transport(lambda collectives: Sharded(collectives), [methods.signsgd()])


def test_the_public_names():
    assert testing.__all__ == ["ContractError", "check_method", "check_transport"]
    assert issubclass(ContractError, AssertionError)
