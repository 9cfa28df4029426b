"""The flat vector in buckets: cut anywhere, the step is the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.test_step import apply
from tests.harness import Worker
from tests.helpers import Rates, bits, make_variables
from tests.methods import ROWS
from tests.pairwise import parametrize_pairwise
from tests.selection import rows, rows_by_needs, select
from tfgradcomp.collectives import Collectives, Loopback
from tfgradcomp.core import Layout
from tfgradcomp.engine import plan
from tfgradcomp.engine.bucket_ranges import BucketRange, Piece, cut_ranges
from tfgradcomp.engine.device_sharded_bucket import part_ranges
from tfgradcomp.transports import AllGather, Sharded
from tfgradcomp.transports.auto import BY_NAME

SHAPES = [(40, 20), (7,), (3, 300), (1500,), (11, 11), (2, 3, 4)]
SIZES = [int(np.prod(shape)) for shape in SHAPES]
BY_MESSAGE = select(by=lambda row: row.message_kinds)
# The number of workers, the row, its blocks and the bytes of buckets: blocks that end
# in the middle of words, chunks and tensors; or each tensor in a bucket of its own, for
# one half of the rows. With blocks of 64 elements, which some rows have, the smallest
# buckets would be 50, which take ten times as long.
CASES = [
    (1 + i % 3, row, {"block_size": 300}, 600 * 4)
    for i, row in enumerate(BY_MESSAGE)
    if row.takes("block_size")
]
CASES += [
    (1 + i % 3, row, {}, 1)
    for i, row in enumerate(BY_MESSAGE)
    if "block_size" not in row.arguments and (i % 2 or not row.takes("block_size"))
]


def rate():
    return keras.optimizers.SGD(Rates([0.1, 0.0, 0.05, 0.2]))


def gradients_of(step, rank):
    random = np.random.default_rng([step, rank])
    gradients = [random.normal(size=s).astype(np.float32) for s in SHAPES]
    gradients[3][::3] = 0  # Signs of zeros are drawn.
    return [tf.constant(g) for g in gradients]


def train(row, workers, steps=range(3), saved=None, transport=AllGather, **arguments):
    """What each worker saves after some steps, and its number of buckets."""

    def run(rank, collectives):
        optimizer = row.make(
            rate(), transport=transport(collectives), min_size=100, **arguments
        )
        worker = Worker(optimizer, SHAPES, saved and saved[rank])
        for step in steps:
            apply(optimizer, gradients_of(step, rank), worker.variables)
        count = sum(bucket.is_compressed for bucket in optimizer.stepper.buckets)
        return worker.save(), count

    results = Loopback(workers, timeout=60).run(run)
    return [saved for saved, _ in results], results[0][1]


def bits_of(saved):
    return [worker.bits() for worker in saved]


def weights_of(saved):
    return [[bits(w) for w in worker.weights] for worker in saved]


def blocks_of(row):
    """Few blocks, of which chunks hold whole ones, as shards need them."""
    return {"block_size": 256} if "block_size" in row.arguments else {}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("workers", "row", "blocks", "size"),
    CASES,
    ids=lambda value: getattr(value, "name", None),
)
def test_any_bucketing_gives_the_same_bits(workers, row, blocks, size):
    whole, count = train(row, workers, **blocks)
    assert len({*weights_of(whole)[0]}) == len(SHAPES)
    assert count == 1
    cut, count = train(row, workers, bucket_bytes=size, **blocks)
    assert bits_of(whole) == bits_of(cut)
    if row.name == "TernGrad":
        assert count > 1


@pytest.mark.parametrize(
    ("name", "blocks", "expected"),
    [("TernGrad", {"block_size": 50}, 8), ("PowerSGD", {}, 2)],
)
def test_a_large_model_has_several_buckets(name, blocks, expected, monkeypatch):
    whole, count = train(ROWS[name], 1, **blocks)
    assert count == 1
    monkeypatch.setattr(plan, "_LEAST_BYTES", 4 * 50)
    cut, count = train(ROWS[name], 1, **blocks)
    assert count == expected
    assert bits_of(whole) == bits_of(cut)


# The test above has all states of workers.
@pytest.mark.sample(1)
@rows(lambda row: len(row.transports) > 1, by=lambda row: row.wire_kinds)
def test_any_bucketing_gives_the_same_bits_on_every_transport(row):
    blocks = blocks_of(row)
    whole, _ = train(row, 3, **blocks)
    for name in row.transports:
        given = {"bucket_bytes": 1700 * 4, **blocks}
        cut, _ = train(row, 3, transport=BY_NAME[name], **given)
        if name == "all_reduce" and row.adds_numbers:
            for one, other in zip(whole[0].weights, cut[0].weights, strict=True):
                np.testing.assert_allclose(one, other, 1e-4, 2.0 ** (4 - row.digits))
        else:
            assert weights_of(whole) == weights_of(cut)


@pytest.mark.sample(1)
@rows_by_needs()
def test_a_run_resumes_in_other_buckets(row):
    blocks = blocks_of(row)
    uninterrupted, _ = train(row, 2, range(6), **blocks)
    saved, _ = train(row, 2, range(3), bucket_bytes=3000 * 4, **blocks)
    rest, _ = train(row, 2, range(3, 6), saved, bucket_bytes=1200 * 4, **blocks)
    assert bits_of(rest) == bits_of(uninterrupted)


# Ternary codes that are fitted have the server's state of the others, and slow steps.
SERVING = select(
    lambda row: (
        row.server_state
        and "sharded" in row.transports
        and row.name != "DistEFSGD, ternary"
    ),
    by=lambda row: row.needs,
)


@pytest.mark.sample(1)
@parametrize_pairwise(
    row=SERVING,
    saved_by=["all_gather", "sharded"],
    resumed=["all_gather", "sharded"],
    size=[3000 * 4, 64 * 2**20],
)
def test_a_run_resumes_on_any_transport_in_any_buckets(row, saved_by, resumed, size):
    blocks = blocks_of(row)
    uninterrupted, _ = train(row, 3, range(6), **blocks)
    first = {"transport": BY_NAME[saved_by], "bucket_bytes": 1200 * 4, **blocks}
    saved, _ = train(row, 3, range(3), **first)
    then = {"transport": BY_NAME[resumed], "bucket_bytes": size, **blocks}
    rest, _ = train(row, 3, range(3, 6), saved, **then)
    assert weights_of(rest) == weights_of(uninterrupted)


def test_the_files_of_all_workers_hold_the_whole_server():
    row = ROWS["DistEFBlockSGDM"]
    gathered, _ = train(row, 3, range(3))
    (whole,) = gathered[0].state["compressed.server.residual"]
    known = np.zeros(whole.shape, int)
    sharded, _ = train(row, 3, range(3), transport=Sharded)
    for saved in sharded:
        (part,) = saved.state["compressed.server.residual"]
        for begin, end in saved.state["compressed.server_owned"]:
            known[begin:end] += 1
            assert bits(part[begin:end]) == bits(whole[begin:end])
    assert (known == 1).all()


@pytest.mark.parametrize("transport", [AllGather, Sharded])
def test_a_missing_part_of_the_server_raises_on_all_workers(transport):
    row = ROWS["DistEFBlockSGDM"]
    (saved, *_), _ = train(row, 3, range(2), transport=Sharded)
    ((begin, end),) = saved.state["compressed.server_owned"]
    assert begin == 0
    seen = []

    def load(rank, collectives):
        # Each worker has the file of worker 0 alone.
        optimizer = row.make(rate(), transport=transport(collectives), min_size=100)
        worker = Worker(optimizer, SHAPES, saved)
        with pytest.raises(ValueError, match=r"not restored as a whole") as error:
            worker.step(gradients_of(2, rank))
        seen.append(str(error.value))

    Loopback(3, timeout=60).run(load)
    assert len(seen) == 3
    for text in seen:
        assert f"missing on this worker=['elements [[{end}, " in text
        assert "compressed.server" in text
        assert "tfgradcomp.reshard" in text


@pytest.mark.parametrize("block_size", [None, 64, 1000, "model"])
@pytest.mark.parametrize("size", [1, 700, 2000, 10**6])
def test_buckets_cover_the_vector_from_its_end(block_size, size):
    layout = Layout.from_sizes(SIZES, block_size)
    buckets = cut_ranges(layout, size)
    assert [b.begin for b in buckets] == [b.end for b in buckets[1:]] + [0]
    assert buckets[0].end == layout.size
    for bucket in buckets:
        assert {bucket.begin, bucket.end} <= {*layout.row_splits}
        is_front = bucket.begin == 0 and len(buckets) > 1
        least = size // 4 if is_front else min(size, layout.size) / 2
        assert bucket.end - bucket.begin >= least
    # No smaller front would do: it ends with the first block that reaches its size.
    if len(buckets) > 1:
        inner = [split for split in layout.row_splits if split < buckets[-1].end]
        assert inner[-1] < max(size // 4, 1)
    pieces = sorted(p for b in buckets for p in b.pieces(layout))
    ends = {position: 0 for position in range(6)}
    for position, begin, end in pieces:
        assert begin == ends[position] < end
        ends[position] = end
    assert list(ends.values()) == SIZES


def test_padding_keeps_the_places_of_chunks():
    layout = Layout.from_sizes([600, 100, 5])
    bucket = BucketRange(600, 705)
    assert bucket.alignment_padding == 88
    assert bucket.offset == 512
    assert bucket.layout(layout) == Layout((0, 88, 188, 193), ((88,), (100,), (5,)))
    assert bucket.pieces(layout) == [Piece(1, 0, 100), Piece(2, 0, 5)]
    assert BucketRange(0, 600).layout(layout) == Layout((0, 600), ((600,),))


def test_parts_of_devices_keep_the_places_of_chunks():
    parts = part_ranges(BucketRange(600, 2000, alignment=1), 3)
    assert [(part.begin, part.end) for part in parts] == [
        (600, 1068),
        (1068, 1536),
        (1536, 2000),
    ]
    assert [part.offset for part in parts] == [512, 1024, 1536]
    assert [part.alignment_padding for part in parts] == [88, 44, 0]


class Wires(Collectives):
    """Two workers that say the same, in a graph too; keeps what they are given."""

    num_workers = 2
    rank = 0

    def __init__(self):
        self.messages = []

    def gather(self, vector, call_site):
        self.messages.append(vector)
        return tf.stack([vector, vector])


def ancestors(tensor):
    """The names of the placeholders that a tensor of a graph is computed from."""
    seen, left = set(), [tensor.op]
    while left:
        operation = left.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            left += [t.op for t in operation.inputs] + list(operation.control_inputs)
    graph = tensor.graph
    return {n for n in seen if graph.get_operation_by_name(n).type == "Placeholder"}


def test_a_bucket_waits_for_its_own_gradients_only():
    # It has states of every kind, which could tie buckets together.
    row = ROWS["DistEFBlockSGDM"]
    wires = Wires()
    shapes = SHAPES[:3]
    variables = make_variables(shapes)
    optimizer = row.make(
        rate(), transport=AllGather(wires), bucket_bytes=1, min_size=1, nonfinite="skip"
    )
    optimizer.build(variables)

    @tf.function(autograph=False)
    def step(*gradients):
        optimizer.apply(gradients, variables)

    specs = [tf.TensorSpec(s, name=f"g{i}") for i, s in enumerate(shapes)]
    step.get_concrete_function(*specs)
    gradients = {f"g{i}" for i in range(len(shapes))}
    # The last layer's gradient is the first to travel.
    waits = [ancestors(message) & gradients for message in wires.messages]
    assert waits == [{f"g{i}"} for i in reversed(range(len(shapes)))]
