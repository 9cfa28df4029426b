"""Fashion-MNIST for the example, with or without a network.

Three sources are tried in this order:

1. TensorFlow Datasets' own ``fashion_mnist``, prepared earlier or downloaded;
2. the four idx files of Debian's package ``dataset-fashion-mnist``, installed, or
   fetched by ``apt-get`` into a temporary folder, without root; read by the small
   builder ``FashionMnistIdx``, so that the same pipeline runs;
3. scikit-learn's 8x8 digits, enlarged to 28x28, with a notice: they show that
   training works, their accuracy says nothing about Fashion-MNIST.
"""

import contextlib
import fcntl
import gzip
import io
import math
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

try:
    import requests
    import tensorflow_datasets as tfds
except ImportError as error:
    raise ImportError(
        "The examples read their data through TensorFlow Datasets, which is not "
        'installed. Install it with: pip install "tfgradcomp[examples]"'
    ) from error

IDX_DIR = Path("/usr/share/datasets/fashion-mnist")
URL = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    "train-images-idx3-ubyte.gz"
)
DIGITS_NOTICE = (
    "notice: Fashion-MNIST is neither downloadable nor installed here; training on "
    "scikit-learn's 8x8 digits instead. Offline, Debian and Ubuntu have the real "
    "data: apt-get install dataset-fashion-mnist"
)


class Data(NamedTuple):
    """Unbatched (uint8 image [28, 28, 1], int64 label) pairs and their source.

    ``notice`` is a message about the source for the user, or "".
    """

    train: tf.data.Dataset
    test: tf.data.Dataset
    source: str
    notice: str = ""


def read_idx(path: Path) -> np.ndarray:
    """Read a gzipped idx file of bytes, the format of the MNIST family.

    Raises:
      ValueError: if the header is not that of bytes, or does not match the length.
    """
    with gzip.open(path) as file:
        content = file.read()
    # Two zero bytes, the element type (8: uint8), the rank, then big-endian sizes.
    if content[:3] != b"\0\0\x08":
        raise ValueError(
            f"{path} is not an idx file of bytes: it should begin with 00 00 08. "
            f"Received: {content[:3].hex(' ')}"
        )
    start = 4 + 4 * content[3]
    shape = tuple(np.frombuffer(content[4:start], ">u4").tolist())
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} announces shape {shape}, {math.prod(shape)} bytes. "
            f"Received: {len(content) - start} bytes"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


class FashionMnistIdx(tfds.core.GeneratorBasedBuilder):
    """Fashion-MNIST from idx files that are on this machine already."""

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "Put the four *-ubyte.gz files of Fashion-MNIST into manual_dir; Debian's "
        f"package dataset-fashion-mnist puts them into {IDX_DIR}."
    )

    def _info(self):
        # The features of tfds' own fashion_mnist: either builder can feed the model.
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(28, 28, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://github.com/zalandoresearch/fashion-mnist",
        )

    def _split_generators(self, dl_manager):
        folder = Path(dl_manager.manual_dir)
        return {
            "train": self._generate_examples(folder, "train"),
            "test": self._generate_examples(folder, "t10k"),
        }

    def _generate_examples(self, folder, prefix):
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield index, {"image": image[..., np.newaxis], "label": int(label)}


def arrays(dataset: tf.data.Dataset, count: int | None = None) -> tuple:
    """Return the first images and labels as arrays; all unless told how many."""
    count = count or int(dataset.cardinality())
    return next(dataset.take(count).batch(count).as_numpy_iterator())


def first(source: Data, images: int) -> list[tf.data.Dataset]:
    """Return the first images for training, and as many of 10,000 for testing."""
    return [
        tf.data.Dataset.from_tensor_slices(arrays(dataset, count))
        for dataset, count in (
            (source.train, images),
            (source.test, min(images, 10_000)),
        )
    ]


def can_download(url: str = URL, timeout: float = 3.0) -> bool:
    """Return within about ``timeout`` seconds whether ``url`` can be downloaded.

    tfds itself retries for minutes where a firewall drops packets. This asks for the
    headers only, with the client that tfds uses, so that proxies count. No time
    limit of ``requests`` covers the name resolution, hence the thread, which may be
    left behind.
    """
    answers = []

    def ask():
        with contextlib.suppress(requests.RequestException):
            answers.append(requests.head(url, timeout=timeout).ok)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout + 1.0)
    return answers == [True]


@contextlib.contextmanager
def lock(path: Path):
    """Admit one process at a time; the system unlocks it if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prepare(builder, **config):
    """Write the tfds files without tfds' progress bars and announcements."""
    print(f"data: preparing {builder.info.full_name}, once", file=sys.stderr)
    tfds.disable_progress_bar()
    # tfds draws names of temporary files; seeds of Keras come from the same generator.
    state = random.getstate()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(
                download_config=tfds.download.DownloadConfig(
                    try_download_gcs=False, **config
                )
            )
    finally:
        random.setstate(state)


def _builders(data_dir):
    return (
        tfds.builder("fashion_mnist", data_dir=data_dir),
        FashionMnistIdx(data_dir=data_dir),
    )


