"""The table of `optimizer.summary()`."""

import re

import keras
import pytest

import tfgradcomp
from tests.helpers import make_variables
from tfgradcomp.transports import Loopback
from tfgradcomp.transports.all_gather import AllGather

SGD = keras.optimizers.SGD
SMALL = "float32: smaller than min_size=1024"


def lines_of(optimizer, *args, **kwargs):
    lines = []
    optimizer.summary(*args, print_fn=lines.append, **kwargs)
    return lines


def rows_of(lines):
    """The cells of each variable's row, by its path."""
    table = [re.split(r" {2,}", line) for line in lines]
    begin, end = [i for i, line in enumerate(lines) if set(line) == {"─", " "}]
    return {path: cells for path, *cells in table[begin + 1 : end]}


def compiled(optimizer, **kwargs):
    model = keras.Sequential(
        [
            keras.Input((30,), dtype="int32"),
            keras.layers.Embedding(50, 40, name="words"),
            keras.layers.Flatten(),
            keras.layers.Dense(20, name="hidden"),
            keras.layers.Dense(200, name="head"),
        ],
        name="net",
    )
    model.compile(optimizer, "mse", **kwargs)
    return model


def test_reasons_and_totals_before_the_first_step(capsys):
    model = compiled(
        tfgradcomp.TernGrad(
            SGD(0.1),
            transport="all_gather",
            exclude=["last", lambda v: False],
            warmup_steps=3,
            dense_every=10,
            sparse="dense",
        )
    )
    model.optimizer.summary()
    lines = capsys.readouterr().out.splitlines()
    rows = rows_of(lines)
    bucket = ["compressed", "all_gather", "TernGrad"]
    plain = ["plain", "all_reduce"]
    assert rows == {
        "net/words/embeddings": ["(50, 40)", "2,000", *bucket],
        "net/hidden/kernel": ["(1200, 20)", "24,000", *bucket],
        "net/hidden/bias": [
            "(20,)",
            "20",
            *plain,
            "float32: smaller than min_size=1024",
        ],
        "net/head/kernel": ["(20, 200)", "4,000", *plain, "float32: exclude='last'"],
        "net/head/bias": ["(200,)", "200", *plain, "float32: exclude='last'"],
    }
    assert lines[-4].startswith("Compressed: 26,000 of 30,220 elements; buckets: 2;")
    assert lines[-2].startswith("Bytes a step and worker: 0 sent, 0 received;")
    assert lines[-1] == "Steps as float32: the first 3 and one in 10"


def test_tables_cut_variables_and_what_differs_by_step():
    model = compiled(
        tfgradcomp.DistEFBlockSGD(
            SGD(0.1),
            block_size=1000,
            bucket_bytes=12_000 * 4,
            exclude=lambda v: v.shape[-1] == 200,
        )
    )
    lines = lines_of(model.optimizer, line_length=100)
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    rows = rows_of(lines_of(model.optimizer))
    assert rows["net/words/embeddings"][2:] == [*("table_0", "rows", "DistEFBlockSGD")]
    assert rows["net/hidden/kernel"][2] == "compressed.0 to .2"
    assert rows["net/head/kernel"][-1] == "float32: exclude=<function <lambda>>"
    assert "Traffic varies from step to step" in text
    assert "not known before a step" in text


def test_bytes_of_two_workers_next_to_a_ring():
    def worker(rank, collectives):
        optimizer = tfgradcomp.CompressedOptimizer(
            SGD(0.1),
            tfgradcomp.compressors.ScaledSign(),
            tfgradcomp.servers.Mean(),
            transport=AllGather(collectives),
        )
        optimizer.build(make_variables([(64, 50)]))
        return lines_of(optimizer)

    for lines in Loopback(2, timeout=60).run(worker):
        # A flag, a scale and a bit an element, in words of 32 bits.
        sent = 4 * (1 + 1 + 3200 // 32)
        assert "workers: 2" in lines[-3]
        assert lines[-2] == "Bits an element: 1.01 up, 32.00 in the reply"
        assert f"{sent} sent, {sent} received; float32 by a ring: 12,800" in lines[-1]
        assert "ScaledSign, Mean" in "\n".join(lines)


def test_a_fallback_and_gradients_that_overwrite_are_said():
    free = tfgradcomp.transports.Costs(
        *[tfgradcomp.transports.LinearCost(0.0, 0.0)] * 3
    )
    optimizer = tfgradcomp.TernGrad(SGD(0.1), transport=free, fallback="float32")
    scale, kernel, bias = make_variables([(2000,), (64, 50), (7,)])
    scale.overwrite_with_gradient = True
    optimizer.build([scale, kernel, bias])
    lines = lines_of(optimizer)
    assert [cells[2:] for cells in rows_of(lines).values()] == [
        ["-", "-", "overwritten with its gradient, takes no update"],
        [
            *("compressed", "all_reduce"),
            "float32: float32 is quicker on this cluster (fallback='float32')",
        ],
        ["plain", "all_reduce", SMALL],
    ]
    assert not any(line.startswith("Bits") for line in lines)


def test_who_cannot_be_built_says_how():
    optimizer = tfgradcomp.TernGrad(SGD(0.1))
    with pytest.raises(ValueError, match="call `optimizer.build.*model=none, proc"):
        optimizer.summary()
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="without weights"):
        optimizer.summary()
    model.build((None, 2000))
    assert "TernGrad" in "\n".join(lines_of(optimizer))
    other = tfgradcomp.TernGrad(SGD(0.1))
    assert "TernGrad" in "\n".join(lines_of(other, model))


def test_within_a_scale_of_the_loss():
    model = keras.Sequential([keras.Input((2000,)), keras.layers.Dense(3)])
    model.compile(
        keras.optimizers.LossScaleOptimizer(tfgradcomp.TernGrad(SGD(0.1))), "mse"
    )
    assert "TernGrad" in "\n".join(lines_of(model.optimizer))
    assert model.optimizer.traffic.elements_compressed == 6000
    assert model.optimizer.skipped_steps == 0
    for name in ("_plan", "no_such_name"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(model.optimizer, name)
    others = keras.optimizers.LossScaleOptimizer(SGD(momentum=0.5))
    assert not hasattr(others, "momentum")
