"""The example's data: idx files, the tfds builder, the fallback, two processes."""

import contextlib
import gzip
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

tfds = pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import data  # noqa: E402

SIZES = {"train": 20, "t10k": 6}


def write_idx(path, array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def fake_idx(tmp_path):
    """A folder like Debian's, with few images, and the arrays in it."""
    folder = tmp_path / "idx"
    folder.mkdir()
    generator = np.random.default_rng(0)
    arrays = {}
    for prefix, size in SIZES.items():
        images = generator.integers(0, 256, (size, 28, 28), np.uint8)
        labels = generator.integers(0, 10, size, np.uint8)
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)
        arrays[prefix] = images, labels
    return folder, arrays


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(data, "can_download", lambda: False)
    monkeypatch.setattr(data, "debian_files", contextlib.nullcontext)


def rows(images, labels):
    """Image and label as comparable rows: tfds shuffles when it writes."""
    return sorted(
        (np.asarray(image).tobytes(), int(label))
        for image, label in zip(images, labels, strict=True)
    )


def test_reads_exactly_what_is_in_the_idx_files(fake_idx, tmp_path, offline, capsys):
    folder, arrays = fake_idx
    before = random.getstate()
    loaded = data.load(tmp_path / "tfds", folder)
    # A training that prepares its data has the seeds of one that finds them.
    assert random.getstate() == before
    assert loaded.source == "fashion_mnist_idx/1.0.0"
    assert loaded.notice == ""
    for dataset, prefix in ((loaded.train, "train"), (loaded.test, "t10k")):
        images, labels = zip(*dataset.as_numpy_iterator(), strict=True)
        assert {image.shape for image in images} == {(28, 28, 1)}
        assert {image.dtype for image in images} == {np.dtype(np.uint8)}
        assert rows(images, labels) == rows(*arrays[prefix])
    # What the user sees: one line, neither tfds' bars nor its announcements.
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == "data: preparing fashion_mnist_idx/1.0.0, once\n"


def test_second_load_needs_neither_idx_files_nor_network(
    fake_idx, tmp_path, offline, monkeypatch
):
    folder, _ = fake_idx
    data.load(tmp_path / "tfds", folder)
    monkeypatch.setattr(data, "can_download", lambda: pytest.fail("asked the network"))
    loaded = data.load(tmp_path / "tfds", tmp_path / "nowhere")
    assert int(loaded.train.cardinality()) == SIZES["train"]


def test_failed_download_falls_back(fake_idx, tmp_path, monkeypatch, capfd):
    def fail(builder, **config):
        if builder.name == "fashion_mnist":
            raise OSError("the line went dead")
        prepare(builder, **config)

    prepare = data._prepare
    monkeypatch.setattr(data, "can_download", lambda: True)
    monkeypatch.setattr(data, "_prepare", fail)
    loaded = data.load(tmp_path / "tfds", fake_idx[0])
    assert loaded.source == "fashion_mnist_idx/1.0.0"
    assert "the download failed: the line went dead" in capfd.readouterr().err


def test_no_download_from_a_name_that_does_not_resolve():
    # RFC 6761 keeps .invalid free of names for ever.
    assert not data.can_download("http://tfgradcomp.invalid/", timeout=1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x0d\x01" + bytes(8), "should begin with 00 00 08. Received: 00 00 0d"),
        (b"\0\0\x08\x01\0\0\0\x05abc", r"announces shape \(5,\), 5 bytes. Received: 3"),
    ],
)
def test_broken_idx_file_is_refused(tmp_path, content, message):
    path = tmp_path / "broken.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=message):
        data.read_idx(path)


