"""A method that returns other tensors than it declares fails when it is traced."""

import re
from dataclasses import dataclass

import keras
import pytest
import tensorflow as tf

import tfgradcomp
from tests.helpers import make_context, make_variables
from tfgradcomp.collectives import Loopback
from tfgradcomp.compressors import Compressed, ErrorFeedback, Identity, Momentum
from tfgradcomp.compressors.weight_decay import WeightDecay
from tfgradcomp.core import Layout
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean, Recompress
from tfgradcomp.transports import DirectExchange
from tfgradcomp.transports.auto import BY_NAME

LAYOUT = Layout.from_sizes([4, 6])


@dataclass(frozen=True)
class Payload(Identity):
    """Sends the vector as it is, and then makes a fault."""

    fault: str = ""

    def fields(self, layout):
        fields = super().fields(layout)
        if self.fault == "undeclared codes":
            fields["values"] = fields["values"]._replace(base=3)
        return fields

    def compress(self, x, state, layout, context):
        x = tf.convert_to_tensor(x)
        values = {
            "longer": tf.concat([x, x[:1]], 0),
            "half": tf.cast(x, tf.float16),
            "matrix": x[:, tf.newaxis],
            "unknown": tf.boolean_mask(x, x < 1e9),
        }.get(self.fault, x)
        payload = {"valuse" if self.fault == "misnamed" else "values": values}
        if self.fault == "one more":
            payload["scale"] = x[:1]
        return Compressed(payload, state)


@dataclass(frozen=True)
class FirstRound(Identity):
    """Agrees on a maximum first, and makes a fault there."""

    fault: str = ""

    def max_reduced_fields(self, layout):
        return {"scale": tfgradcomp.core.Field(layout.num_blocks, per="block")}

    def prepare(self, x, state, layout, context):
        scale = tf.ones([layout.num_blocks + (self.fault == "longer")])
        if self.fault == "half":
            scale = tf.cast(scale, tf.float16)
        return {"top" if self.fault == "misnamed" else "scale": scale}


@dataclass(frozen=True)
class FirstMean(FirstRound):
    """Agrees on a mean first, and makes the same faults."""

    def max_reduced_fields(self, layout):
        return {}

    def mean_reduced_fields(self, layout):
        return super().max_reduced_fields(layout)


@dataclass(frozen=True)
class Hearing(Identity):
    """Keeps a number a tensor, and makes a fault when the reply has come."""

    hears_reply = needs_whole_tensors = True

    fault: str = ""

    def init(self, layout):
        per_tensor = 1 if self.fault != "long" else layout.num_blocks
        return {"count": tf.zeros([per_tensor * len(layout.shapes)])}

    def received(self, state, update, layout, context):
        return {"count": update} if self.fault == "grows" else state


@dataclass(frozen=True)
class Stateful(Identity):
    """Keeps a state, and makes a fault there."""

    fault: str = ""

    def init(self, layout):
        return {
            "short": {"count": tf.zeros([layout.size - 1])},
            "scalar": {"count": 0.0},
            "int": {"count": tf.zeros([layout.size], tf.int32)},
        }.get(self.fault, {"count": tf.zeros([layout.size])})

    def compress(self, x, state, layout, context):
        state = {
            "grows": {"count": tf.concat([state["count"], [1.0]], 0)},
            "half": {"count": tf.cast(state["count"], tf.float16)},
            "misnamed": {"total": state["count"]},
            "lost": (),
        }.get(self.fault, state)
        return super().compress(x, state, layout, context)


@dataclass(frozen=True)
class Reply(Mean):
    """Replies the mean, and makes a fault."""

    fault: str = ""

    def init(self, layout):
        size = layout.size + (self.fault == "long state")
        return {"count": tf.zeros([size])} if "state" in self.fault else ()

    def combine(self, payloads, state, layout, context):
        reply, _ = super().combine(payloads, state, layout, context)
        values = reply["values"]
        if self.fault == "longer":
            values = tf.concat([values, values[:1]], 0)
        elif self.fault == "half":
            values = tf.cast(values, tf.float16)
        elif self.fault == "new state":
            state = {"count": state["count"][:-1]}
        return {"valuse" if self.fault == "misnamed" else "values": values}, state

    def decompress(self, reply, layout, num_workers):
        return tf.concat(list(reply.values()), 0)[
            : layout.size - ("short" in self.fault)
        ]


@dataclass(frozen=True)
class Decay(WeightDecay):
    """Decays with a momentum, and makes a fault."""

    fault: str = ""

    def init(self, layout):
        return {"sum": tf.zeros([layout.size + (self.fault == "long")])}

    def term(self, weights, state):
        state = {"sum": state["sum"][1:]} if self.fault == "shrinks" else state
        return self.rate * weights, state


