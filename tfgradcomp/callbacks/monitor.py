"""Keras callback that reports errors, bytes and times of compression."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from tfgradcomp.assignment.rules import matching_positions, rules_of
from tfgradcomp.callbacks.figures import CALL_SITE, Figures, Sample
from tfgradcomp.callbacks.observing_callback import ObservingCallback
from tfgradcomp.callbacks.outputs import PREFIX, Outputs
from tfgradcomp.callbacks.timestamps import COLLECTIVES
from tfgradcomp.collectives import CollectiveCall
from tfgradcomp.compat.inner_optimizer import trainable_variables
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.core.logging import logger
from tfgradcomp.engine.variable_copies import originals_of


class CompressionMonitor(ObservingCallback):
    r"""Reports errors, bytes and times of compression, every n-th step.

    The figures, whose names begin with `compression/`, go to `logs` and so to
    `History`: the means over the samples of an epoch, or the last figures if the epoch
    has no sample. With `log_dir` each sample goes to TensorBoard, and with
    `prometheus_port` the newest sample goes to Prometheus. Figures that do not apply to
    a method are left out. `docs/monitoring.md` explains all of them.

    A step is sampled if the number of updates so far is a multiple of `every`. The
    weights have the same bits with the callback and without it. All workers must have
    it, since a sample takes a float32 all-reduce of up to \( 2^{20} \) elements of the
    gradient. Cosine, gradient density, vote margin and tie rate come from this sum and
    are the same on all workers; the other figures are of one worker.

    - `quantization_error`: \( \|Q(p) - p\| / \|p\| \), where p is the input of the
      rounding: the gradient, with the method's momentum and residual. Left out for bare
      signs, which have no scale.
    - `cosine`: between the update that all workers apply and the mean of their
      gradients before momentum and residuals.
    - `gradient_density`, `noise_density`: \( \phi(v) = \|v\|_1^2 / (d\,\|v\|_2^2) \) of
      the mean gradient, and of the standard deviation of each element's noise over the
      samples so far. Noise is the difference between a worker's gradient and the mean
      over all workers, or, with one worker, over its samples. `reading` has the paper's
      conclusion.
    - `block_variation`: standard deviation over mean of the gradient's magnitudes in a
      block, the mean over all blocks.
    - `encode_ms`, `exchange_ms`, `decode_ms`: sums over the buckets, by the clock of
      the process. Buckets overlap, and an exchange includes waiting for other workers.
      On a GPU, the clock is read when work is handed to the device. Left out inside
      XLA, which cannot read the clock.
    - `hidden_share`: the part of the time in collectives before the last gradient of
      the step was computed.

    Embedding tables whose rows travel, and variables that are not compressed, count in
    the times and the bytes alone. Uncompressed steps are not sampled.

    With `LocalSteps` a sample is of an exchange, `every` counts exchanges, and the
    gradient is the change of the weights since the last exchange; bytes are the mean
    per step. If groups take turns, the first group is sampled.

    In federated training a sample is of a round, on both sides: give the monitor to
    `Client.fit` as a callback, and to `Hub.serve` as `monitor`.

    Args:
        log_dir: Folder for TensorBoard; with several processes, each writes to
            `log_dir/worker-<rank>`. None: nothing is written.
        every: Steps from one sample to the next.
        prometheus_port: Port of 127.0.0.1 that serves the figures to Prometheus while
            `fit` runs; worker k uses `prometheus_port + k`. 0: any free port, which the
            attribute `prometheus_port` names. None: no port.
        histograms: Rules for variables as `exclude` takes them. Histograms of the
            gradients, sent values and updates of those that are compressed go to
            TensorBoard.

    Raises:
        ValueError: If an argument is out of range; when `fit` begins, if the model is
            not trained by an optimizer of this package, or has no such variables.

    Example:
        ```python
        monitor = tfgradcomp.callbacks.CompressionMonitor("/tmp/logs", every=100)
        history = model.fit(dataset, epochs=3, callbacks=[monitor])
        history.history["compression/quantization_error"]
        ```

    References:
        Wen et al., TernGrad, 2017, Figure 2; Bernstein et al., signSGD, 2018, Section 3
        and Figure 1; Zheng et al., Communication-Efficient Distributed Blockwise
        Momentum SGD with Error-Feedback, 2019, Figure 1.
    """

    _observer: Figures | None = None

    def __init__(
        self,
        log_dir: str | None = None,
        every: int = 100,
        prometheus_port: int | None = None,
        histograms: Any = None,
    ):
        super().__init__()
        check_integer("every", every, 1)
        if prometheus_port is not None:
            check_integer("prometheus_port", prometheus_port, 0, 2**16)
        rules_of(histograms, "histograms")
        if histograms is not None and log_dir is None:
            raise ValueError(
                "Histograms go to TensorBoard. Give its folder as log_dir. "
                f"Received: log_dir=None, histograms={histograms!r}"
            )
        self.log_dir, self.every = log_dir, every
        self.histograms = histograms
        self.outputs = Outputs(log_dir, prometheus_port)

    @property
    def prometheus_port(self) -> int | None:
        """The port that serves the figures to Prometheus; None if there is none."""
        return self.outputs.port

    def on_train_begin(self, logs=None):
        """Opens the port and the folder."""
        super().on_train_begin()
        self._samples, self._last_step = 0, 0
        self._batch, self._unread = -1, self.every
        outcome = self._workers.run(self._open, CALL_SITE)
        if outcome.failures:
            self._close()
            raise ValueError(
                "CompressionMonitor cannot begin on a worker. "
                f"Received: {outcome.failures}"
            ) from outcome.error

    def on_epoch_begin(self, epoch, logs=None):
        """Starts observing, once all callbacks have restored their state."""
        super().on_epoch_begin(epoch)
        self._batch = -1

    def on_train_batch_end(self, batch, logs=None):
        """Reads the sample, if the step was sampled."""
        taken, self._batch = batch - self._batch, batch
        self._unread += taken
        # Samples are `every` updates apart, and a batch is at most one update: most
        # batches need no read.
        if self._observer is None or self._unread + taken <= self.every:
            return
        sample = self._observer.read(self._samples)
        if sample is None:
            return
        self._unread = 0
        self._samples, self._last_step = self._observer.serial, sample.step
        histograms = {self._paths[p]: rows for p, rows in sample.histograms.items()}
        self.outputs.show(sample.step, self._all_figures(sample), histograms)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the means of the epoch's samples to the logs."""
        figures = self.outputs.end_epoch()
        if logs is not None:
            logs.update(figures)

    def on_train_end(self, logs=None):
        """Stops observing, and reports the `reading`."""
        if self._observer and not self._samples:
            logger.warning("CompressionMonitor has sampled no step of this training.")
        reading = self.reading
        if reading and not self._workers.rank:
            logger.info("%s", reading)
        if reading:
            self.outputs.write_text("reading", reading, self._last_step)
        self._close()

    @property
    def reading(self) -> str | None:
        """A sentence on whether signs suit the model, by the latest densities.

        None before there are two samples.
        """
        gradient = self.outputs.latest.get(PREFIX + "gradient_density")
        noise = self.outputs.latest.get(PREFIX + "noise_density")
        if not gradient or not noise:
            return None
        ratio = noise / gradient
        if ratio <= 1:
            verdict = (
                "the gradient is at least as dense as its noise: signs suit this model"
            )
        elif ratio <= 4:
            verdict = (
                "the noise is not much denser than the gradient: signs may do as well "
                "as SGD on this model"
            )
        else:
            verdict = (
                "the noise is much denser than the gradient: where the curvature is, "
                "too, SGD suits this model better than signs"
            )
        return (
            f"Gradient density {gradient:.2f}, noise density {noise:.2f}, R2 = "
            f"{ratio:.2f}: {verdict} (Bernstein et al. 2018, section 3)."
        )

    def _open(self):
        optimizer, rank = self._optimizer, self._workers.rank
        variables = originals_of(trainable_variables(optimizer.inner_optimizer))
        self._paths = {
            position: variables[position].path
            for position in matching_positions(self.histograms, variables, "histograms")
        }
        if self.histograms is not None and not self._paths:
            raise ValueError(
                "No variable of the model matches the rules. "
                f"Received: histograms={self.histograms!r}"
            )
        folder = f"worker-{rank}" if self._workers.num_workers > 1 else ""
        self.outputs.open(str(rank), folder, rank)

    @override
    def _make_observer(self):
        return Figures(self._optimizer, self.every, [*self._paths])

    @override
    def _close(self):
        super()._close()
        self.outputs.close()

    def _all_figures(self, sample: Sample) -> dict[str, float]:
        """Returns the figures of a sample, with bytes and times."""
        traffic, times = self._wrapper.traffic, sample.times
        elements = traffic.elements_compressed + traffic.elements_plain
        float32 = CollectiveCall("sum", elements)
        figures = {
            "bytes_sent": traffic.bytes_sent,
            "bytes_received": traffic.bytes_received,
            "float32_bytes": 4 * float32.words_sent(traffic.num_workers),
            **sample.figures,
        }
        if traffic.elements_compressed:
            figures["bits_per_element"] = traffic.bits_per_element_up
            figures["reply_bits_per_element"] = traffic.bits_per_element_reply
        if times is not None:
            decoding = ("server", "decode", "server and decode")
            figures["encode_ms"] = times.milliseconds(("flatten", "encode"))
            figures["exchange_ms"] = times.milliseconds(COLLECTIVES)
            figures["decode_ms"] = times.milliseconds(decoding)
            if times.hidden_share is not None:
                figures["hidden_share"] = times.hidden_share
        return figures
