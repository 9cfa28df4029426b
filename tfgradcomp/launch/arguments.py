"""Command line of the launcher."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys

from tfgradcomp.launch.environment import described_cluster
from tfgradcomp.launch.network import NETWORKS

_EXAMPLES = """\
examples:
  python -m tfgradcomp.launch --workers 4 train.py --epochs 3
  python -m tfgradcomp.launch --workers 2 -m my_package.train --epochs 3
  python -m tfgradcomp.launch --workers 2 --ps 1 train.py   (adds a chief)
  python -m tfgradcomp.launch --cluster a:4000,b:4000 --index 0 train.py   (on host a)
  python -m tfgradcomp.launch --init-tls tls   (then copy the folder to each host)
  python -m tfgradcomp.launch --tls tls --cluster a:4000,b:4000 --index 0 train.py

Each worker gets TF_CONFIG, TFGRADCOMP_RESTART_COUNT (0 at first) and
PYTHONUNBUFFERED=1. Unless you set them yourself, it also gets its share of the cores
(TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS, OMP_NUM_THREADS) and
TF_CPP_MIN_LOG_LEVEL=2, which hides TensorFlow's C++ INFO and WARNING lines. The two
notices that TensorFlow prints at every start are hidden as well.
If TF_CONFIG or Slurm already describes the cluster, the script runs as one process
with its environment unchanged.

With --ps the run lasts as long as the chief: when the chief ends, the workers and
parameter servers are ended. A worker that dies is restarted alone, up to K times with
--max-restarts K.

SIGINT, SIGTERM and SIGHUP are passed on to the workers, which are killed SECONDS later.
If the output cannot be written (full disk, | head), lines are lost; the run goes on.

TensorFlow's servers listen on all interfaces of this host, without a password. With
--network private the workers run in a network that has loopback alone: other machines
cannot reach them, and they cannot download anything. With --tls FOLDER the worker of
this host runs in such a network, too, and reaches the other hosts by mutual TLS alone,
through the program stunnel. If TF_CONFIG is set, --tls runs its task, such as a
parameter server's.

exit code: 0 if all workers ended with 0, else the code of the worker that failed first;
with --ps the code of the chief (128 + signal if a signal ended it). After a signal to
the launcher: the code with which all workers ended by themselves (79: they have saved),
else 128 + signal.
"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line; `command` has the arguments of the Python executable."""
    parser = _parser()
    options = parser.parse_args(argv)
    if sys.platform != "linux":
        parser.error(f"needs Linux, not {sys.platform}: set TF_CONFIG for each worker")
    if options.init_tls:
        return options
    options.command = _command(parser, options)
    for problem in _problems(options):
        parser.error(problem)
    return options


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m tfgradcomp.launch",
        usage="%(prog)s (--workers N [--ps P] | --cluster HOST:PORT,... --index I)\n"
        "         [--max-restarts K] [--grace SECONDS] [--network private|host]\n"
        "         [--tls FOLDER]\n"
        "         (SCRIPT | -m MODULE) [ARGS ...]",
        description="Start the workers of one training run, show their output as "
        "`[index] line`,\nand end all of them when one fails.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, rest = parser.add_argument, argparse.REMAINDER
    add("--workers", type=int, metavar="N", help="start N workers on this host")
    add("--ps", type=int, metavar="P", help="and P parameter servers with a chief")
    add(
        "--cluster",
        type=_addresses,
        metavar="HOST:PORT,...",
        help="all workers of a run on several hosts; starts one of them here",
    )
    add("--index", type=int, metavar="I", help="position in --cluster, from 0")
    restarts = "restart all workers up to K times after a failure (default 0)"
    add("--max-restarts", type=int, default=0, metavar="K", help=restarts)
    grace = "time between the signal to end and SIGKILL (default 5)"
    add("--grace", type=float, default=5.0, metavar="SECONDS", help=grace)
    tls = "connect the hosts by mutual TLS, with the certificate in FOLDER"
    add("--tls", metavar="FOLDER", help=tls)
    init = "make that certificate in a new FOLDER, to be copied to each host"
    add("--init-tls", metavar="FOLDER", help=init)
    network = "hide the workers from other machines, or not (default, with a warning)"
    add("--network", choices=NETWORKS, help=network)
    add("-m", dest="module", nargs=rest, metavar="MODULE", help="run a module")
    add("script", nargs=rest, metavar="SCRIPT", help="run a script")
    return parser


def _command(parser, options):
    if options.module:
        return ["-m", *options.module]
    script = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not script:
        parser.error("no script given: name a script.py, or a module with -m")
    if not os.path.exists(script[0]):
        parser.error(f"script {script[0]!r} does not exist: check its path")
    return script


def _problems(options):
    """Yields a message for each wrong option, or wrong combination of options."""
    if options.max_restarts < 0:
        yield f"--max-restarts is {options.max_restarts}: give 0 or more"
    if not 0 <= options.grace < math.inf:
        yield f"--grace is {options.grace}: give seconds, 0 or more"
    if options.workers is not None and options.workers < 1:
        yield f"--workers is {options.workers}: give 1 or more"
    if options.ps is not None and options.ps < 1:
        yield f"--ps is {options.ps}: give 1 or more, or leave it out"
    if options.ps and options.cluster:
        yield "--ps goes with --workers: on several hosts set TF_CONFIG"
    if options.network == "private" and options.cluster:
        yield "--network private goes with --workers: hosts must reach others"
    yield from _problems_of_tls(options)
    if not (options.workers or options.cluster or described_cluster(os.environ)):
        yield "no workers given: say how many with --workers N, or --cluster"
    if options.workers and options.cluster:
        yield "--workers and --cluster exclude each other: give one of them"
    if bool(options.cluster) != (options.index is not None):
        yield "--cluster and --index belong together: give both or neither"
    count = len(options.cluster or [])
    if options.cluster and not 0 <= options.index < count:
        yield (
            f"--index is {options.index}, but --cluster has {count} workers: "
            f"give 0 to {count - 1}"
        )


def _problems_of_tls(options):
    if not options.tls:
        return
    if options.workers:
        yield "--tls goes with --cluster: on one machine use --network private"
    if options.network:
        yield "--tls hides the worker already: leave out --network"
    has_config = bool(os.environ.get("TF_CONFIG"))
    if has_config and (options.cluster or options.max_restarts):
        yield "TF_CONFIG is set: leave out --cluster, --index and --max-restarts"
    if not has_config and not options.cluster:
        yield "--tls needs the addresses of all hosts: give --cluster, or set TF_CONFIG"


def _addresses(text):
    """Splits HOST:PORT,... and checks each part."""
    addresses = [part.strip() for part in text.split(",")]
    for address in addresses:
        host, _, port = address.rpartition(":")
        bare_ipv6 = ":" in host and not re.fullmatch(r"\[.+\]", host)
        is_port = re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536
        if not host or bare_ipv6 or not is_port:
            raise argparse.ArgumentTypeError(
                f"{address!r} is not HOST:PORT: write for example 10.0.0.1:4000 or "
                "[fe80::1]:4000, ports 1 to 65535"
            )
        if addresses.count(address) > 1:
            raise argparse.ArgumentTypeError(f"{address} is given twice: name it once")
    return addresses
