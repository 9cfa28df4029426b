"""The commands `tfgradcomp-hub` and `tfgradcomp-join`."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from typing import Any

from tfgradcomp.federated import certificates

_MODEL = "module:function that returns a new compiled Keras model"


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", metavar="FOLDER", help="folder of the state")
    parser.add_argument(
        "--log-dir", metavar="FOLDER", help="folder for figures in TensorBoard"
    )
    parser.add_argument(
        "--prometheus-port",
        type=int,
        metavar="PORT",
        help="port of 127.0.0.1 that serves figures to Prometheus",
    )
    security = parser.add_mutually_exclusive_group(required=True)
    security.add_argument(
        "--certificates", metavar="FOLDER", help="folder with certificates, for TLS"
    )
    security.add_argument(
        "--insecure", action="store_true", help="no TLS: hub and clients on one machine"
    )


def _monitor(options: argparse.Namespace) -> Any:
    """Returns the monitor that a user has asked for, or None."""
    if options.log_dir is None and options.prometheus_port is None:
        return None
    callbacks = importlib.import_module("tfgradcomp.callbacks")
    return callbacks.CompressionMonitor(options.log_dir, 1, options.prometheus_port)


def _hub_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfgradcomp-hub",
        description="Combine what clients learn, in rounds; clients come and go.",
        epilog="--init FOLDER --hosts ... --clients ... makes certificates for TLS.",
    )
    add = parser.add_argument
    add("make_model", help=_MODEL)
    add("--rounds", type=int, required=True, help="rounds of the whole training")
    add("--deadline", type=float, default=600.0, help="seconds a round lasts at most")
    add(
        "--method",
        default="dist_ef_block_sgd",
        help="name of a function in tfgradcomp.methods, or module:function; "
        "its result compresses messages (default: %(default)s)",
    )
    add("--address", default="127.0.0.1:7070", help="default: %(default)s")
    add("--quorum", type=int, default=1, help="least number of clients of a round")
    add("--weights", choices=("equal", "examples"), default="equal")
    add("--outer-rate", type=float, default=1.0, help="learning rate of the anchor")
    add("--outer-momentum", type=float, default=0.0, help="Nesterov's, of the anchor")
    add("--output", metavar="FILE.keras", help="file for the trained model")
    _add_common(parser)
    return parser


def _client_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfgradcomp-join",
        description="Train on this machine's data, and exchange the result by a hub.",
    )
    add = parser.add_argument
    add("address", help="the hub's host:port")
    add("make_model", help=_MODEL)
    add("dataset", help="module:function that returns a tf.data.Dataset of batches")
    add("--every", type=int, default=16, help="local steps a round (%(default)s)")
    add("--name", help="the client's name, without TLS")
    _add_common(parser)
    return parser


def _init_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfgradcomp-hub",
        description="Make the certificates of a hub and its clients, for mutual TLS.",
    )
    add = parser.add_argument
    add("--init", metavar="FOLDER", required=True, help="new folder for the hub")
    add("--hosts", nargs="+", required=True, help="names or addresses of the hub")
    add("--clients", nargs="+", required=True, help="names of the clients")
    return parser


def _call(text: str, argument: str) -> Any:
    """Returns the function that a user has named as `module:function`."""
    module_name, _, name = text.partition(":")
    # As `python -m` does: modules in the current folder can be named.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{argument} must be module:function, in a module that Python finds. "
            f"Received: {argument}={text!r} ({error})"
        ) from error


def _method(text: str) -> Any:
    if ":" in text:
        return _call(text, "method")()
    methods = importlib.import_module("tfgradcomp.methods")
    if text not in methods.__all__ or not text.islower():
        known = [name for name in methods.__all__ if name.islower()]
        raise ValueError(
            f"method must be one of {known}, or module:function. "
            f"Received: method={text!r}"
        )
    return getattr(methods, text)()


def _initialize(options: argparse.Namespace) -> None:
    certificates.create(options.init, options.hosts, options.clients)
    sys.stdout.write(
        f"{options.init} is the hub's folder, for --certificates: keep it there. Copy "
        f"the folder of each client in {options.init}/clients to that client alone.\n"
    )


def _serve(options: argparse.Namespace) -> None:
    federated = importlib.import_module("tfgradcomp.federated")
    security: dict[str, Any] = {"insecure": True}
    if options.certificates:
        accepted = functools.partial(
            certificates.accepted_clients, options.certificates
        )
        credentials = certificates.server_credentials(options.certificates)
        security = {"credentials": credentials, "accepted": accepted}
    outer = federated.OuterStep(
        options.outer_rate, options.outer_momentum, options.outer_momentum > 0
    )
    hub = federated.Hub(
        _call(options.make_model, "make_model"),
        _method(options.method),
        outer=outer,
        weights=options.weights,
        state=options.state,
        address=options.address,
        quorum=options.quorum,
        **security,
    )
    model = hub.serve(options.rounds, options.deadline, monitor=_monitor(options))
    if options.output:
        model.save(options.output)


def _join(options: argparse.Namespace) -> None:
    federated = importlib.import_module("tfgradcomp.federated")
    security: dict[str, Any] = {"insecure": True}
    if options.certificates:
        try:
            certificates.check_hub(options.certificates, options.address)
        except ConnectionError as error:
            # The client goes on trying: the hub may be there later.
            sys.stderr.write(f"tfgradcomp-join: {error}\n")
        credentials = certificates.channel_credentials(options.certificates)
        security = {"credentials": credentials}
    client = federated.Client(
        options.address,
        _call(options.make_model, "make_model"),
        every=options.every,
        state=options.state,
        name=options.name,
        **security,
    )
    monitor = _monitor(options)
    dataset = _call(options.dataset, "dataset")()
    client.fit(dataset, callbacks=[monitor] if monitor else [], verbose=2)


def _run(parser, function, argv) -> int:
    options = parser.parse_args(argv)
    # TensorFlow is imported after --help and errors, and hides its INFO lines.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        function(options)
    except (ImportError, ValueError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    return 0


def hub(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` of `tfgradcomp-hub` and returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--init" in arguments:
        return _run(_init_parser(), _initialize, arguments)
    return _run(_hub_parser(), _serve, arguments)


def join(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` of `tfgradcomp-join` and returns the exit code."""
    return _run(_client_parser(), _join, argv)
