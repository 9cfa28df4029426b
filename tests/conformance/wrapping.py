"""A plugin of pytest: Keras' test files see every optimizer around the identity.

While a test file is imported, the classes of optimizers that it imports are stood in
for by what makes such an optimizer and puts it into a wrapper that loses nothing. What
came of each test goes to the file that the environment variable CONFORMANCE_REPORT
names: "passed", "skipped" or the error.
"""

import contextlib
import json
import os
import sys
import types

import keras
import pytest
from keras.src import optimizers

from tfgradcomp import CompressedOptimizer
from tfgradcomp.compressors import Identity
from tfgradcomp.servers import Mean

# They update no variable by themselves.
NOT_WRAPPED = (keras.optimizers.LossScaleOptimizer, CompressedOptimizer)
_report: dict[str, str] = {}


class Wrapping:
    """Stands for the class of an optimizer, also as a base class."""

    def __init__(self, cls):
        self._cls = cls

    def __call__(self, *args, **kwargs):
        return wrapped(self._cls(*args, **kwargs))

    def __getattr__(self, name):
        return getattr(self._cls, name)

    def __mro_entries__(self, bases):
        return (self._cls,)


class WrappedModule(types.ModuleType):
    """Stands for the module `keras.src.optimizers`."""

    def __init__(self, wrapped_class):
        super().__init__("optimizers")
        self._wrapped_class = wrapped_class

    def __getattr__(self, name):
        return stand_in(getattr(optimizers, name), self._wrapped_class)

    def get(self, identifier):
        return wrapped(optimizers.get(identifier))

    def deserialize(self, *args, **kwargs):
        return wrapped(optimizers.deserialize(*args, **kwargs))


def wrapped(optimizer):
    if optimizer is None or isinstance(optimizer, NOT_WRAPPED):
        return optimizer
    identity = Identity()
    return CompressedOptimizer(optimizer, identity, Mean(identity), min_size=0)


def stand_in(value, wrapped_class):
    """Returns a `Wrapping` of a subclass of `wrapped_class`, anything else as it is."""
    is_optimizer = (
        isinstance(value, type)
        and issubclass(value, wrapped_class)
        and not issubclass(value, NOT_WRAPPED)
        and value is not keras.optimizers.Optimizer
    )
    return Wrapping(value) if is_optimizer else value


@contextlib.contextmanager
def wrapped_imports(wrapped_class):
    """Lets `from keras.src... import` give what stands for the optimizers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("keras.src.optimizers."):
                for key, value in list(vars(module).items()):
                    patch.setattr(module, key, stand_in(value, wrapped_class))
        patch.setattr(keras.src, "optimizers", WrappedModule(wrapped_class))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule():
    module = yield
    wrapped_class = keras.optimizers.Optimizer
    if module.path.name == "multi_optimizer_test.py":
        # A wrapper goes around all optimizers together.
        wrapped_class = keras.optimizers.MultiOptimizer
    with wrapped_imports(wrapped_class):
        namespace = vars(module.obj)
    for name, value in list(namespace.items()):
        namespace[name] = stand_in(value, wrapped_class)
    return module


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        outcome = report.longreprtext if report.failed else report.outcome
        _report[report.nodeid.rpartition("/")[2]] = outcome


def pytest_sessionfinish():
    with open(os.environ["CONFORMANCE_REPORT"], "w") as file:
        json.dump(_report, file)
