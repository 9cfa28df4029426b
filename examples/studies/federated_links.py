"""Measure federated training of eight clients on slow links, which come and go.

    sudo python examples/studies/federated_links.py
    sudo python examples/studies/federated_links.py --seeds 0 --most 1
    python examples/studies/federated_links.py --tables
    python examples/studies/federated_links.py --quick

A hub and eight clients with unequal parts of Fashion-MNIST, each a process in a network
namespace of its own on a link of 2, 10 or 50 Mbit/s, with mutual TLS. One client is cut
off in the middle of the training, another one joins late. Writes
examples/results/federated.csv (an interrupted run resumes), a table and a figure of
docs/studies/federated.md; `--quick` trains three clients for three rounds without
namespaces, and writes nothing.
"""

import collections
import contextlib
import datetime
import json
import operator
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import study

from tfgradcomp import certificates

import data  # isort: skip
from federated_network import PORT, Unavailable, exit_on_signals, network  # isort: skip

METHODS = ("float32", "1 bit", "2 bits")
PROGRAM = "import federated_programs; federated_programs.main()"
PAGE = "studies/federated.md"
# More needs a kernel with sch_netem.
DELAY = "0ms"
# Megabytes of the first weights, and the last rounds, whose accuracies are averaged.
FIRST, LAST = 0.407, 8
COLUMNS = ("up", "down", "compute")
WORDS = ("carried", "curve", "date")
PATIENCE = 900.0


class Setting(NamedTuple):
    """Properties of the trainings.

    Attributes:
        rates: Rate of each client's link; none: no links, all on this machine.
        clients: Number of clients.
        rounds: Number of rounds.
        every: Local steps a round.
        deadline: Seconds that a round lasts at most.
        cut: The client that is cut off, and the round after which it is.
        late: The client that joins late, and the round after which it does.
        images: Number of images for training.
    """

    rates: tuple[str, ...]
    clients: int
    rounds: int
    every: int
    deadline: float
    cut: tuple[int, int]
    late: tuple[int, int]
    images: int


FULL = Setting(
    rates=("2mbit",) * 3 + ("10mbit",) * 3 + ("50mbit",) * 2,
    clients=8,
    rounds=48,
    every=16,
    deadline=10.0,
    cut=(3, 16),
    late=(2, 24),
    images=60_000,
)
QUICK = Setting((), 3, 3, 2, 10.0, (0, 1), (2, 1), 600)


def parts(labels: np.ndarray, clients: int, seed: int, least: int = 32) -> list:
    """Return the indices of the images of each client.

    The images of each class are divided by shares from a Dirichlet distribution with
    the parameter 0.5, again if a client has fewer than a batch.

    References:
        Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution for
        Federated Visual Classification, 2019.
    """
    generator = np.random.default_rng(seed)
    while True:
        own = [[] for _ in range(clients)]
        for label in range(10):
            found = generator.permutation(np.flatnonzero(labels == label))
            shares = generator.dirichlet(np.full(clients, 0.5))
            ends = (np.cumsum(shares)[:-1] * len(found)).astype(int)
            for one, indices in zip(own, np.split(found, ends), strict=True):
                one.append(indices)
        divided = [np.concatenate(one) for one in own]
        if min(map(len, divided)) >= least:
            return divided


