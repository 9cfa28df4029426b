"""A hub and a client train a Keras model over localhost."""

import keras
import numpy as np
import pytest

from tests.federated.serving import EVERY, Serving, make_data, make_model
from tfgradcomp import methods
from tfgradcomp.compressors import Identity
from tfgradcomp.federated import Client, RefusedError
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean

FLOAT32 = Method(Identity(), Mean())


class Watch(keras.callbacks.Callback):
    """Stops a client after some rounds, and notes what its epochs end with."""

    def __init__(self, client, stop_after=None):
        super().__init__()
        self.client, self.stop_after, self.seen = client, stop_after, []

    def on_epoch_end(self, epoch, logs=None):
        weights = [w.numpy().ravel() for w in self.model.trainable_variables]
        common = self.client._logic.anchor.weights
        assert np.array_equal(np.concatenate(weights), common)
        self.seen.append((epoch, sorted(logs)))
        if len(self.seen) == self.stop_after:
            raise KeyboardInterrupt


def test_one_client_without_compression_trains_as_alone():
    with Serving(3, method=FLOAT32) as hub:
        client = Client(hub.address, make_model, "sgd", EVERY, insecure=True)
        watch = Watch(client)
        data = make_data()
        history = client.fit(data, callbacks=[watch], validation_data=data, verbose=0)
    assert watch.seen == [(epoch, ["loss", "val_loss"]) for epoch in range(3)]
    assert len(history.history["loss"]) == 3
    assert hub.digest == client.digest and hub.round == client.round == 3
    alone = make_model()
    alone.optimizer = keras.optimizers.SGD()
    alone.fit(make_data(), epochs=3, verbose=0, shuffle=False)
    for one, other, model in zip(
        alone.variables, client.model.variables, hub.model.variables, strict=True
    ):
        if "optimizer" not in one.path and "metric" not in one.path:
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(other, model)


def test_a_client_goes_on_from_its_folder(tmp_path):
    state = tmp_path / "client"
    with Serving(4, method=methods.dist_ef_block_sgd(), weights="examples") as hub:

        def make_client():
            return Client(hub.address, make_model, "adam", EVERY, state, insecure=True)

        first = make_client()
        with pytest.raises(KeyboardInterrupt):
            first.fit(make_data(), callbacks=[Watch(first, 2)], verbose=0)
        assert first._examples == 64
        steps = int(first.model.optimizer.iterations)
        second = make_client()
        assert second.round == 2
        for old, new in zip(
            first.model.optimizer.variables,
            second.model.optimizer.variables,
            strict=True,
        ):
            np.testing.assert_array_equal(old, new)
        second.fit(make_data(), examples=7, verbose=0)
    assert int(second.model.optimizer.iterations) == steps + 2 * EVERY
    assert hub.digest == second.digest and second._logic.joined.life == 1
    assert 0 < second.sent < second.received
    assert hub.history[0].payload_bytes < 160


def test_a_diverged_client_ends_and_sends_nothing():
    with Serving(1, method=FLOAT32) as hub:
        client = Client(
            hub.address, make_model, keras.optimizers.SGD(np.inf), EVERY, insecure=True
        )
        with pytest.raises(FloatingPointError, match="Lower the inner learning rate"):
            client.fit(make_data(), verbose=0)
        Client(hub.address, make_model, insecure=True).fit(make_data(), verbose=0)
    assert np.isfinite(hub.model.trainable_variables[0]).all()


def test_another_method_is_refused_by_name():
    with Serving(1, method=FLOAT32) as hub:
        method = methods.dist_ef_block_sgd()
        client = Client(hub.address, make_model, method=method, insecure=True)
        with pytest.raises(RefusedError, match="its method is .*ScaledSign.*Identity"):
            client.fit(make_data(), verbose=0)
        Client(hub.address, make_model, insecure=True).fit(make_data(), verbose=0)


def test_what_a_client_needs_is_said():
    def not_compiled():
        return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])

    with pytest.raises(ValueError, match="compiled model"):
        Client("127.0.0.1:9", not_compiled, insecure=True)
    client = Client("127.0.0.1:9", make_model, insecure=True)
    with pytest.raises(ValueError, match="must be a tf.data.Dataset"):
        client.fit(np.zeros([4, 8]))
