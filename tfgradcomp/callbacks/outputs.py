"""Destinations of figures: the logs, TensorBoard's event files, Prometheus' text."""

from __future__ import annotations

import http.server
import math
import posixpath
import threading
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfgradcomp.callbacks.figures import KINDS

_BINS = 40
_HOST = "127.0.0.1"
_SCALAR, _TENSOR = 1, 2  # Values of `SummaryMetadata.data_class`.

PREFIX = "compression/"
_DESCRIPTIONS = {
    "bytes_sent": "Bytes that this worker sends per step, or a hub per round.",
    "bytes_received": "Bytes that this worker receives per step, or a hub per round.",
    "float32_bytes": "Bytes that a float32 ring all-reduce would send per step.",
    "bits_per_element": "Bits per compressed element in a payload.",
    "reply_bits_per_element": "Bits per compressed element in a reply.",
    "elements_sent": "Compressed elements for which this worker has sent a value.",
    "quantization_error": "Length of Q(p) - p over the length of p, on this worker.",
    "cosine": "Cosine between the update and the true mean gradient.",
    "zero_share": "Share of zeros among the values that this worker has sent.",
    "clipped_share": "Share of elements that were clipped, on this worker.",
    "residual_norm": "Length of this worker's residual.",
    "server_residual_norm": "Length of the server's residual on this worker.",
    "vote_margin": "Mean distance of a vote from a tie, 1 if all agree.",
    "tie_rate": "Share of elements whose vote is a tie.",
    "gradient_density": "Density of the mean gradient, 1 for equal magnitudes.",
    "noise_density": "Density of the deviations of the gradient's noise.",
    "block_variation": "Deviation over mean of magnitudes, mean over the blocks.",
    "encode_ms": "Milliseconds of flattening and compressing, over all buckets.",
    "exchange_ms": "Milliseconds in collectives, waiting included, over all buckets.",
    "decode_ms": "Milliseconds of server and decoding, over all buckets.",
    "hidden_share": "Share of the collectives' time before the last gradient.",
    "clients_counted": "Clients whose payloads the last round has counted.",
    "clients_carried": "Clients that the last round has awaited in vain.",
    "clients_left_out": "Clients whose payloads were left out of the last round.",
    "round_seconds": "Seconds from the round before to the last round.",
    "payload_norm": "Median length of the payloads that the last round has counted.",
}
DESCRIPTIONS = {PREFIX + name: text for name, text in _DESCRIPTIONS.items()}


