"""Destinations of figures: TensorBoard's event files, Prometheus' text over HTTP."""

from __future__ import annotations

import http.server
import threading

import numpy as np
import tensorflow as tf

from tfgradcomp.callbacks.figures import KINDS

_BINS = 40
_HOST = "127.0.0.1"
_SCALAR, _TENSOR = 1, 2  # Values of `SummaryMetadata.data_class`.


class TensorBoardWriter:
    """Writes event files; TensorBoard need not be installed.

    Args:
        folder: The folder of this worker.
    """

    def __init__(self, folder: str):
        self._writer = tf.summary.create_file_writer(folder)

    def write(
        self, step: int, figures: dict[str, float], histograms: dict[str, np.ndarray]
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
        rank: This worker's rank, a label of each figure.

    Attributes:
        port: The port that the server listens on.

    Raises:
        OSError: If the port is taken.
    """

    def __init__(self, port: int, rank: int):
        self._rank = rank
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
                f'{metric}{{worker="{self._rank}"}} {value!r}',
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
