"""Wrappers warn of float32 replies where a quantized reply would send less."""

import logging

import keras
import numpy as np
import pytest

import tfgradcomp
from tfgradcomp.collectives import Loopback
from tfgradcomp.transports import AllGather, Sharded

SIZE = 512 * 512


def warnings_of(make, workers, kind, caplog, sizes=(SIZE,)):
    """Builds an optimizer, and returns its warnings and the megabytes of a step."""
    caplog.clear()
    transport = kind(Loopback(workers).collectives(0))
    optimizer = make(keras.optimizers.SGD(0.1), transport=transport)
    with caplog.at_level(logging.WARNING, "tfgradcomp"):
        optimizer.build([keras.Variable(np.zeros(n, np.float32)) for n in sizes])
    return [record.getMessage() for record in caplog.records], optimizer.traffic


QUANTIZERS = {
    "ORQ": {},
    "QSGD": {},
    "Int8": {},
    "Int4": {},
    "LinearQuantization": {},
    "NaturalCompression": {"block_size": 2048},
    "BinGrad": {},
    "ScaledSign": {"block_size": 2048},
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_long_reply_warns_with_the_bytes_of_all_three(name, caplog):
    def make(inner, **more):
        return getattr(tfgradcomp, name)(inner, **QUANTIZERS[name], **more)

    (message,), traffic = warnings_of(make, 4, Sharded, caplog)
    sent = 1e-6 * traffic.bytes_sent
    quantized = warnings_of(
        lambda inner, **more: make(inner, reply="requantize", **more),
        *(4, Sharded, caplog),
    )
    assert quantized[0] == []
    fewer = 1e-6 * quantized[1].bytes_sent
    # A ring sends 2 (N - 1) / N times 16 bits, and a flag.
    half = 1.5e-6 * (2 * SIZE + 2)
    for figure in (sent, half, fewer):
        assert f"{figure:.3g} MB" in message
    assert f"{name} with reply='float32'" in message
    assert "Give reply='requantize'" in message and "'sharded'" in message


def test_replies_that_send_less_than_bfloat16_do_not_warn(caplog):
    for make, workers, kind, sizes in (
        # A gather of 3.2 bits from three others, and of nobody.
        (tfgradcomp.QSGD, 4, AllGather, [SIZE]),
        (tfgradcomp.QSGD, 1, Sharded, [SIZE]),
        # A quantized reply to blocks of unequal sizes needs a gather, which sends none.
        (tfgradcomp.ScaledSign, 4, Sharded, [SIZE, SIZE // 2]),
        (tfgradcomp.OneBitSGD, 40, AllGather, [SIZE]),
    ):
        assert warnings_of(make, workers, kind, caplog, sizes)[0] == []
    # From 12 workers on a gather of 3.2 bits sends more.
    assert len(warnings_of(tfgradcomp.QSGD, 16, AllGather, caplog)[0]) == 1
