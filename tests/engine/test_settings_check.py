"""Scripts that differ end in an error on all workers, and nobody waits."""

import os
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tfgradcomp
from tests.engine import settings_cases
from tests.engine.settings_cases import PAIRS
from tfgradcomp.engine import settings_check
from tfgradcomp.engine.settings_check import settings_of
from tfgradcomp.launch.environment import worker_env
from tfgradcomp.launch.ports import local_address, reserve_ports

# A strategy comes first in a process.
PLAIN_ON_ONE = """
from tests.cluster import strategy_and_rank
strategy_and_rank()
from tests.engine import settings_cases
settings_cases.plain_on_one()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["fit", "loops"])
def test_scripts_that_differ_raise_on_all_workers(pools, where):
    # A plain optimizer outside of `fit` runs nothing of this package.
    names = [name for name in PAIRS if where == "fit" or name != "no wrapper"]
    found, _ = pools(2).run(getattr(settings_cases, f"errors_in_{where}"), names)
    for name in names:
        for answers in found:
            assert "The settings of the workers differ" in answers[name], name
            assert PAIRS[name][2] in answers[name]


@pytest.mark.slow  # Processes that end.
def test_an_optimizer_of_keras_on_one_worker_ends_both():
    locks = reserve_ports(2)
    cluster = {"worker": [local_address(lock) for lock in locks]}
    base = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PLAIN_ON_ONE],
            stderr=subprocess.PIPE,
            text=True,
            env=worker_env(base, cluster, {"type": "worker", "index": rank}, 2, 0),
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
        for lock in locks:
            lock.close()
    assert "RuntimeError: Another worker has ended, or runs another" in errors[0]
    assert all(process.returncode for process in processes)


def test_versions_are_settings(monkeypatch):
    before = settings_of(settings_cases.terngrad())
    monkeypatch.setattr(settings_check, "__version__", "0.0")
    monkeypatch.setattr(keras, "__version__", "0.0")
    monkeypatch.setattr(tf, "__version__", "0.0")
    after = settings_of(settings_cases.terngrad())
    different = [name for name in before if before[name] != after[name]]
    assert different == [
        f"version of {n}" for n in ("tfgradcomp", "Keras", "TensorFlow")
    ]


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda: settings_cases.terngrad(keras.optimizers.SGD(Rate())),
        lambda: settings_cases.terngrad(exclude=lambda variable: False),
        lambda: settings_cases.terngrad(exclude=keras.layers.Dense, name="mine"),
        lambda: keras.optimizers.SGD(0.1),
        lambda: None,
    ],
)
def test_equal_arguments_are_equal_settings(make):
    first, second = make(), make()
    if second is not None and "name" in vars(second):
        second.name = "other"
    assert settings_of(first) == settings_of(second)


def test_an_optimizer_that_was_saved_has_the_same_settings():
    optimizer = tfgradcomp.LocalSteps(
        keras.optimizers.SGD(0.1), settings_cases.terngrad(), every=3
    )
    config = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(config)
    assert settings_of(again) == settings_of(optimizer)