FAULTS = [
    (
        Payload("float32", "longer"),
        "`compress` must return the field 'values' as float32 [10], which `fields` of "
        "Payload(",
        "Received: values=float32 [11]",
    ),
    (Payload("float32", "half"), "'values' as float32 [10]", "values=float16 [10]"),
    (
        Payload("float32", "matrix"),
        "'values' as float32 [10]",
        "values=float32 [10, 1]",
    ),
    (
        Payload("float32", "misnamed"),
        "must return the fields ['values']",
        "Received: fields=['valuse']",
    ),
    (
        Payload("float32", "one more"),
        "Use the same names in both",
        "Received: fields=['scale', 'values']",
    ),
    (
        Payload("float32", "undeclared codes"),
        "as int32 [1] (words of packed codes: `ops.pack_codes`)",
        "values=float32 [10]",
    ),
    (
        FirstRound("float32", "longer"),
        "`prepare` must return the field 'scale' as float32 [2], which "
        "`max_reduced_fields` of FirstRound(",
        "scale=float32 [3]",
    ),
    (
        FirstMean("float32", "longer"),
        "`prepare` must return the field 'scale'",
        "`mean_reduced_fields` of FirstMean(",
    ),
    (
        Hearing("float32", "long"),
        "'count' as float32 [2]: as many items as `init` returns for its tensors",
        "count=float32 [4]",
    ),
    (
        Hearing("float32", "grows"),
        "`received` of Hearing(",
        "'count' as float32 [2]",
        "count=float32 [10]",
    ),
    (FirstRound("float32", "half"), "'scale' as float32 [2]", "scale=float16 [2]"),
    (FirstRound("float32", "misnamed"), "fields ['scale']", "fields=['top']"),
    (
        Stateful("float32", "short"),
        "`init` of Stateful(",
        "'count' as float32 [10]: a state is saved",
        "Received: count=float32 [9]",
    ),
    (Stateful("float32", "scalar"), "'count' as float32 [10]", "count=float32 []"),
    (Stateful("float32", "int"), "'count' as float32 [10]", "count=int32 [10]"),
    (
        Stateful("float32", "grows"),
        "`compress` of Stateful(",
        "the state 'count' as float32 [10]",
        "Received: count=float32 [11]",
    ),
    (Stateful("float32", "half"), "'count' as float32 [10]", "count=float16 [10]"),
    (Stateful("float32", "misnamed"), "leaves ['count']", "leaves=['total']"),
    (Stateful("float32", "lost"), "leaves ['count']", "leaves=[]"),
    (
        Reply(Identity(), "longer"),
        "`combine` must return the field 'values' as float32 [10], which "
        "`reply_fields` of Reply(",
        "values=float32 [11]",
    ),
    (Reply(Identity(), "half"), "'values' as float32 [10]", "values=float16 [10]"),
    (Reply(Identity(), "misnamed"), "fields ['values']", "fields=['valuse']"),
    (Reply(Identity(), "long state"), "`init` of Reply(", "count=float32 [11]"),
    (Reply(Identity(), "new state"), "`combine` of Reply(", "count=float32 [9]"),
    (
        Reply(Identity(), "short vector"),
        "`decompress` of Reply(",
        "must return a vector, float32 [10]",
        "vector=float32 [9]",
    ),
    (Decay(0.1, 0.5, "long"), "`init` of Decay(", "sum=float32 [11]"),
    (Decay(0.1, 0.5, "shrinks"), "`term` of Decay(", "sum=float32 [9]"),
]
every_fault = pytest.mark.parametrize(
    ("part", "texts"),
    [(part, texts) for part, *texts in FAULTS],
    ids=[f"{type(part).__name__}-{part.fault}" for part, *_ in FAULTS],
)


def refused(texts):
    return pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, texts)))


def method_of(part):
    if isinstance(part, Mean):
        return Method(Identity(), part)
    if isinstance(part, WeightDecay):
        return Method(Identity(), Mean(), part)
    return Method(part, Mean(part))


def trace(method, **arguments):
    """Builds an optimizer and traces a step."""
    weights = make_variables([[4], [2, 3]])
    optimizer = tfgradcomp.CompressedOptimizer(
        keras.optimizers.SGD(0.1), method, min_size=0, **arguments
    )
    optimizer.build(weights)

    @tf.function
    def step():
        optimizer.apply([tf.ones_like(weight) for weight in weights], weights)

    step.get_concrete_function()


@pytest.mark.sample(1)
@every_fault
def test_a_fault_is_named_when_a_step_is_traced(part, texts):
    with refused(texts):
        trace(method_of(part))


def test_a_shape_that_is_unknown_although_declared_is_refused():
    with refused(["float32 [10]", "values=float32 [unknown]"]):
        trace(method_of(Payload("float32", "unknown")))


@pytest.mark.sample(4)
@pytest.mark.parametrize("fault", ["longer", "half", "misnamed"])
@pytest.mark.parametrize("around", [ErrorFeedback, Momentum])
def test_the_error_names_the_part_that_is_wrapped(around, fault):
    with refused(["of Payload(dtype='float32'", "Received: "]):
        trace(method_of(around(Payload("float32", fault))))


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", ["longer", "half", "misnamed"])
def test_a_server_names_the_compressor_of_its_reply(fault):
    faulty = Payload("float32", fault)
    with refused(["of Payload(dtype='float32'", "Received: "]):
        trace(Method(Identity(), Recompress(faulty)))


@pytest.mark.parametrize("fault", ["longer", "half", "misnamed", "long state"])
@pytest.mark.parametrize("transport", [DirectExchange, *BY_NAME.values()])
def test_replies_are_compared_by_every_transport(transport, fault):
    method = Method(Identity(), Reply(Identity(), fault))

    def worker(rank, collectives):
        route = transport(collectives).bind(method, LAYOUT, "site")
        context = make_context(rank=rank, num_workers=2)
        x = tf.ones([LAYOUT.size])
        server_state = route.init_state()
        sent, context = route.compress(x, (), server_state, context)
        route.exchange(sent.payload, server_state, context, tf.constant(0))

    with refused(["Received: "]):
        Loopback(2, timeout=60).run(worker)


def test_half_precision_and_variable_lengths_are_no_faults():
    trace(tfgradcomp.methods.dist_ef_sgd(residual_dtype="bfloat16"))
    trace(tfgradcomp.methods.strom(0.5))