@contextlib.contextmanager
def debian_packages(*names: str):
    """Return a temporary folder with the files of Debian packages, or None.

    apt-get and dpkg-deb work on folders of their own: nothing is installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("lists/partial", "cache/archives/partial"):
            Path(folder, name).mkdir(parents=True)
        apt = ["apt-get", "-qq", "-o", f"Dir::State::Lists={folder}/lists"]
        apt += ["-o", f"Dir::Cache={folder}/cache", "-o", "APT::Sandbox::User=root"]
        try:
            for command in (
                [*apt, "update"],
                [*apt, "download", *names],
                [
                    "sh",
                    "-c",
                    'for file in *.deb; do dpkg-deb -x "$file" . || exit; done',
                ],
            ):
                subprocess.run(
                    command, cwd=folder, check=True, capture_output=True, timeout=120
                )
        except (OSError, subprocess.SubprocessError):
            yield None
        else:
            yield Path(folder)


@contextlib.contextmanager
def debian_files():
    """Return the folder of idx files from Debian's package, or None."""
    with debian_packages("dataset-fashion-mnist") as folder:
        yield folder and folder / IDX_DIR.relative_to("/")


def _find_prepared(data_dir):
    for builder in _builders(data_dir):
        # builder.is_prepared() warns where the answer is no. tfds renames the whole
        # folder into place when it is complete, so this file says as much.
        if (builder.data_path / "dataset_info.json").exists():
            return builder
    return None


def prepared_builder(data_dir: str | Path | None = None, idx_dir: Path = IDX_DIR):
    """Return a builder whose files are ready, or None; prepare them if necessary.

    Safe to call from several processes at once: one prepares the files, the
    others wait and use them, so workers on one machine never differ in the source.
    """
    builder = _find_prepared(data_dir)
    if builder is not None:
        return builder
    official, local = _builders(data_dir)
    with lock(Path(official.data_dir).parents[1] / "fashion_mnist.lock"):
        # Asked again: another process may have prepared it while this one waited.
        builder = _find_prepared(data_dir)
        if builder is not None:
            return builder
        if can_download():
            try:
                _prepare(official)
                return official
            # tfds documents no common base of what a download may raise.
            except Exception as error:
                print(f"data: the download failed: {error}", file=sys.stderr)
        files = contextlib.nullcontext(idx_dir) if idx_dir.is_dir() else debian_files()
        with files as folder:
            if folder is not None:
                _prepare(local, manual_dir=folder)
                return local
    return None


def digits() -> Data:
    """Return scikit-learn's digits in the shape and range of Fashion-MNIST."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "Without Fashion-MNIST the example trains on scikit-learn's digits, and "
            "scikit-learn is not installed. Install it with: "
            'pip install "tfgradcomp[examples]"'
        ) from error
    images, labels = load_digits(return_X_y=True)
    images = tf.image.resize(images.reshape(-1, 8, 8, 1), (28, 28)) * (255 / 16)
    images = tf.cast(tf.round(images), tf.uint8)
    # The last writers are nobody's in the first part, so the split is not random.
    train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
    test = tf.data.Dataset.from_tensor_slices((images[1500:], labels[1500:]))
    return Data(train, test, "digits", DIGITS_NOTICE)


def load(data_dir: str | Path | None = None, idx_dir: Path = IDX_DIR) -> Data:
    """Return Fashion-MNIST from the best available source, or else the digits.

    Args:
      data_dir: where tfds keeps its files; None for its default, ``TFDS_DATA_DIR``
        or ``~/tensorflow_datasets``.
      idx_dir: the folder of the four idx files, used if nothing can be downloaded.
    """
    builder = prepared_builder(data_dir, idx_dir)
    if builder is None:
        return digits()
    train, test = builder.as_dataset(
        split=["train", "test"],
        as_supervised=True,
        # batches() caches; tfds would keep a second copy.
        read_config=tfds.ReadConfig(try_autocache=False),
    )
    return Data(train, test, builder.info.full_name)


def batches(
    dataset: tf.data.Dataset, global_batch_size: int, shuffle_seed: int | None = None
) -> tf.data.Dataset:
    """Return batches of (float32 images in [0, 1], labels), to be split over workers.

    Args:
      dataset: unbatched pairs, as in ``Data``.
      global_batch_size: examples of all workers together; each gets its share.
      shuffle_seed: for training, the order's seed, equal on all workers; None to keep
        the order and the last short batch, for evaluation.
    """
    training = shuffle_seed is not None
    dataset = dataset.cache()
    if training:
        dataset = dataset.shuffle(int(dataset.cardinality()), seed=shuffle_seed)
    dataset = dataset.batch(global_batch_size, drop_remainder=training)
    dataset = dataset.map(
        lambda images, labels: (tf.cast(images, tf.float32) / 255.0, labels),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    options = tf.data.Options()
    # The files are too few to give each worker its own: every worker reads all of them
    # in the same order and keeps its share of each batch.
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    # TensorFlow may wait for the end of the thread that tunes the pipeline.
    options.autotune.enabled = False
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(options)
