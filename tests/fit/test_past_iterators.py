"""No worker waits until an iterator is removed: a thread does, or nothing is tuned."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import data_adapters
from tensorflow.python.data.ops import multi_device_iterator_ops

import tfgradcomp
from tests.fit import loop_cases

X = np.zeros((8, 3), "float32")


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return X, X


def tuned(batches):
    """Returns whether Keras' dataset of `batches` is tuned; None if nobody chose."""
    tfgradcomp.enable_multi_worker_fit()
    adapter = data_adapters.get_data_adapter(batches)
    return adapter.get_tf_dataset().options().autotune.enabled


@pytest.mark.parametrize(
    "make",
    [lambda: X, Rows, lambda: (pair for pair in [(X, X)])],
    ids=["array", "PyDataset", "generator"],
)
def test_keras_own_pipelines_are_not_tuned(make):
    assert tuned(make()) is False


@pytest.mark.parametrize("choice", [None, True, False])
def test_tuning_of_a_given_dataset_is_its_owners_choice(choice):
    options = tf.data.Options()
    if choice is not None:
        options.autotune.enabled = choice
    assert tuned(tf.data.Dataset.range(3).with_options(options)) is choice


def test_handing_out_batches_is_not_tuned():
    tfgradcomp.enable_multi_worker_fit()
    iterator = multi_device_iterator_ops.OwnedMultiDeviceIterator(
        tf.data.Dataset.range(3), ["CPU:0"]
    )
    (own,) = iterator._device_iterators
    assert own._dataset.options().autotune.enabled is False
    assert int(iterator.get_next()[0]) == 0


@pytest.mark.slow
def test_threads_remove_the_iterators_of_past_epochs(pools):
    for answer in pools(2).run(loop_cases.case_iterators).answers:
        assert answer["removers"] == {"past iterator"}
        assert answer["left"] == 0
        # No more of them after the second epoch: none is kept for longer than one.
        assert answer["alive"][1:] == answer["alive"][1:2] * 5