class Training:
    """Starts the programs, cuts one off, and lets another one join late.

    Args:
        folder: Folder for everything.
        key: Method and seed.
        setting: The setting.
        hub: Host of the hub; None without links.
        hosts: Hosts of the clients.
    """

    def __init__(self, folder, key, setting, hub, hosts):
        self._folder, self._key, self._setting = folder, key, setting
        self._hub, self._hosts = hub, hosts
        self._address = f"{hub.address if hub else '127.0.0.1'}:{PORT}"
        self._programs = {}

    def run(self):
        """Train, and return the time of the beginning."""
        setting, folder = self._setting, self._folder
        try:
            self._start("hub", self._hub)
            for number in range(setting.clients):
                self._start(number, self._hosts[number] if self._hosts else None)
            names = ["hub", *range(setting.clients)]
            self._await(lambda: all((folder / f"ready-{n}").exists() for n in names))
            begin = time.monotonic()
            (cut, cut_after), (late, late_after) = setting.cut, setting.late
            for number in range(setting.clients):
                if number != late:
                    (folder / f"go-{number}").touch()
            self._await(lambda: self._round() >= cut_after)
            self._cut(cut)
            self._await(lambda: self._round() >= late_after)
            (folder / f"go-{late}").touch()
            self._await(lambda: (folder / "hub.json").exists())
            self._await(
                lambda: all(
                    (folder / f"client-{n}.json").exists()
                    for n in range(setting.clients)
                    if n != cut
                )
            )
            return begin
        finally:
            for program in self._programs.values():
                program.kill()
                program.wait()

    def _start(self, name, host):
        given = self._key | self._setting._asdict() | {"address": self._address}
        command = [sys.executable, "-c", PROGRAM, str(self._folder)]
        command += [json.dumps(given), str(name)]
        with open(self._folder / f"log-{name}", "wb") as log:
            self._programs[name] = subprocess.Popen(
                host.command(*command) if host else command,
                cwd=Path(__file__).parent,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _await(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            for name, program in self._programs.items():
                if program.poll() or time.monotonic() > end:
                    text = (self._folder / f"log-{name}").read_text()
                    raise RuntimeError(f"{name} has failed:\n{text[-3000:]}")
            time.sleep(0.05)

    def _round(self):
        path = self._folder / "rounds"
        return int(path.read_text().split()[-1]) if path.exists() else 0

    def _cut(self, number):
        """Cut a client off without a word: nobody tells the hub."""
        program = self._programs.pop(number)
        if self._hosts:
            host = self._hosts[number]
            down = ["ip", "-n", host.switch, "link", "set", host.port, "down"]
            subprocess.run(down, check=True)
        program.kill()
        program.wait()


def prepare(folder: Path, host: str, seed: int, setting: Setting):
    """Write the certificates, and the images of each program."""
    names = [f"client-{number}" for number in range(setting.clients)]
    certificates.create(folder / "hub", [host], names)
    (x, y), test = (data.arrays(one) for one in data.first(data.load(), setting.images))
    for number, own in enumerate(parts(y, setting.clients, seed)):
        np.savez(folder / f"part-{number}.npz", x=x[own], y=y[own])
    np.savez(folder / "test.npz", x=test[0], y=test[1])


def train(key: dict, setting: Setting = FULL) -> dict:
    """Return what a training has shown.

    Megabytes and seconds are those of clients that take part all the time.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hub, hosts = None, []
        if setting.rates:
            hub, hosts = stack.enter_context(network(setting.rates, DELAY))
        prepare(folder, hub.address if hub else "127.0.0.1", key["seed"], setting)
        begin = Training(folder, key, setting, hub, hosts).run()
        found = json.loads((folder / "hub.json").read_text())
        away = setting.cut[0], setting.late[0]
        always = [number for number in range(setting.clients) if number not in away]
        clients = [
            json.loads((folder / f"client-{number}.json").read_text())
            for number in always
        ]
        # Without links nothing counts the headers of packets.
        traffic = [(client["sent"], client["received"]) for client in clients]
        if hosts:
            traffic = [hosts[number].counters() for number in always]
    up, down = (statistics.mean(counts) / 1e6 for counts in zip(*traffic, strict=True))
    seconds = [client["compute"] for client in clients]
    # Who was carried has no seconds for a round.
    common = set.intersection(*map(set, seconds))
    return {
        "up": up,
        "down": down,
        "compute": statistics.mean(max(own[n] for own in seconds) for n in common),
        "carried": " ".join(f"{n}:{'+'.join(names)}" for n, names in found["carried"]),
        "curve": " ".join(
            f"{n}:{at - begin:.2f}:{a:.2f}" for n, at, a in found["curve"]
        ),
        "date": str(datetime.date.today()),
    }


class Run:
    """A row of the file, with what follows from it."""

    def __init__(self, row: dict):
        self.up, self.down, self.compute = (row[name] for name in COLUMNS)
        points = [point.split(":") for point in row["curve"].split()]
        self.rounds, self.seconds, self.accuracies = (
            [*map(float, one)] for one in zip(*points, strict=True)
        )
        self.carried = [
            name
            for one in row["carried"].split()
            for name in one.partition(":")[2].split("+")
        ]

    @property
    def accuracy(self) -> float:
        """The accuracy, as a mean over the last rounds: each differs by some tenths."""
        return statistics.mean(self.accuracies[-LAST:])

    @property
    def of_a_round(self) -> float:
        """Seconds that half of the rounds have taken at most."""
        return statistics.median(map(operator.sub, self.seconds[1:], self.seconds))

    def until(self, accuracy: float) -> float:
        """Return the seconds until an accuracy."""
        pairs = zip(self.seconds, self.accuracies, strict=True)
        return next(at for at, reached in pairs if reached >= accuracy)

    def megabytes(self) -> list[float]:
        """Return what a client has sent and received after each round."""
        each = (self.up + self.down - FIRST) / self.rounds[-1]
        return [FIRST + each * number for number in self.rounds]


class Rows:
    """The rows of the file, by methods and seeds."""

    def __init__(self, rows: list[dict]):
        self._runs: dict[str, dict[int, Run]] = {}
        for row in rows:
            self._runs.setdefault(row["method"], {})[row["seed"]] = Run(row)

    def table(self) -> str:
        """Return the table, a row for each method.

        The accuracy of which one is a point below is float32's, with the same seed.
        """
        titles = ["exchange", "accuracy, %", "less float32's", "carried at a deadline"]
        titles += ["s in all", "s until a point below", "s a round", "local steps, s"]
        lines = []
        plain = self._runs.get("float32", {})
        for method, own in self._runs.items():
            each = own.values()
            less = [own[n].accuracy - plain[n].accuracy for n in own if n in plain]
            names = collections.Counter(name for run in each for name in run.carried)
            columns = [
                [run.seconds[-1] for run in each],
                [run.until(plain.get(n, run).accuracy - 1) for n, run in own.items()],
                [run.of_a_round for run in each],
                [run.compute for run in each],
                [run.up for run in each],
                [run.down for run in each],
            ]
            lines.append(
                [
                    method,
                    study.interval_text([run.accuracy for run in each]),
                    study.interval_text(less, "+") if less and own != plain else "",
                    ", ".join(f"{name}: {count}" for name, count in names.items()),
                    *map(study.interval_text, columns),
                ]
            )
        return study.markdown([*titles, "MB up", "MB down"], lines, right=6)

    def draw(self):
        """Draw the accuracy over seconds, and over bytes."""
        made = study.figure("studies/federated", 2, sharey=True)
        if made is None:
            return
        (left, right), save = made
        for number, (method, own) in enumerate(self._runs.items()):
            for seed, run in own.items():
                style = {"color": f"C{number}", "linewidth": 0.9}
                style["label"] = None if seed else method
                left.plot(run.seconds, run.accuracies, **style)
                right.plot(run.megabytes(), run.accuracies, **style)
        left.set(xlabel="seconds", ylabel="test accuracy, %", ylim=(40, None))
        right.set(xlabel="MB that a client has sent and received", xscale="log")
        left.legend()
        save()


def write(rows: list[dict]):
    """Write the page's table and its figure."""
    found = Rows(rows)
    text = found.table()
    print(text, flush=True)
    dates = sorted({row["date"] for row in rows})
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    where = (
        f"{len(rows)} trainings, measured from {dates[0]} to {dates[-1]}, at commits "
        f"{commits}; {FULL.clients} clients and a hub in network namespaces"
    )
    study.write_page(PAGE, text, where, "links")
    found.draw()


def main():
    """Run the study."""
    parser = study.arguments(__doc__)
    add = parser.add_argument
    add("--tables", action="store_true", help="train nothing: of the rows there are")
    add("--most", type=int, help="the most rows to measure")
    given = parser.parse_args()
    study.one_thread_each()
    exit_on_signals()
    if given.quick:
        key = {"method": "1 bit", "seed": 0}
        print(Rows([key | train(key, QUICK)]).table())
        return
    keys = [
        {"method": method, "seed": seed} for seed in given.seeds for method in METHODS
    ]
    measure = None if given.tables else train
    try:
        found = study.complete(
            "federated", keys, measure, COLUMNS, words=WORDS, most=given.most
        )
    except Unavailable as error:
        sys.exit(f"federated_links.py: {error}")
    if found:
        write(found)


if __name__ == "__main__":
    main()
