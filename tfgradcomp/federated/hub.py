"""The hub of a federated training: the class that users run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import keras

from tfgradcomp.callbacks.monitor import CompressionMonitor
from tfgradcomp.core.arguments import check_instance, check_integer
from tfgradcomp.core.logging import logger
from tfgradcomp.federated import logics, wire
from tfgradcomp.federated.anchor import OuterStep, hexadecimal
from tfgradcomp.federated.monitoring import HubWatch, opened
from tfgradcomp.federated.rounds import Round, Rules, check_rounds
from tfgradcomp.federated.service import Service, Traffic
from tfgradcomp.federated.training_model import TrainingModel
from tfgradcomp.methods import Method

_FAREWELL = 20.0
"""Seconds in which clients fetch the last round, unless the deadline is longer."""


class Hub:
    r"""Combines what clients have learnt, in rounds; clients come and go.

    Client i takes H local steps from the anchor \( \bar x \) to \( x_i \). The method's
    compressor makes a payload of \( \Delta_i = \bar x - x_i \) and its residual; the
    method's server combines the payloads of a round, in the order of the clients'
    numbers, and compresses the reply:

    \( \bar x \leftarrow \mathrm{outer}(\bar x, \mathrm{server}(\Delta_1 \dots
    \Delta_N)) \)

    A round closes when all clients that are connected have sent a payload, or at its
    deadline. Later payloads count in the next round. The hub writes its state into its
    folder before it answers, so that it may be killed and started again at any time:
    nothing is counted twice, and nothing is lost. The same rounds give the same bits.

    Args:
        make_model: Function that returns a new built Keras model, the same on the hub
            and on all clients. Its first weights are the first anchor.
        method: A method of one round, such as `methods.dist_ef_block_sgd()`. It
            compresses all trained variables, small ones included.
        outer: The step that moves the anchor.
        weights: `"equal"`, or `"examples"`: payloads are weighted by the clients'
            numbers of examples, which they name themselves.
        state: The hub's folder. None: nothing is kept, and a hub that ends cannot be
            started again.
        address: `"host:port"`; port 0 takes a free one (`address` then names it).
        credentials: The result of `certificates.server_credentials`, or that of
            `grpc.ssl_server_credentials` with client certificates. The common name in a
            certificate is the client's name.
        accepted: Function that returns the names of the clients that may join. None:
            all with a certificate.
        insecure: Whether everybody on this machine may connect, without certificates.
        quorum: Least number of payloads that close a round.
        norm_limit: A payload whose norm is more than so many times the median of the
            last ones is left out, and its client is named.
        replies_kept: Greatest number of replies that are kept for clients who missed
            them. Who has missed more, or is new, gets the anchor.
        most_clients: Greatest number of clients that may join.
        seed: Seed of the methods' random numbers.

    Attributes:
        address: The address at which the hub listens.
        model: The hub's model; after `serve` it has the weights of the last round.
        history: A `Round` for each round that this hub has closed.
        traffic: Bytes received and sent, by the names of clients.

    Raises:
        ValueError: If an argument is out of range, if the method needs two rounds, or
            if the folder belongs to another training.
        BlockingIOError: If another hub uses the folder.
        OSError: If the port is taken.

    Example:
        ```python
        method = tfgradcomp.methods.dist_ef_block_sgd()
        hub = tfgradcomp.federated.Hub(
            make_model, method, address="127.0.0.1:7070", insecure=True, state="hub"
        )
        hub.serve(rounds=40, deadline=60)
        hub.model.save("trained.keras")
        ```

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from
        Decentralized Data, 2017; Basu et al., Qsparse-local-SGD, 2019; Douillard et
        al., DiLoCo, 2023.
    """

    def __init__(
        self,
        make_model: Callable[[], keras.Model],
        method: Method,
        *,
        outer: OuterStep | None = None,
        weights: str = "equal",
        state: str | Path | None = None,
        address: str = "127.0.0.1:0",
        credentials: grpc.ServerCredentials | None = None,
        accepted: Callable[[], Collection[str]] | None = None,
        insecure: bool = False,
        quorum: int = 1,
        norm_limit: float = 10.0,
        replies_kept: int = 32,
        most_clients: int = 100,
        seed: int = 0,
    ):
        for name, value in (
            ("quorum", quorum),
            ("replies_kept", replies_kept),
            ("most_clients", most_clients),
        ):
            check_integer(name, value, 1)
        if not norm_limit > 1:
            raise ValueError(
                f"norm_limit must be above 1. Received: norm_limit={norm_limit!r}"
            )
        wire.check_security(address, credentials, insecure)
        training = TrainingModel(make_model())
        self.model, self._training = training.model, training
        self._logic, self._store = logics.hub_logic(
            training,
            method,
            Rules(0, 0.0, quorum, replies_kept, norm_limit, most_clients),
            outer,
            weights,
            seed,
            state,
        )
        self._accepted = accepted
        self._service = Service(self._logic, self._save, accepted)
        description = self._logic.kept.description
        texts = len(description.model) + len(description.method)
        most = self._logic.bound.most_bytes + training.statistics.nbytes + 2 * texts
        self._server = grpc.server(
            futures.ThreadPoolExecutor(most_clients + 8, "tfgradcomp-hub"),
            handlers=[self._service.handler()],
            options=wire.options(most),
            maximum_concurrent_rpcs=most_clients + 8,
        )
        try:
            port = (
                self._server.add_insecure_port(address)
                if insecure
                else self._server.add_secure_port(address, credentials)
            )
        except RuntimeError as error:
            if self._store:
                self._store.close()
            raise OSError(
                f"The hub cannot listen at {address}: another program may do so. Give "
                f"another port. Received: {error}"
            ) from error
        if insecure:
            logger.warning(
                "\033[31mThis hub is insecure: every program on this machine can read "
                "and change the model\033[0m"
            )
        self.address = f"{address.rpartition(':')[0]}:{port}"

    @property
    def history(self) -> list[Round]:
        """The rounds that this hub has closed."""
        return self._logic.history

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Bytes that have travelled, by the names of clients."""
        return dict(self._service.traffic)

    @property
    def round(self) -> int:
        """Number of rounds that are closed, those before a restart included."""
        return self._logic.anchor.round

    @property
    def digest(self) -> int:
        """64 bits of a hash of the anchor, equal to that of each client."""
        return self._logic.anchor.digest

    def serve(
        self,
        rounds: int,
        deadline: float,
        on_round: Callable[[Hub], None] | None = None,
        monitor: CompressionMonitor | None = None,
    ) -> keras.Model:
        """Closes rounds until the training has had so many.

        Args:
            rounds: Number of rounds of the training, those before a restart included.
            deadline: Seconds after which a round closes without the clients that have
                not come; more than the clients' local steps and their upload take.
            on_round: Function that is called with the hub after rounds, with the new
                weights in `model`; rounds that close while it runs are skipped. It may
                evaluate and save the model.
            monitor: Shows figures of the rounds in TensorBoard and Prometheus; its
                `every` counts rounds.

        Returns:
            The model with the weights of the last round.

        Raises:
            ValueError: If an argument is out of range.
            OSError: If the state or the monitor's folder cannot be written, or if the
                monitor's port is taken.
        """
        check_rounds(rounds, deadline)
        if monitor is not None:
            check_instance("monitor", monitor, CompressionMonitor)
        logic, service = self._logic, self._service
        logic.rules = logic.rules._replace(rounds=rounds, deadline=deadline)
        service.save()
        logger.info(
            "Hub of training %s at %s, after round %d/%d",
            *(logic.kept.training, self.address, self.round, rounds),
        )
        monitors = [] if monitor is None else [monitor]
        watch = HubWatch(monitors, logic, service.traffic)
        service.on_closed = watch.closed
        with opened(monitors, "hub"), self._running():
            seen = self.round
            while not logic.is_finished:
                with service.changed:
                    service.check()
                    if self.round == seen and not logic.is_finished:
                        service.changed.wait(_until(logic.due))
                        service.tick()
                if self.round > seen:
                    seen = self.round
                    watch.show()
                    self._show(on_round)
            # The last round may have closed during that.
            watch.show()
            self._say_farewell()
        service.check()
        self._show(None)
        logger.info(
            "The training has ended after round %d with the weights %s",
            *(self.round, hexadecimal(self.digest)),
        )
        return self.model

    def _show(self, on_round):
        """Assigns the anchor to the model."""
        self._training.take(self._logic.anchor)
        if on_round is not None:
            on_round(self)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self._server.start()
        try:
            yield
        finally:
            self._server.stop(grace=1.0).wait()
            if self._store:
                self._store.close()

    def _say_farewell(self):
        """Waits until the clients have fetched the last round and left."""
        # A slow link may take as long as a round.
        end = time.monotonic() + max(_FAREWELL, self._logic.rules.deadline)
        with self._service.changed:
            while self._logic.connected and time.monotonic() < end:
                self._service.changed.wait(0.1)

    def _save(self):
        if self._store:
            self._store.save(*self._logic.kept.to_files())


def _until(due: float | None) -> float:
    """Returns the seconds until a time, at most 1; 1 if it has passed."""
    left = 1.0 if due is None else due - time.monotonic()
    return left if 0 < left < 1 else 1.0