def test_digits_stand_in(tmp_path, offline):
    pytest.importorskip("sklearn", reason="needs tfgradcomp[examples]")
    loaded = data.load(tmp_path / "tfds", tmp_path / "nowhere")
    assert loaded.source == "digits"
    assert "digits instead" in loaded.notice
    assert int(loaded.train.cardinality()) == 1500
    assert int(loaded.test.cardinality()) == 297
    images, labels = next(loaded.train.batch(1500).as_numpy_iterator())
    assert images.shape == (1500, 28, 28, 1)
    assert images.dtype == np.uint8
    assert images.min() == 0
    # Bright strokes on black, as in Fashion-MNIST: not left in 0 .. 16.
    assert images.max() > 200
    assert set(labels) == set(range(10))


def test_batches_are_scaled_shuffled_and_reproducible():
    import tensorflow as tf

    images = np.repeat(np.arange(10, dtype=np.uint8), 784).reshape(10, 28, 28, 1)
    pairs = tf.data.Dataset.from_tensor_slices((images, np.arange(10)))

    def labels_of(seed, epochs=2):
        dataset = data.batches(pairs, 4, seed)
        return [
            [y.tolist() for _, y in dataset.as_numpy_iterator()] for _ in range(epochs)
        ]

    x, y = next(data.batches(pairs, 4).as_numpy_iterator())
    assert x.dtype == np.float32
    assert x.shape == (4, 28, 28, 1)
    np.testing.assert_array_equal(x[:, 0, 0, 0], y.astype(np.float32) / np.float32(255))
    # Evaluation: in order, and nothing dropped.
    assert labels_of(None, epochs=1) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]
    # Training: full batches, another order every epoch, the same again for the seed.
    first, second = labels_of(0)
    assert [len(batch) for batch in first] == [4, 4]
    assert first != second
    assert [first, second] == labels_of(0)
    assert [first, second] != labels_of(1)


@pytest.mark.slow  # Two workers prepare at once in every first run of an example.
def test_two_processes_prepare_at_once(fake_idx, tmp_path):
    folder, arrays = fake_idx
    # Both are held until both have imported TensorFlow, so that they do meet.
    script = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
import data
data.can_download = lambda: False
print("ready", flush=True)
sys.stdin.readline()
loaded = data.load(sys.argv[2], pathlib.Path(sys.argv[3]))
print(loaded.source, sum(int(label) for _, label in loaded.train), flush=True)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, EXAMPLES, tmp_path / "tfds", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        )
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    expected = f"fashion_mnist_idx/1.0.0 {arrays['train'][1].sum()}\n"
    assert [out for out, _ in outputs] == [expected] * 2, outputs
    assert sum(err.count("data: preparing") for _, err in outputs) == 1
    left = [path.name for path in (tmp_path / "tfds" / "fashion_mnist_idx").iterdir()]
    assert left == ["1.0.0"]


@pytest.mark.skipif(
    not data.IDX_DIR.is_dir(),
    reason=f"no {data.IDX_DIR}: apt-get install dataset-fashion-mnist",
)
def test_debian_package_holds_fashion_mnist():
    for prefix, size in (("train", 60_000), ("t10k", 10_000)):
        images = data.read_idx(data.IDX_DIR / f"{prefix}-images-idx3-ubyte.gz")
        labels = data.read_idx(data.IDX_DIR / f"{prefix}-labels-idx1-ubyte.gz")
        assert images.shape == (size, 28, 28) and images.max() == 255
        assert np.bincount(labels).tolist() == [size // 10] * 10


@pytest.mark.slow
@pytest.mark.skipif(
    not data.IDX_DIR.is_dir(),
    reason=f"no {data.IDX_DIR}: apt-get install dataset-fashion-mnist",
)
def test_debian_package_is_prepared(tmp_path, offline):
    loaded = data.load(tmp_path / "tfds")
    for dataset, size in ((loaded.train, 60_000), (loaded.test, 10_000)):
        assert dataset.element_spec[0].shape == (28, 28, 1)
        assert dataset.element_spec[0].dtype == "uint8"
        assert dataset.element_spec[1].dtype == "int64"
        labels = np.concatenate([y for _, y in dataset.batch(1000).as_numpy_iterator()])
        assert np.bincount(labels).tolist() == [size // 10] * 10
