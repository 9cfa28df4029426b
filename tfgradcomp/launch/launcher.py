"""Main program of the launcher: starts the tasks of a run and returns its exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
from typing import Any, NoReturn

from tfgradcomp.certificates import DAYS, create_for_cluster
from tfgradcomp.launch.arguments import parse
from tfgradcomp.launch.chief_group import CHIEF, ChiefGroup
from tfgradcomp.launch.environment import described_cluster, worker_env
from tfgradcomp.launch.network import enter_private_network, reachable_interfaces
from tfgradcomp.launch.output import say
from tfgradcomp.launch.ports import local_address, reserve_ports
from tfgradcomp.launch.private_links import private_links
from tfgradcomp.launch.rendezvous import LauncherRendezvous
from tfgradcomp.launch.signals import signal_socket
from tfgradcomp.launch.worker_group import WorkerGroup


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` and returns the exit code."""
    options = parse(argv)
    if options.init_tls:
        return _make_certificate(options.init_tls)
    if options.tls:
        with signal_socket() as signals:
            return _run_with_tls(options, signals)
    if description := described_cluster(os.environ):
        _run_alone(options, description)
    if options.workers and (problem := _choose_network(options.network)):
        say(problem)
        return 2
    with signal_socket() as signals:
        if options.ps:
            return _run_with_servers(options, signals)
        return _run_with_restarts(options, signals)


def _run_alone(options: argparse.Namespace, description: str) -> NoReturn:
    """Replaces the launcher by the script, whose cluster is described already."""
    given = ("workers", "ps", "cluster", "max_restarts", "network")
    ignored = [f"--{n.replace('_', '-')}" for n in given if getattr(options, n)]
    say(
        f"{description}, so the script runs as one process with its environment "
        "unchanged" + (f"; {' and '.join(ignored)} ignored" if ignored else "")
    )
    os.execv(sys.executable, [sys.executable, *options.command])


def _choose_network(network: str | None) -> str | None:
    """Hides the workers if asked to; returns an error message, or None."""
    if network == "private":
        try:
            enter_private_network()
        except OSError as error:
            return (
                "the kernel gives this user no private network. Run on a machine that "
                "others cannot reach, with --network host. Received: --network "
                f"private, {error.strerror}"
            )
    elif network is None and (names := reachable_interfaces()):
        say(
            f"warning: anyone who can connect through {' or '.join(names)} can run "
            "code in the workers. Isolate the workers with --network private (no "
            "downloads), or hide this line with --network host"
        )
    return None


def _make_certificate(folder: str) -> int:
    try:
        create_for_cluster(folder)
    except (ImportError, OSError, ValueError) as error:
        say(str(error))
        return 2
    say(
        f"made the certificate of a cluster in {folder}, for {DAYS} days. Copy the "
        "folder to each host by a safe way: whoever has it can join the cluster"
    )
    return 0


def _run_with_tls(options: argparse.Namespace, signals: socket.socket) -> int:
    """Runs the task of this host, connected to the others by mutual TLS alone."""
    with contextlib.ExitStack() as stack:
        try:
            config = _described_task(options)
            task = config["task"]
            cluster, env = stack.enter_context(
                private_links(
                    options.tls, config["cluster"], (task["type"], task["index"])
                )
            )
        except (ImportError, OSError, ValueError) as error:
            say(str(error))
            return 2
        os.environ.update(env)
        if options.cluster:
            return _run_with_restarts(options, signals, cluster["worker"])
        described = {"TF_CONFIG": json.dumps({**config, "cluster": cluster})}
        group = WorkerGroup(options.command, options.grace, signals)
        return group.run({f"{task['type']} {task['index']}": os.environ | described})


def _described_task(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the cluster and this host's task, of the command line or TF_CONFIG."""
    if options.cluster:
        task = {"type": "worker", "index": options.index}
        return {"cluster": {"worker": options.cluster}, "task": task}
    text = os.environ["TF_CONFIG"]
    with contextlib.suppress(ValueError, KeyError, TypeError):
        config = json.loads(text)
        if {"type", "index"} <= {*config["task"]} and config["cluster"]:
            return config
    raise ValueError(
        "TF_CONFIG must be JSON with the addresses of a cluster and a task with type "
        f"and index. Received: TF_CONFIG={text!r}"
    )


def _run_with_restarts(
    options: argparse.Namespace,
    signals: socket.socket,
    addresses: list[str] | None = None,
) -> int:
    """Runs the workers; restarts all of them after a failure, as often as allowed.

    `addresses` replaces those of `--cluster` where this host reaches them by others.
    """
    # Held until the launcher ends, so that each restart gets ports never used before.
    locks: list[socket.socket] = []
    addresses = addresses or options.cluster or []
    if options.cluster:
        rendezvous = LauncherRendezvous(
            options.cluster, options.index, signals, addresses[0]
        )
    attempt = 0
    while True:
        if options.cluster:
            cluster, indices = addresses, [options.index]
            attempt = rendezvous.agree(attempt)
        else:
            fresh = reserve_ports(options.workers)
            locks += fresh
            cluster = [local_address(lock) for lock in fresh]
            indices = [*range(options.workers)]
        envs = {}
        for index in indices:
            task: dict[str, object] = {"type": "worker", "index": index}
            envs[str(index)] = worker_env(
                os.environ, {"worker": cluster}, task, len(indices), attempt
            )
        group = WorkerGroup(options.command, options.grace, signals)
        code = group.run(envs)
        if code == 0 or group.received_signal or attempt >= options.max_restarts:
            return code
        attempt += 1
        say(f"restart {attempt} of {options.max_restarts}")


def _run_with_servers(options: argparse.Namespace, signals: socket.socket) -> int:
    """Runs a chief, workers and parameter servers; returns the chief's exit code."""
    counts = {CHIEF: 1, "worker": options.workers, "ps": options.ps}
    locks = reserve_ports(sum(counts.values()))
    addresses = iter([local_address(lock) for lock in locks])
    cluster = {job: [next(addresses) for _ in range(n)] for job, n in counts.items()}
    envs = {}
    for job, count in counts.items():
        for index in range(count):
            task = {"type": job, "index": index}
            label = job if job == CHIEF else f"{job} {index}"
            envs[label] = worker_env(os.environ, cluster, task, len(locks), 0)
    group = ChiefGroup(options.command, options.grace, signals, options.max_restarts)
    return group.run(envs)
