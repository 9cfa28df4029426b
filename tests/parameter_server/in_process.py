"""Workers and parameter servers in one process."""

import threading
import uuid
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

# Different names of this process' only device, one per task.
WORKERS, SERVER = ("CPU:0", "/CPU:0"), "/device:CPU:0"


def make_channel(kind, servers=1, workers=2, states=None, **arguments):
    """A new channel of a class of rounds."""
    channel_class = kind.transport_class.channel_class
    name, devices = uuid.uuid4().hex, ["CPU:0"] * servers
    return channel_class(name, devices, workers, states or {}, **arguments)


def make_worker(
    kind, channel, rank, make_optimizer, model, data, *first, loss="mse", device="CPU:0"
):
    """A worker of a class of rounds on a channel.

    Args:
        kind: The class of rounds.
        channel: The channel.
        rank: The worker's rank.
        make_optimizer: Function of a keyword argument `transport`.
        model: The worker's model, not compiled.
        data: The worker's dataset, without an end.
        first: A worker on the channel, whose traced functions are shared.
        loss: As in `keras.Model.compile`.
        device: The worker's device.
    """
    transport = kind.transport_class.at(channel, rank)
    optimizer = make_optimizer(transport=transport)
    optimizer.stepper_class = transport.stepper_class
    model.compile(optimizer, loss)
    worker = kind.worker_class(device, model)
    worker.open(lambda _: data, channel.num_workers, rank)
    worker.join(channel, rank, *first)
    return worker


def make_linear_model(size):
    """A model whose gradient is its input, with `loss=output`."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((size,)), dense])


def output(y_true, y_pred):
    """A loss that is the model's output."""
    return y_pred


def batches_of(gradients):
    """Batches from which `make_linear_model` has these gradients, repeated."""
    x = np.array(gradients, np.float32)[:, np.newaxis]
    return tf.data.Dataset.from_tensor_slices((x, np.zeros([len(x), 1, 1]))).repeat()


def weights(worker):
    """The kernel of a worker's `make_linear_model`."""
    return worker.model.get_weights()[0][:, 0].copy()


def make_rounds(kind, channel, workers, steps_per_execution=1, callbacks=()):
    """Rounds of workers and one server."""
    membership = SimpleNamespace(
        workers=workers, channel=channel, serving={SERVER: channel.serve(0)}
    )
    cluster = SimpleNamespace(check_servers=lambda: None)
    callbacks = keras.callbacks.CallbackList(callbacks, model=workers[0].model)
    callbacks.model.stop_training = False
    return kind(cluster, membership, callbacks, steps_per_execution)


def start_threads(functions):
    """Starts functions at the same time; returns a function that waits for results."""
    results = [None] * len(functions)

    def call(index):
        results[index] = functions[index]()

    threads = [
        threading.Thread(target=call, args=(i,), daemon=True)
        for i in range(len(functions))
    ]
    for thread in threads:
        thread.start()

    def wait():
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "hung"
        return results

    return wait


def take_steps(channel, workers, steps):
    """Takes steps of all workers of a `RoundChannel`; returns their metrics."""
    serves = [channel.serve(index) for index in range(len(channel.devices))]
    calls = [lambda serve=serve: serve(tf.constant(steps)) for serve in serves]
    runs = [lambda worker=worker: worker.run(steps) for worker in workers]
    return start_threads([*runs, *calls])()[: len(workers)]
