"""`BackupAndRestore` refuses a model with an optimizer that is not built."""

import keras
import pytest

import tfgradcomp
from tfgradcomp.fit.resume import prepare_to_resume


def test_each_optimizer_of_a_model_must_be_built():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(tfgradcomp.DistEFSGD("sgd"), "mse")
    model.second = tfgradcomp.DistEFSGD("sgd", name="second")
    with pytest.raises(ValueError, match=r"several.*not built: \['second'\]"):
        prepare_to_resume(model, 1)
    model.second.build(model.trainable_variables)
    prepare_to_resume(model, 1)