class Outputs:
    """The logs, TensorBoard and Prometheus, where the samples of a monitor go.

    Args:
        log_dir: Folder for TensorBoard; None: nothing is written.
        prometheus_port: Port for Prometheus; 0: any free port; None: no port.

    Attributes:
        latest: The newest figures by their full names.
        port: The port that is open, or was open last.
    """

    def __init__(self, log_dir: str | None, prometheus_port: int | None):
        self.latest: dict[str, float] = {}
        self.port = prometheus_port
        self._log_dir, self._asked_port = log_dir, prometheus_port
        self._epoch: list[dict[str, float]] = []
        self._server: PrometheusServer | None = None
        self._writer: TensorBoardWriter | None = None

    def open(self, label: str, folder: str = "", offset: int = 0) -> None:
        """Opens the port and the folder, and forgets all samples.

        Args:
            label: Name of this program in Prometheus.
            folder: Folder of this program in `log_dir`.
            offset: Distance of this program's port from `prometheus_port`.

        Raises:
            OSError: If the port is taken, or the folder cannot be written.
        """
        self.close()
        self.latest, self._epoch = {}, []
        try:
            if self._asked_port is not None:
                port = self._asked_port + offset if self._asked_port else 0
                self._server = PrometheusServer(port, label)
                self.port = self._server.port
            if self._log_dir is not None:
                path = (
                    posixpath.join(self._log_dir, folder) if folder else self._log_dir
                )
                self._writer = TensorBoardWriter(path)
        except (OSError, tf.errors.OpError) as error:
            self.close()
            raise OSError(
                "CompressionMonitor needs a free port, and a folder that it can write. "
                f"Received: prometheus_port={self._asked_port}, "
                f"log_dir={self._log_dir!r} ({error})"
            ) from error

    def show(
        self,
        step: int,
        figures: Mapping[str, float],
        histograms: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Shows a sample; figures that are not finite are left out.

        Args:
            step: Number of updates before the sample.
            figures: The figures, by the names of `DESCRIPTIONS` without prefix.
            histograms: As for `TensorBoardWriter.write`.
        """
        self.latest = {
            PREFIX + name: float(figures[name])
            for name in _DESCRIPTIONS
            if name in figures and math.isfinite(figures[name])
        }
        self._epoch.append(self.latest)
        if self._writer:
            self._writer.write(step, self.latest, histograms or {})
        if self._server:
            self._server.show(self.latest, DESCRIPTIONS)

    def end_epoch(self) -> dict[str, float]:
        """Returns the means of the epoch's samples; the newest figures without any."""
        for name in {name: None for figures in self._epoch for name in figures}:
            values = [f[name] for f in self._epoch if name in f]
            self.latest[name] = math.fsum(values) / len(values)
        self._epoch = []
        if self._writer:
            self._writer.flush()
        return self.latest

    def write_text(self, name: str, text: str, step: int) -> None:
        """Writes a sentence for TensorBoard."""
        if self._writer:
            self._writer.write_text(PREFIX + name, text, step)

    def close(self) -> None:
        """Releases the port and the folder."""
        if self._server:
            self._server.close()
            self._server = None
        if self._writer:
            self._writer.close()
            self._writer = None


class TensorBoardWriter:
    """Writes event files; TensorBoard need not be installed.

    Args:
        folder: The folder of this worker.
    """

    def __init__(self, folder: str):
        self._writer = tf.summary.create_file_writer(folder)

    def write(
        self,
        step: int,
        figures: Mapping[str, float],
        histograms: Mapping[str, np.ndarray],
    ) -> None:
        """Writes the figures and histograms of a step.

        Args:
            step: The step.
            figures: The figures by their names.
            histograms: Samples of the kinds `figures.KINDS`, by paths of variables.
        """
        for name, value in figures.items():
            self._write(name, tf.constant(value, tf.float32), step, "scalars", _SCALAR)
        for path, rows in histograms.items():
            for kind, values in zip(KINDS, rows, strict=True):
                tensor = tf.constant(_buckets(values), tf.float64)
                self._write(f"compression/{path}/{kind}", tensor, step, "histograms")

    def write_text(self, name: str, text: str, step: int) -> None:
        """Writes a sentence."""
        self._write(name, tf.constant(text), step, "text")

    def _write(self, name, tensor, step, plugin, data_class=_TENSOR):
        metadata = tf.compat.v1.SummaryMetadata(data_class=data_class)
        metadata.plugin_data.plugin_name = plugin
        with self._writer.as_default():
            tf.summary.write(name, tensor, step, metadata)

    def flush(self) -> None:
        """Makes the written values visible to readers."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _buckets(values: np.ndarray) -> np.ndarray:
    """Returns left edge, right edge and count of each bin, TensorBoard's form."""
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, bins=_BINS)
    return np.stack([edges[:-1], edges[1:], counts], axis=1)


class PrometheusServer:
    """Serves figures as Prometheus' text, on the loopback interface alone.

    Args:
        port: The port; 0 for any free port.
        name: Name of this worker, a label of each figure.

    Attributes:
        port: The port that the server listens on.

    Raises:
        OSError: If the port is taken.
    """

    def __init__(self, port: int, name: str):
        for plain, escaped in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n")):
            name = name.replace(plain, escaped)
        self._labels = f'{{worker="{name}"}}'
        self._server = _Server((_HOST, port), _Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="prometheus", daemon=True
        )
        self._thread.start()

    def show(self, figures: dict[str, float], descriptions: dict[str, str]) -> None:
        """Replaces the figures that are served.

        Args:
            figures: The figures by their names.
            descriptions: A sentence on each figure.
        """
        lines = []
        for name, value in figures.items():
            metric = f"tfgradcomp_{name.rpartition('/')[2]}"
            lines += [
                f"# HELP {metric} {descriptions[name]}",
                f"# TYPE {metric} gauge",
                f"{metric}{self._labels} {value!r}",
            ]
        self._server.text = "\n".join([*lines, ""])

    def close(self) -> None:
        """Releases the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    text = ""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self):
        """Answers a scrape."""
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        body = self.server.text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        """Logs nothing."""
