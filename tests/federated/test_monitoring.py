"""CompressionMonitor on both sides: figures as NumPy's, and the same bits."""

import time
import urllib.request

import numpy as np
import pytest
import tensorflow as tf

from tests.federated import test_hub_logic as hub_logic
from tests.federated.harness import SHAPES, SIZE
from tests.federated.serving import EVERY, Serving, make_data, make_model
from tfgradcomp import methods
from tfgradcomp.callbacks import CompressionMonitor
from tfgradcomp.compressors import Identity
from tfgradcomp.federated import Client, codec
from tfgradcomp.federated.bound_method import BoundMethod
from tfgradcomp.federated.monitoring import HubWatch, opened
from tfgradcomp.federated.service import Traffic
from tfgradcomp.methods import Method
from tfgradcomp.servers import Mean

ONE_BIT = methods.dist_ef_block_sgd()
ROUNDS = 3
norm = np.linalg.norm


def scaled_sign(vector, sizes):
    """A scale and signs for each tensor, as dist-EF-blockSGD rounds."""
    parts = np.split(vector, np.cumsum(sizes)[:-1])
    return np.concatenate(
        [np.abs(v).mean() * np.where(v >= 0, 1.0, -1.0) for v in parts]
    )


def events(folder):
    """The figures in TensorBoard's file, `{name: {step: value}}`."""
    (path,) = folder.iterdir()
    found = {}
    for record in tf.data.TFRecordDataset(str(path)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            steps = found.setdefault(value.tag.removeprefix("compression/"), {})
            steps[event.step] = float(tf.make_ndarray(value.tensor))
    return found


def scrape(monitor):
    url = f"http://127.0.0.1:{monitor.prometheus_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()


class Recorded(Client):
    """A client that notes what it compresses and the bytes of its payloads."""

    def __init__(self, address):
        super().__init__(
            address, make_model, "adam", EVERY, name='li"ma', insecure=True
        )
        self.deltas, self.lengths = [], []

    def _send(self, messages):
        for message in messages:
            if isinstance(message, codec.Push):
                self.lengths.append(len(codec.encode(message)))
        super()._send(messages)

    def _compress(self):
        before = self._logic.anchor.weights
        self.deltas.append(before - self._training.weights)
        return super()._compress()


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """A training with monitors on both sides."""
    folder = tmp_path_factory.mktemp("observed")
    on_hub = CompressionMonitor(str(folder / "hub"), 1, prometheus_port=0)
    on_client = CompressionMonitor(str(folder / "client"), 1, prometheus_port=0)
    texts = []
    serve = {"monitor": on_hub, "on_round": lambda hub: texts.append(scrape(on_hub))}
    with Serving(ROUNDS, serve, method=ONE_BIT) as hub:
        client = Recorded(hub.address)
        show = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: texts.append(scrape(on_client))
        )
        history = client.fit(make_data(), callbacks=[on_client, show], verbose=0)
    return folder, hub, client, history.history, texts


