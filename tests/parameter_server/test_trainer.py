"""Errors of the trainer before it connects to anything."""

import json

import keras
import pytest
import tensorflow as tf

import tfgradcomp
from tfgradcomp.parameter_server.remote_worker import RemoteWorker


def trainer(optimizer=None, **arguments):
    optimizer = optimizer or tfgradcomp.TernGrad("sgd")
    return tfgradcomp.ParameterServerTrainer(
        lambda: keras.Sequential([keras.layers.Dense(1)]), optimizer, "mse", **arguments
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mode": "fast"}, "mode.*sync.*async.*Received.*'fast'"),
        ({"on_worker_loss": "cry"}, "on_worker_loss.*continue.*wait"),
        ({"steps_per_execution": 0}, "steps_per_execution"),
        ({"max_staleness": 9}, "leave max_staleness=None. Received: mode='sync'.*9"),
        ({"optimizer": keras.optimizers.SGD()}, "must be a compressed optimizer"),
        (
            {"optimizer": tfgradcomp.SignSGD("sgd", transport="sharded")},
            "transport='auto'. Received: transport='sharded'",
        ),
        (
            {"optimizer": tfgradcomp.SignSGD("sgd", fallback="float32")},
            "compressed.*fallback=None. Received: fallback='float32'",
        ),
        (
            {"optimizer": tfgradcomp.SignSGD("sgd", dense_every=3)},
            "always compressed.*dense_every=None. Received: dense_every=3",
        ),
        (
            {"optimizer": tfgradcomp.SignSGD("sgd", verify_every=9)},
            "Expected: verify_every=None. Received: verify_every=9",
        ),
        (
            {
                "optimizer": tfgradcomp.SignSGD(
                    keras.optimizers.SGD(gradient_accumulation_steps=2, use_ema=True)
                ),
                "mode": "async",
            },
            "averages would differ.*mode='async'.*gradient_accumulation_steps=2",
        ),
    ],
)
def test_bad_arguments_raise(arguments, says):
    with pytest.raises(ValueError, match=says):
        trainer(**arguments)


def test_an_epoch_that_would_end_before_an_update_raises():
    # The constructor would connect to a cluster.
    trainer = object.__new__(tfgradcomp.ParameterServerTrainer)
    sgd = keras.optimizers.SGD(gradient_accumulation_steps=4)
    trainer.optimizer = tfgradcomp.SignSGD(sgd)
    says = "multiple.*Received: steps_per_epoch=10, gradient_accumulation_steps=4"
    with pytest.raises(ValueError, match=says):
        trainer.fit(None, steps_per_epoch=10)


@pytest.mark.parametrize(
    "cluster",
    [
        {},
        {"worker": ["a:1", "b:1"]},
        {"chief": ["a:1"], "worker": ["b:1"]},
        {"chief": ["a:1"], "ps": ["b:1"]},
    ],
)
def test_a_cluster_without_all_roles_raises(monkeypatch, cluster):
    task = {"type": "worker", "index": 0}
    config = {"cluster": cluster, "task": task} if cluster else {}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match="one chief, workers and parameter servers"):
        trainer()


@pytest.mark.parametrize(
    ("dataset_fn", "says"),
    [
        (tf.data.Dataset.range(3), "must be a function of a tf.distribute.Input"),
        (lambda context: 1.0, "must return a tf.data.Dataset.*Received: .*=1.0"),
        (
            lambda context: tf.data.Dataset.range(3),
            r"worker 1 ends. Append .repeat\(\).*Received: a dataset of 3 batches",
        ),
    ],
)
def test_finite_datasets_and_other_types_raise(dataset_fn, says):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(tfgradcomp.TernGrad("sgd"), "mse")
    with pytest.raises(ValueError, match=says):
        RemoteWorker("CPU:0", model).open(dataset_fn, 2, 1)
