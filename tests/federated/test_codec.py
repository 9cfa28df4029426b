"""Any bytes are a message, or a named error."""

import struct
import typing
import zlib

import numpy as np
import pytest

from tests.federated.harness import SHAPES, SIZE
from tfgradcomp import methods
from tfgradcomp.compressors import ErrorFeedback, Identity, Strom, TopK
from tfgradcomp.federated import codec
from tfgradcomp.federated.bound_method import BoundMethod, check_method
from tfgradcomp.federated.codec import MessageError
from tfgradcomp.federated.description import describe_method, read_method
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean

VALUES = {int: -(2**63), float: 0.1, str: "größer", bytes: b"\x00\xff" * 5}
MESSAGES = [
    kind(*(VALUES[t] for t in typing.get_type_hints(kind).values()))
    for kind in typing.get_args(codec.Message)
]
METHODS = {
    "one bit": methods.dist_ef_block_sgd(),
    "quantized": methods.qsgd(),
    "float16": methods.half_precision("float16"),
    "sparse": Method(ErrorFeedback(TopK(0.2)), Mean(TopK(0.2))),
    "varying": Method(Strom(0.5), Mean(Strom(0.5))),
}


def with_checksum(data):
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_a_round_trip(message):
    assert codec.decode(codec.encode(message)) == message


def test_a_message_has_the_documented_bytes():
    body = b"TGCF" + bytes([1, 5]) + struct.pack("<qI", 7, 2) + b"no"
    message = codec.LeftOut(7, "no")
    assert codec.encode(message) == body + struct.pack("<I", zlib.crc32(body))


@pytest.mark.parametrize("seed", range(3))
def test_any_bytes_are_a_message_or_a_message_error(seed):
    rng = np.random.default_rng(seed)
    outcomes = set()
    for _ in range(4000):
        message = MESSAGES[rng.integers(len(MESSAGES))]
        data = bytearray(codec.encode(message))
        for _ in range(rng.integers(1, 4)):
            place = rng.integers(len(data))
            data[place] = rng.integers(256)
        cut = rng.integers(4, len(data) + 1) if rng.random() < 0.5 else len(data)
        data = bytes(data[:cut])
        if rng.random() < 0.8:
            data = with_checksum(data)
        try:
            outcomes.add(type(codec.decode(data)))
        except MessageError as error:
            outcomes.add(str(error).split()[0])
    assert len(outcomes) > 10


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "at least 10 bytes"),
        (b"HTTP/1.1 400 Bad Request", "no tfgradcomp program"),
        (with_checksum(b"TGCF\x02\x00....."), "Install the same version"),
        (with_checksum(b"TGCF\x01\x63....."), "kinds of messages"),
        (b"TGCF\x01\x05.........", "was damaged"),
        (
            # A text of 4 GiB is announced; nothing of this size is allocated.
            with_checksum(b"TGCF\x01\x05" + bytes(8) + b"\xff\xff\xff\xff" + b"...."),
            "reason of a LeftOut needs 4294967295 bytes, but 0 are left",
        ),
        (
            with_checksum(b"TGCF\x01\x05" + bytes(8) + b"\x01\0\0\0\xff" + b"...."),
            "UTF-8",
        ),
        (with_checksum(b"TGCF\x01\x05" + bytes(12) + b"more...."), "left behind"),
    ],
)
def test_errors_say_what_is_wrong(data, text):
    with pytest.raises(MessageError, match=text):
        codec.decode(data)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", METHODS)
def test_any_payload_is_a_vector_or_a_message_error(name):
    bound = BoundMethod(METHODS[name], SHAPES)
    rng = np.random.default_rng(0)
    x = rng.normal(size=SIZE).astype(np.float32)
    payload, _ = bound.compress(x, bound.client_state(), 1, 0)
    assert len(payload) <= bound.most_bytes
    reply = bound.combine([payload] * 2, [1.0] * 2, bound.server_state(), 1).reply
    outcomes = set()
    for decode, valid in (
        (bound.decode, payload),
        (lambda data: bound.decode_reply(data, 2), reply),
    ):
        for length in [*range(0, len(valid) + 9), *[len(valid)] * 150]:
            data = (valid + bytes(9))[:length]
            if rng.random() < 0.7:
                data = rng.integers(0, 256, length, np.uint8).tobytes()
            try:
                vector = decode(data)
            except MessageError:
                outcomes.add("error")
            else:
                assert vector.shape == (SIZE,) and np.isfinite(vector).all()
                outcomes.add("vector")
    assert outcomes == {"error", "vector"}


@pytest.mark.parametrize("name", METHODS)
def test_payloads_decode_to_what_the_compressor_has_sent(name):
    method = METHODS[name]
    bound = BoundMethod(method, SHAPES)
    x = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    payload, state = bound.compress(x, bound.client_state(), 1, 0)
    decoded = bound.decode(payload)
    if name in ("one bit", "sparse"):
        np.testing.assert_allclose(decoded + state["residual"], x, rtol=1e-6)
    if name == "one bit":
        blocks = np.split(x, [30])
        signs = [np.where(b < 0, -1, 1) * np.abs(b).mean() for b in blocks]
        np.testing.assert_allclose(decoded, np.concatenate(signs), rtol=1e-6)
    if name == "float16":
        np.testing.assert_array_equal(decoded, x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_methods_are_read_from_their_description(method):
    assert read_method(describe_method(method)) == method


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"class": "Sequential", "arguments": {}}',
        '{"class": "TopK", "arguments": {"ratio": 0.5}}',
        '{"class": "Method"}',
        '{"class": "Method", "arguments": {"compressor": 1, "server": 2}}',
        '{"class": ["Method"], "arguments": {}}',
    ],
)
def test_other_texts_are_no_method(text):
    with pytest.raises(ValueError, match="Received"):
        read_method(text)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (methods.power_sgd(), "state depends on the reply"),
        (methods.terngrad(share_scaler=True), "first round"),
        (methods.random_k(0.1), "same random elements"),
        (methods.dist_ef_sgd(weight_decay=0.1), "weight decay"),
        (methods.variance_based(), "second moments"),
        (Method(Identity(), Mean(), noise_std=1.0), "noise"),
    ],
)
def test_methods_that_need_more_than_a_round_are_refused(method, reason):
    with pytest.raises(ValueError, match=reason):
        check_method(method)


def test_votes_are_refused_with_weights():
    check_method(methods.signsgd())
    with pytest.raises(ValueError, match="weights='equal'"):
        check_method(methods.signsgd(), by_examples=True)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_not_compressed(value):
    bound = BoundMethod(METHODS["one bit"], SHAPES)
    x = np.full(SIZE, value, np.float32)
    with pytest.raises(FloatingPointError, match="Lower the inner learning rate"):
        bound.compress(x, bound.client_state(), 1, 0)