def test_the_figures_of_a_client_are_those_of_numpy(observed):
    folder, _, client, history, _ = observed
    sizes = [w.numpy().size for w in client.model.trainable_variables]
    e = np.zeros(sum(sizes))
    expected = {"quantization_error": [], "residual_norm": [], "zero_share": [0] * 3}
    for delta in client.deltas:
        p = delta + e
        e = p - scaled_sign(p, sizes)
        expected["quantization_error"].append(norm(e) / norm(p))
        expected["residual_norm"].append(norm(e))
    # A word holds 32 signs; each tensor has a scale.
    words = -(-sum(sizes) // 32) + len(sizes)
    expected["bits_per_element"] = [32 * words / sum(sizes)] * ROUNDS
    expected["reply_bits_per_element"] = [32 * words / sum(sizes)] * ROUNDS
    expected["elements_sent"] = [sum(sizes)] * ROUNDS
    # A payload a round, as the mean of a step.
    expected["bytes_sent"] = [length / EVERY for length in client.lengths]
    expected["float32_bytes"] = [4 * sum(sizes)] * ROUNDS
    written = events(folder / "client")
    for name, values in expected.items():
        found = history[f"compression/{name}"]
        np.testing.assert_allclose(found, values, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose([*written[name].values()], found, rtol=1e-6)
        assert [*written[name]] == [*range(ROUNDS)]
    assert written.keys() == {
        *expected,
        *("bytes_received", "block_variation", "encode_ms", "exchange_ms", "decode_ms"),
    }
    assert "loss" in history


def test_the_figures_of_a_hub_are_those_of_the_messages(observed):
    folder, hub, client, history, _ = observed
    written = events(folder / "hub")
    assert [*written["clients_counted"].values()] == [1] * ROUNDS
    for name in ("clients_carried", "clients_left_out"):
        assert [*written[name].values()] == [0] * ROUNDS
    seconds = [closed.seconds for closed in hub.history]
    np.testing.assert_allclose([*written["round_seconds"].values()], seconds, 1e-6)
    lengths = client.lengths
    assert [written["bytes_received"][step] for step in (1, 2)] == lengths[1:]
    assert written["bytes_received"][0] > lengths[0]
    # The reply to a round travels when the round is closed.
    assert written["bytes_sent"][1] == EVERY * history["compression/bytes_received"][0]


def test_rounds_that_close_while_on_round_runs_have_figures(tmp_path):
    def wait_for_the_end(hub):
        end = time.monotonic() + 60
        while hub.round < ROUNDS and time.monotonic() < end:
            time.sleep(0.01)

    monitor = CompressionMonitor(str(tmp_path), 1)
    serve = {"monitor": monitor, "on_round": wait_for_the_end}
    with Serving(ROUNDS, serve, method=ONE_BIT) as hub:
        Client(hub.address, make_model, "adam", EVERY, insecure=True).fit(
            make_data(), verbose=0
        )
    assert [*events(tmp_path)["clients_counted"]] == [*range(ROUNDS)]


def test_prometheus_reads_both_sides(observed):
    _, _, client, history, texts = observed
    on_hub = [text for text in texts if 'worker="hub"' in text]
    on_client = [text for text in texts if r'worker="li\"ma"' in text]
    assert on_hub and len(on_client) == ROUNDS
    assert 'tfgradcomp_clients_counted{worker="hub"} 1.0' in on_hub[-1].splitlines()
    error = history["compression/quantization_error"][-1]
    line = rf'tfgradcomp_quantization_error{{worker="li\"ma"}} {error!r}'
    assert line in on_client[-1].splitlines()


def test_the_weights_have_the_same_bits_without_monitors(observed):
    _, hub, *_ = observed
    with Serving(ROUNDS, method=ONE_BIT) as other:
        Recorded(other.address).fit(make_data(), verbose=0)
    assert other.digest == hub.digest


def test_the_hub_shows_its_residual_and_every_second_round(tmp_path):
    hub = hub_logic.Hub(ONE_BIT)
    deltas = hub_logic.random_deltas(8)
    hub.come("lima", "oslo")
    monitor = CompressionMonitor(str(tmp_path), every=2)
    traffic = {"lima": Traffic(), "oslo": Traffic()}
    traffic["lima"].received = 1000  # before the training
    watch = HubWatch([monitor], hub.logic, traffic)
    sizes = [np.prod(shape) for shape in SHAPES]
    e, server, expected = np.zeros([2, SIZE]), np.zeros(SIZE), {}
    with opened([monitor], "hub"):
        for i in range(4):
            p = deltas[2 * i : 2 * i + 2] + e
            q = np.stack([scaled_sign(row, sizes) for row in p])
            e, whole = p - q, q.mean(0) + server
            server = whole - scaled_sign(whole, sizes)
            expected[i] = norm(server), np.median(norm(q, axis=1))
            for j, name in enumerate(traffic):
                traffic[name].received += 30 + j + 10 * i
                hub.push(name, deltas[2 * i + j])
            watch.closed(hub.logic.history[-1])
        watch.show()
    written = events(tmp_path)
    for j, name in enumerate(["server_residual_norm", "payload_norm"]):
        want = [expected[step][j] for step in (0, 2)]
        assert [*written[name]] == [0, 2]
        np.testing.assert_allclose([*written[name].values()], want, rtol=1e-5)
    assert written["bytes_received"] == {0: 61, 2: 101}


@pytest.mark.parametrize(
    ("method", "present"),
    [
        (Method(Identity(), Mean()), {"quantization_error"}),
        (methods.signsgd(), set()),
        (methods.terngrad(share_scaler=False), {"quantization_error", "clipped_share"}),
        (methods.chunked_top_k(), {"quantization_error", "residual_norm"}),
    ],
)
def test_figures_that_a_method_lacks_are_left_out(method, present):
    bound = BoundMethod(method, SHAPES)
    x, state = hub_logic.random_deltas(1)[0], bound.client_state()
    done = bound.compress(x, state, 1, 0)
    figures = bound.figures(x, done.payload, state, done.state, 1, 0)
    always = {"zero_share", "block_variation", "elements_sent", "bits_per_element"}
    assert figures.keys() == present | always
    q = bound.decode(done.payload)
    assert figures["zero_share"] == np.mean(q == 0)
    if "quantization_error" in present:
        error = norm(q - x.astype(float)) / norm(x)
        np.testing.assert_allclose(figures["quantization_error"], error, atol=1e-6)
    if "residual_norm" in present:
        np.testing.assert_allclose(figures["residual_norm"], norm(x - q), rtol=1e-5)
        assert figures["elements_sent"] == np.count_nonzero(q)


def test_a_taken_port_and_histograms_raise(tmp_path):
    first = CompressionMonitor(prometheus_port=0)
    with opened([first], "hub"):
        second = CompressionMonitor(prometheus_port=first.prometheus_port)
        with pytest.raises(OSError, match="free port.*prometheus_port="):
            with opened([second], "hub"):
                pass
    with_histograms = CompressionMonitor(str(tmp_path), histograms="kernel")
    with pytest.raises(ValueError, match="histograms='kernel'"):
        with opened([with_histograms], "hub"):
            pass
