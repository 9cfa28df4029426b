"""Float64 for the tests of second moments, whose oracle needs the digits."""

import keras
import pytest

from tfgradcomp.per_example.second_moments import enable_second_moments

enable_second_moments()


@pytest.fixture(autouse=True)
def _float64():
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
